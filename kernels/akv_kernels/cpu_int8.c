/* Linear layers with int8 weights: y[m][n] = sum_g sx[m][g] * sw[n][g] * sum_k xq[m][k] wq[n][k], k over group g of
 * GROUP inputs.
 *
 * Both factors are symmetric int8, the activation quantised here, row by row and group by group, so that a row of y
 * depends on its own row of x alone. The inner sums are of integers and have no order; the outer one runs over the
 * groups in ascending order on every path. Weights are packed for tiles of LANES outputs:
 *   weights [N / LANES][groups][GROUP / 4][LANES][4] int8,  scales [N / LANES][groups][LANES] bfloat16. */
#include "cpu.h"
#if defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define GROUP 64
#define LANES 16
#define QUADS (GROUP / 4)
#define TASK_BLOCKS 4 /* blocks of LANES outputs that all rows of a thread are multiplied with in turn */

typedef struct {
    const int8_t *x;        /* [rows][groups * GROUP] */
    const float *x_scale;   /* [rows][groups] */
    const int32_t *x_shift; /* [rows][groups] -128 * sum of the group */
    const int8_t *weights;
    const uint16_t *scales;
    int groups;
} Quantised;

typedef int8_t vb __attribute__((vector_size(VL)));

INLINE vi imax(vi a, vi b) {
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    vi greater = a > b;
    return (a & greater) | (b & ~greater);
#endif
}

INLINE int32_t max_of(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t most = x[0];
    for (int i = 1; i < VL; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

INLINE int32_t sum_of(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int i = 0; i < VL; i++) sum += x[i];
    return sum;
#endif
}

static void quantise_row(const float *x, int size, int groups, int8_t *q, float *scale, int32_t *shift) {
    for (int g = 0; g < groups; g++) {
        float part[GROUP];
        const float *from = x + g * GROUP;
        if (size - g * GROUP < GROUP) {
            memset(part, 0, sizeof part);
            from = memcpy(part, from, (size - g * GROUP) * sizeof(float));
        }
        vi most_bits = {0}; /* floats of one sign order like their bits */
        for (int i = 0; i < GROUP; i += VL) most_bits = imax(most_bits, (vi)load(from + i) & 0x7fffffff);
        int32_t bits = max_of(most_bits);
        float most;
        memcpy(&most, &bits, 4);
        float inverse = most >= 1e-30f ? 127 / most : 0;
        vi sums = {0};
        for (int i = 0; i < GROUP; i += VL) {
            vi values = (vi)(load(from + i) * inverse + 12582912.0f) - 0x4b400000; /* the nearest integers */
            vb bytes = __builtin_convertvector(values, vb);
            memcpy(q + g * GROUP + i, &bytes, VL);
            sums += values;
        }
        scale[g] = most / 127; /* a NaN or infinity in the group stays one */
        shift[g] = -128 * sum_of(sums);
    }
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define TILE_ROWS 6
#define TILE_WIDE 4

/* dot += bytes . quad. The intrinsic is the same instruction, but gcc 12 copies its sum in and out of memory. */
INLINE void add_bytes(__m512i *dot, __m512i bytes, __m512i quad) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*dot) : "v"(bytes), "v"(quad));
}

INLINE __m512 load_scales(const uint16_t *scales) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)scales));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

/* sum + dot * by_row * scale, for the outputs of a block and one group of inputs. */
INLINE __m512 add_group(__m512 sum, __m512i dot, float by_row, __m512 scale) {
    return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(by_row)), scale, sum);
}

INLINE void int8_tile(int rows, int wide, const Quantised *a, int row, int block, float *out) {
    int groups = a->groups;
    size_t per_block = (size_t)groups * QUADS * LANES * 4;
    const int8_t *weights = a->weights + block * per_block, *x = a->x + (size_t)row * groups * GROUP;
    const __m512i bias = _mm512_set1_epi8(-128);
    for (int g = 0; g < groups; g++) {
        const int8_t *quads = x + (size_t)g * GROUP, *bytes = weights + (size_t)g * QUADS * LANES * 4;
        __m512i dot[TILE_ROWS][TILE_WIDE];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++) dot[r][w] = _mm512_set1_epi32(a->x_shift[(size_t)(row + r) * groups + g]);
        for (int k = 0; k < QUADS; k++) {
            __m512i weight[TILE_WIDE]; /* + 128: the instruction's first side is unsigned; x_shift takes it out */
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++)
                weight[w] = _mm512_xor_si512(_mm512_loadu_si512(bytes + w * per_block + k * LANES * 4), bias);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                int32_t quad;
                memcpy(&quad, quads + (size_t)r * groups * GROUP + 4 * k, 4);
#pragma GCC unroll 4
                for (int w = 0; w < wide; w++) add_bytes(&dot[r][w], weight[w], _mm512_set1_epi32(quad));
            }
        }
