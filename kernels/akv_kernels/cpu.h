/* What the C sources of the CPU kernels share: vectors of the machine's width, elements of pages, the rotation, threads,
 * and memory that a thread keeps. The kernels are compiled for the machine they run on by cpu.py and called through
 * ctypes with plain pointers; shapes are checked there. Knows no kernel. */
#pragma once
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* ------------------------------------------------------------------------------------------------- vectors ---- */

#if defined(__AVX512F__)
#define VL 16
#define WIDE 4 /* vectors side by side in a tile: ROWS * WIDE sums, WIDE loads and a broadcast fill the registers */
#elif defined(__AVX2__)
#define VL 8
#define WIDE 2
#elif defined(__aarch64__)
#define VL 4
#define WIDE 4
#else
#define VL 4
#define WIDE 2
#endif
#define ROWS 6 /* rows of a tile */

/* tile(n) for a constant n in 1 ... ROWS, so that each is compiled for itself. */
#define FOR_ROWS(rows, tile)   \
    switch (rows) {            \
    case 1: tile(1); break;    \
    case 2: tile(2); break;    \
    case 3: tile(3); break;    \
    case 4: tile(4); break;    \
    case 5: tile(5); break;    \
    default: tile(6); break;   \
    }

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float vf_any __attribute__((vector_size(VL * 4), aligned(4), may_alias));

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi greater = a > b;
    return (vf)(((vi)a & greater) | ((vi)b & ~greater));
#endif
}