#pragma GCC unroll 4
        for (int w = 0; w < wide; w++) {
            __m512 scale = load_scales(a->scales + ((size_t)(block + w) * groups + g) * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                float *at = out + (r * TILE_WIDE + w) * LANES;
                __m512 sum = g ? _mm512_loadu_ps(at) : _mm512_setzero_ps();
                _mm512_storeu_ps(at, add_group(sum, dot[r][w], a->x_scale[(size_t)(row + r) * groups + g], scale));
            }
        }
    }
}

#if defined(__AMX_INT8__) && defined(__linux__)
#define AMX_ROWS 16
#define AMX_MIN_ROWS 4 /* as dear as 16 */

/* The matrix unit multiplies 16 rows by one tile of weights in one instruction; the kernel must allow it first. */
static int has_amx(void) {
    static int known = 0; /* 1: yes, -1: no; asking twice does no harm */
    if (!known) known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0 ? 1 : -1;
    return known > 0;
}

static void amx_begin(void) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) eight_full_tiles = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&eight_full_tiles);
}

/* int8_tile for 16 rows and one block of outputs: the same integers, then the same operations on floats. Asks for
 * bytes [fetch_begin, fetch_end) of each tile of weights that comes next, for all rows do that together. */
static void amx_tile(const Quantised *a, int row, int block, float *out, size_t out_stride, size_t fetch_begin,
                     size_t fetch_end) {
    int groups = a->groups;
    const int8_t *weights = a->weights + (size_t)block * groups * QUADS * LANES * 4;
    const uint16_t *scales = a->scales + (size_t)block * groups * LANES;
    const int8_t *x = a->x + (size_t)row * groups * GROUP;
    const float *x_scale = a->x_scale + (size_t)row * groups;
    size_t stride = (size_t)groups * GROUP, tile_bytes = QUADS * LANES * 4;
    const int8_t *next = weights + TASK_BLOCKS * groups * tile_bytes;
    int32_t dots[2][AMX_ROWS * LANES] __attribute__((aligned(64)));
    __m512 sum[AMX_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < AMX_ROWS; r++) {
        __builtin_prefetch(out + r * out_stride, 1); /* to write: it may lie in another core's cache */
        sum[r] = _mm512_setzero_ps();
    }
    /* The matrix unit works on one group while the vector units add up the one before it. */
#define MULTIPLY(i, g)                                                             \
    _tile_zero(i);                                                                 \
    _tile_loadd(4, x + (g) * GROUP, stride);                                       \
    _tile_loadd(5, weights + (g) * tile_bytes, LANES * 4);                         \
    _tile_dpbssd(i, 4, 5);
#define ADD(i, g)                                                                  \
    _tile_stored(i, dots[i], LANES * 4);                                           \
    scale = load_scales(scales + (g) * LANES);                                     \
    for (size_t byte = fetch_begin; byte < fetch_end; byte += 64)                  \
        _mm_prefetch(next + (g) * tile_bytes + byte, _MM_HINT_T1);                 \
    _Pragma("GCC unroll 16") for (int r = 0; r < AMX_ROWS; r++) sum[r] =           \
        add_group(sum[r], _mm512_load_si512(dots[i] + r * LANES), x_scale[r * groups + (g)], scale);
    __m512 scale;
    int g = 0;
    MULTIPLY(0, 0)
    for (; g + 2 < groups; g += 2) {
        MULTIPLY(1, g + 1)
        ADD(0, g)
        MULTIPLY(0, g + 2)
        ADD(1, g + 1)
    }
    if (g + 1 < groups) {
        MULTIPLY(1, g + 1)
        ADD(0, g)
        ADD(1, g + 1)
    } else {
        ADD(0, g)
    }
#undef MULTIPLY
#undef ADD
#pragma GCC unroll 16
    for (int r = 0; r < AMX_ROWS; r++) _mm512_storeu_ps(out + r * out_stride, sum[r]);
}
#endif

#elif defined(__AVX2__)
#define TILE_ROWS 2
#define TILE_WIDE 2

INLINE void int8_tile(int rows, int wide, const Quantised *a, int row, int block, float *out) {
    int groups = a->groups;
    size_t per_block = (size_t)groups * QUADS * LANES * 4;
    const int8_t *x = a->x + (size_t)row * groups * GROUP;
    const __m256i ones = _mm256_set1_epi16(1);
    for (int w = 0; w < wide; w++) {
        const int8_t *weights = a->weights + (block + w) * per_block;
        __m256 sum[TILE_ROWS][2];
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
        for (int g = 0; g < groups; g++) {
            __m256i dot[TILE_ROWS][2];
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) dot[r][0] = dot[r][1] = _mm256_setzero_si256();
            for (int k = 0; k < QUADS; k++) {
                const int8_t *at = weights + ((size_t)g * QUADS + k) * LANES * 4;
#pragma GCC unroll 2
                for (int side = 0; side < 2; side++) {
                    /* |w| * (x with w's sign): both at most 127, so that pairs cannot saturate 16 bits */
                    __m256i weight = _mm256_loadu_si256((const __m256i *)(at + 32 * side));
                    __m256i size = _mm256_abs_epi8(weight);
#pragma GCC unroll 2
                    for (int r = 0; r < rows; r++) {
                        int32_t quad;
                        memcpy(&quad, x + ((size_t)r * groups + g) * GROUP + 4 * k, 4);
                        __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_set1_epi32(quad), weight));
                        dot[r][side] = _mm256_add_epi32(dot[r][side], _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
            const uint16_t *scales = a->scales + ((size_t)(block + w) * groups + g) * LANES;
#pragma GCC unroll 2
            for (int side = 0; side < 2; side++) {
                __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(scales + 8 * side)));
                __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
#pragma GCC unroll 2
                for (int r = 0; r < rows; r++) {
                    __m256 by_row = _mm256_set1_ps(a->x_scale[(size_t)(row + r) * groups + g]);
                    __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(dot[r][side]), by_row);
                    sum[r][side] = _mm256_fmadd_ps(part, scale, sum[r][side]);
                }
            }
        }
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++)
            for (int side = 0; side < 2; side++)
                _mm256_storeu_ps(out + (r * TILE_WIDE + w) * LANES + 8 * side, sum[r][side]);
    }
}

#else
#define TILE_ROWS 2
#define TILE_WIDE 1
typedef int16_t vs __attribute__((vector_size(16)));

/* dot[i] += the four signed bytes i of `bytes` . the four of `quad`; none is -128, so that two products fit 16 bits. */
INLINE vi add_quads(vi dot, vi bytes, vi quad) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)dot, (int8x16_t)bytes, (int8x16_t)quad);
#else
    vs weight = (vs)bytes, x = (vs)quad;
    vi pairs = (vi)(((weight << 8) >> 8) * ((x << 8) >> 8) + (weight >> 8) * (x >> 8));
    return dot + ((pairs << 16) >> 16) + (pairs >> 16);
#endif
}

INLINE void int8_tile(int rows, int wide, const Quantised *a, int row, int block, float *out) {
    int groups = a->groups;
    (void)wide;
    for (int g = 0; g < groups; g++) {
        const int8_t *weights = a->weights + ((size_t)block * groups + g) * QUADS * LANES * 4;
        const uint16_t *scales = a->scales + ((size_t)block * groups + g) * LANES;
        vi dot[TILE_ROWS][4] = {{{0}}};
        for (int k = 0; k < QUADS; k++)
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) {
                vi bytes;
                memcpy(&bytes, weights + (k * 4 + part) * 16, 16);
#pragma GCC unroll 2
                for (int r = 0; r < rows; r++) {
                    int32_t quad;
                    memcpy(&quad, a->x + ((size_t)(row + r) * groups + g) * GROUP + 4 * k, 4);
                    dot[r][part] = add_quads(dot[r][part], bytes, quad - (vi){0});
                }
            }
        for (int r = 0; r < rows; r++) {
            float *sum = out + r * LANES, by_row = a->x_scale[(size_t)(row + r) * groups + g];
            for (int n = 0; n < LANES; n++)
                sum[n] = (g ? sum[n] : 0) + (float)dot[r][n / 4][n % 4] * by_row * from_bfloat16(scales[n]);
        }
    }
}
#endif