INLINE float sum_lanes(vf x) {
    for (int step = VL / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}

INLINE float max_lanes(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < VL; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

/* 2^x for x <= 126; below -126 it is 2^-126. Relative error 1e-7; exactly 1 at 0.
 * 2^x = 2^n 2^f with n the nearest integer, read off a float that has no bits left for a fraction. */
INLINE vf exp2_lanes(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23 */
    x = vmax(x, splat(-126.0f));
    vf shifted = x + magic;
    vf f = x - (shifted - magic);
    vf p = splat(0.00015461447765119374f);
    p = p * f + 0.0013390866806730628f;
    p = p * f + 0.009618056938052177f;
    p = p * f + 0.055503569543361664f;
    p = p * f + 0.24022650718688965f;
    p = p * f + 0.6931471824645996f;
    p = p * f + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

INLINE float exp2_one(float x) { return exp2_lanes(splat(x))[0]; }

/* ------------------------------------------------------------------------------------------ stored elements ---- */

enum { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

INLINE size_t element_size(int kind) { return kind == FLOAT32 ? 4 : 2; }

INLINE float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

INLINE uint16_t to_bfloat16(float x) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64); /* stays a NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__FLT16_MANT_DIG__)
typedef _Float16 half;
#define HAS_FLOAT16 1
#elif defined(__ARM_FP16_FORMAT_IEEE)
typedef __fp16 half;
#define HAS_FLOAT16 1
#else
typedef uint16_t half; /* never used: akv_has_float16 says no */
#define HAS_FLOAT16 0
#endif

INLINE void read_floats(float *to, const void *from, int n, int kind) {
    if (kind == FLOAT32)
        memcpy(to, from, (size_t)n * 4);
    else if (kind == BFLOAT16)
        for (int i = 0; i < n; i++) to[i] = from_bfloat16(((const uint16_t *)from)[i]);
    else {
        int i = 0;
#if defined(__F16C__)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const half *)from + i))));
#endif
        for (; i < n; i++) to[i] = (float)((const half *)from)[i];
    }
}

INLINE void write_floats(void *to, const float *from, int n, int kind) {
    if (kind == FLOAT32)
        memcpy(to, from, (size_t)n * 4);
    else if (kind == BFLOAT16)
        for (int i = 0; i < n; i++) ((uint16_t *)to)[i] = to_bfloat16(from[i]);
    else
        for (int i = 0; i < n; i++) ((half *)to)[i] = (half)from[i];
}

/* Memory that a thread keeps between calls, one per purpose; NULL if there is none to be had. */
enum { SCRATCH_TASK, SCRATCH_CALL, SCRATCH_PARTS, NUM_SCRATCH };

__attribute__((unused)) static void *scratch(int purpose, size_t bytes) {
    static _Thread_local void *kept[NUM_SCRATCH];
    static _Thread_local size_t size[NUM_SCRATCH];
    if (size[purpose] < bytes) {
        free(kept[purpose]);
        size[purpose] = (bytes + 4095) & ~(size_t)4095;
        kept[purpose] = aligned_alloc(64, size[purpose]);
        if (!kept[purpose]) size[purpose] = 0;
    }
    return kept[purpose];
}

/* ----------------------------------------------------------------------------------------------- rotation ------ */

#define MAX_HEAD_DIM 256

/* to = R(angle) from (direction 1) or R(-angle) from (direction -1): the first 2 * half_dim dims turned and scaled by
 * `scale`, the others scaled by `rest_scale`. `table` holds half_dim cosines, then as many sines. */
INLINE void turn(float *to, const float *from, const float *table, int half_dim, int head_dim, int interleaved,
                 float direction, float scale, float rest_scale) {
    const float *cosine = table, *sine = table + half_dim;
    if (interleaved)
        for (int i = 0; i < half_dim; i++) {
            float a = from[2 * i], b = from[2 * i + 1], s = direction * sine[i];
            to[2 * i] = (a * cosine[i] - b * s) * scale;
            to[2 * i + 1] = (b * cosine[i] + a * s) * scale;
        }
    else
        for (int i = 0; i < half_dim; i++) {
            float a = from[i], b = from[i + half_dim], s = direction * sine[i];
            to[i] = (a * cosine[i] - b * s) * scale;
            to[i + half_dim] = (b * cosine[i] + a * s) * scale;
        }
    for (int i = 2 * half_dim; i < head_dim; i++) to[i] = from[i] * rest_scale;
}

/* ------------------------------------------------------------------------------------------------ threads ------ */

#define SMALL (1 << 15) /* elements, or equally long work, below which waking a thread costs more than it saves */

/* work(args, begin, end) over [0, count) in runs of `grain`, which threads take as they come. */
__attribute__((unused)) static void share(void (*work)(void *, int, int), void *args, int count, int grain,
                                          int64_t elements, int threads) {
    if (grain < 1) grain = 1;
    if (threads <= 1 || count <= grain || elements <= SMALL) {
        if (count > 0) work(args, 0, count);
        return;
    }
    int runs = (count + grain - 1) / grain;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads < runs ? threads : runs)
    for (int n = 0; n < runs; n++) work(args, n * grain, (n + 1) * grain < count ? (n + 1) * grain : count);
}

/* work(args, begin, end) over [0, count), a contiguous part for each thread, in whole units of `unit`. A thread gets the
 * same part in every call of the same shape: what one kernel wrote, the next finds in the cache of its own core, where
 * a line that another core has just written costs as much as hundreds of products. */
__attribute__((unused)) static void share_evenly(void (*work)(void *, int, int), void *args, int count, int unit,
                                                 int64_t elements, int threads) {
    int units = (count + unit - 1) / unit;
    if (threads > units) threads = units;
    if (threads <= 1 || elements <= SMALL) {
        if (count > 0) work(args, 0, count);
        return;
    }
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int n = 0; n < threads; n++) {
        int begin = (int)((int64_t)units * n / threads) * unit, end = (int)((int64_t)units * (n + 1) / threads) * unit;
        work(args, begin, end < count ? end : count);
    }
}

#define ROW_UNIT 16 /* rows of a prompt that stay together */

/* For rows of activations that all cost the same. */
__attribute__((unused)) static void share_rows(void (*work)(void *, int, int), void *args, int count,
                                               int64_t elements, int threads) {
    share_evenly(work, args, count, count >= ROW_UNIT * threads ? ROW_UNIT : 1, elements, threads);
}