static void int8_rows(int rows, int wide, const Quantised *a, int row, int block, float *out) {
#define TILE(n) int8_tile(n, TILE_WIDE, a, row, block, out)
#define NARROW(n) int8_tile(n, 1, a, row, block, out)
#if TILE_ROWS == 6
    if (wide == TILE_WIDE) FOR_ROWS(rows, TILE) else FOR_ROWS(rows, NARROW)
#else
    if (wide == TILE_WIDE) {
        if (rows == TILE_ROWS) TILE(TILE_ROWS);
        else for (int r = 0; r < rows; r++) int8_tile(1, TILE_WIDE, a, row + r, block, out + r * TILE_WIDE * LANES);
    } else
        for (int r = 0; r < rows; r++) int8_tile(1, 1, a, row + r, block, out + r * TILE_WIDE * LANES);
#endif
#undef TILE
#undef NARROW
}

static void put_tile(float *out, int num_outputs, int row, int rows, int block, int wide, const float *tile,
                     int stride) {
    int first = block * LANES, width = wide * LANES;
    if (width > num_outputs - first) width = num_outputs - first;
    for (int r = 0; r < rows; r++)
        memcpy(out + (size_t)(row + r) * num_outputs + first, tile + r * stride, width * sizeof(float));
}

typedef struct {
    Quantised a;
    const float *x;
    float *out;
    int64_t x_stride;
    int num_rows, num_inputs, num_outputs;
} Linear;

static void quantise_rows(void *args, int begin, int end) {
    Linear *l = args;
    size_t groups = l->a.groups;
    for (size_t r = begin; r < (size_t)end; r++)
        quantise_row(l->x + r * l->x_stride, l->num_inputs, l->a.groups, (int8_t *)l->a.x + r * groups * GROUP,
                     (float *)l->a.x_scale + r * groups, (int32_t *)l->a.x_shift + r * groups);
}

/* Rows [row, row_end) times blocks [block, block_end). */
static void multiply(const Linear *l, int row, int row_end, int block, int block_end) {
#if defined(AMX_ROWS)
    if (row_end - row >= AMX_MIN_ROWS && has_amx()) {
        amx_begin();
        int whole_blocks = l->num_outputs / LANES, tiles = (row_end - row + AMX_ROWS - AMX_MIN_ROWS) / AMX_ROWS;
        for (int tile = 0; tile < tiles; tile++, row += AMX_ROWS)
            for (int b = block; b < block_end; b++) {
                int rows = row_end - row < AMX_ROWS ? row_end - row : AMX_ROWS;
                float edge[AMX_ROWS * LANES], *out = l->out + (size_t)row * l->num_outputs + b * LANES;
                int in_place = rows == AMX_ROWS && b < whole_blocks;
                amx_tile(&l->a, row, b, in_place ? out : edge, in_place ? l->num_outputs : LANES,
                         16 * tile / tiles * 64, 16 * (tile + 1) / tiles * 64);
                if (!in_place) put_tile(l->out, l->num_outputs, row, rows, b, 1, edge, LANES);
            }
        if (row > row_end) row = row_end;
        _tile_release();
    }
#endif
    while (block < block_end) {
        int wide = block_end - block >= TILE_WIDE ? TILE_WIDE : 1;
        for (int r = row; r < row_end; r += TILE_ROWS) {
            int rows = row_end - r < TILE_ROWS ? row_end - r : TILE_ROWS;
            float tile[TILE_ROWS * TILE_WIDE * LANES];
            int8_rows(rows, wide, &l->a, r, block, tile);
            put_tile(l->out, l->num_outputs, r, rows, block, wide, tile, TILE_WIDE * LANES);
        }
        block += wide;
    }
}

static void all_outputs(void *args, int begin, int end) {
    Linear *l = args;
    int blocks = (l->num_outputs + LANES - 1) / LANES;
    quantise_rows(args, begin, end);
    for (int block = 0; block < blocks; block += TASK_BLOCKS)
        multiply(l, begin, end, block, block + TASK_BLOCKS < blocks ? block + TASK_BLOCKS : blocks);
}

static void all_rows(void *args, int begin, int end) {
    Linear *l = args;
    for (int block = begin; block < end; block += TASK_BLOCKS)
        multiply(l, 0, l->num_rows, block, block + TASK_BLOCKS < end ? block + TASK_BLOCKS : end);
}

/* x [num_rows][x_stride] float32 -> out [num_rows][num_outputs] float32. Returns 0, or -1 for want of memory. */
EXPORT int akv_int8_linear(const float *x, int64_t x_stride, int num_rows, int num_inputs, const int8_t *weights,
                           const uint16_t *scales, int num_outputs, float *out, int threads) {
    int groups = (num_inputs + GROUP - 1) / GROUP, blocks = (num_outputs + LANES - 1) / LANES;
    size_t padded = (size_t)num_rows + ROW_UNIT; /* the last tile may read past the last row; what comes of it is dropped */
    char *memory = scratch(SCRATCH_CALL, padded * groups * (GROUP + 8));
    if (!memory) return -1;
    float *x_scale = (float *)(memory + padded * groups * GROUP);
    int32_t *x_shift = (int32_t *)(x_scale + padded * groups);
    Linear args = {{(int8_t *)memory, x_scale, x_shift, weights, scales, groups}, x, out, x_stride, num_rows,
                   num_inputs, num_outputs};
    int64_t products = (int64_t)num_rows * num_inputs * num_outputs;
    if (num_rows >= 2 * ROW_UNIT * threads) /* rows enough: each thread reads all weights, and keeps its rows */
        share_rows(all_outputs, &args, num_rows, products / 16, threads);
    else {
        quantise_rows(&args, 0, num_rows);
        share_evenly(all_rows, &args, blocks, TASK_BLOCKS, products / 16, threads);
    }
    return 0;
}

typedef struct {
    const float *weight; /* [num_outputs][num_inputs] */
    int8_t *weights;
    uint16_t *scales;
    int num_outputs, num_inputs;
} Pack;

static void pack_blocks(void *args, int begin, int end) {
    Pack p = *(Pack *)args;
    int groups = (p.num_inputs + GROUP - 1) / GROUP;
    for (int block = begin; block < end; block++)
        for (int g = 0; g < groups; g++) {
            size_t at = (size_t)block * groups + g;
            for (int n = 0; n < LANES; n++) {
                int output = block * LANES + n, left = p.num_inputs - g * GROUP, size = left < GROUP ? left : GROUP;
                float part[GROUP] = {0}, most = 0;
                if (output < p.num_outputs)
                    memcpy(part, p.weight + (size_t)output * p.num_inputs + g * GROUP, size * sizeof(float));
                for (int i = 0; i < GROUP; i++) most = fabsf(part[i]) > most ? fabsf(part[i]) : most;
                uint16_t scale = to_bfloat16(most / 127);
                if (from_bfloat16(scale) * 127 < most) scale++; /* the next larger one: nothing is clipped */
                p.scales[at * LANES + n] = scale;
                float inverse = most > 1e-30f ? 1 / from_bfloat16(scale) : 0;
                for (int i = 0; i < GROUP; i++) {
                    float step = rintf(part[i] * inverse);
                    step = step > 127 ? 127 : step < -127 ? -127 : step;
                    p.weights[((at * QUADS + i / 4) * LANES + n) * 4 + i % 4] = (int8_t)step;
                }
            }
        }
}

/* Quantise and pack a weight for akv_int8_linear. */
EXPORT void akv_int8_pack(const float *weight, int num_outputs, int num_inputs, int8_t *weights, uint16_t *scales,
                          int threads) {
    Pack args = {weight, weights, scales, num_outputs, num_inputs};
    share_rows(pack_blocks, &args, (num_outputs + LANES - 1) / LANES, (int64_t)num_outputs * num_inputs, threads);
}
