/* What a layer does beside attention and its linears: rotary positions and the writing of pages, moving tokens between
 * pages, RMSNorm, SiLU. Each row by itself; the contracts are those of reference.py. */
#include "cpu.h"

EXPORT int akv_has_float16(void) { return HAS_FLOAT16; }

typedef struct {
    float *q;
    int64_t q_stride;
    const float *k;
    int64_t k_stride;
    const float *v;
    int64_t v_stride;
    char *k_pages, *v_pages;
    const int64_t *slots;
    const float *rotation;
    int num_q_heads, num_kv_heads, head_dim, half_dim, interleaved, kind;
    float scale;
} Rope;

static void rope_tokens(void *args, int begin, int end) {
    Rope a = *(Rope *)args;
    size_t head_bytes = element_size(a.kind) * a.head_dim, token_bytes = head_bytes * a.num_kv_heads;
    for (int64_t t = begin; t < end; t++) {
        const float *table = a.rotation + t * 2 * a.half_dim;
        for (int h = 0; h < a.num_q_heads; h++) {
            float *x = a.q + t * a.q_stride + (size_t)h * a.head_dim, turned[MAX_HEAD_DIM];
            turn(turned, x, table, a.half_dim, a.head_dim, a.interleaved, 1, a.scale, 1);
            memcpy(x, turned, a.head_dim * sizeof(float));
        }
        if (a.slots[t] < 0) continue;
        char *key = a.k_pages + a.slots[t] * token_bytes, *value = a.v_pages + a.slots[t] * token_bytes;
        for (int h = 0; h < a.num_kv_heads; h++) {
            float turned[MAX_HEAD_DIM];
            const float *x = a.k + t * a.k_stride + (size_t)h * a.head_dim;
            turn(turned, x, table, a.half_dim, a.head_dim, a.interleaved, 1, a.scale, 1);
            write_floats(key + h * head_bytes, turned, a.head_dim, a.kind);
        }
        write_floats(value, a.v + t * a.v_stride, a.num_kv_heads * a.head_dim, a.kind);
    }
}

/* Contract: reference.rope_and_write; q is turned in place. Strides in floats from token to token. */
EXPORT void akv_rope_and_write(float *q, int64_t q_stride, const float *k, int64_t k_stride, const float *v,
                               int64_t v_stride, void *k_pages, void *v_pages, const int64_t *slots,
                               const float *rotation, int num_tokens, int num_q_heads, int num_kv_heads, int head_dim,
                               int half_dim, int interleaved, float scale, int kind, int threads) {
    Rope args = {q,        q_stride,    k,            k_stride, v,        v_stride,    k_pages, v_pages, slots,
                 rotation, num_q_heads, num_kv_heads, head_dim, half_dim, interleaved, kind,    scale};
    int64_t elements = (int64_t)num_tokens * (num_q_heads + 2 * num_kv_heads) * head_dim;
    share_rows(rope_tokens, &args, num_tokens, elements, threads);
}

typedef struct {
    char *k_pages, *v_pages;
    const int64_t *src, *dst;
    const float *rotation;
    int num_kv_heads, head_dim, half_dim, interleaved, kind;
} Repos;

static void repos_tokens(void *args, int begin, int end) {
    Repos a = *(Repos *)args;
    size_t head_bytes = element_size(a.kind) * a.head_dim, token_bytes = head_bytes * a.num_kv_heads;
    for (int64_t t = begin; t < end; t++) {
        const char *from = a.k_pages + a.src[t] * token_bytes;
        char *to = a.k_pages + a.dst[t] * token_bytes;
        for (int h = 0; h < a.num_kv_heads; h++) {
            float x[MAX_HEAD_DIM], turned[MAX_HEAD_DIM];
            read_floats(x, from + h * head_bytes, a.head_dim, a.kind);
            turn(turned, x, a.rotation + t * 2 * a.half_dim, a.half_dim, a.head_dim, a.interleaved, 1, 1, 1);
            write_floats(to + h * head_bytes, turned, a.head_dim, a.kind);
        }
        memcpy(a.v_pages + a.dst[t] * token_bytes, a.v_pages + a.src[t] * token_bytes, token_bytes);
    }
}

/* Contract: reference.repos_pages. */
EXPORT void akv_repos_pages(void *k_pages, void *v_pages, const int64_t *src, const int64_t *dst, const float *rotation,
                            int num_tokens, int num_kv_heads, int head_dim, int half_dim, int interleaved, int kind,
                            int threads) {
    Repos args = {k_pages, v_pages, src, dst, rotation, num_kv_heads, head_dim, half_dim, interleaved, kind};
    share_rows(repos_tokens, &args, num_tokens, (int64_t)num_tokens * num_kv_heads * head_dim * 2, threads);
}

typedef struct {
    const float *x, *residual, *weight;
    float eps, *out, *total;
    int hidden;
} Norm;

static void norm_rows(void *args, int begin, int end) {
    Norm a = *(Norm *)args;
    for (int64_t row = begin; row < end; row++) {
        const float *from = a.x + row * a.hidden;
        float *to = a.out + row * a.hidden;
        if (a.residual) {
            float *sum = a.total + row * a.hidden;
            for (int i = 0; i < a.hidden; i++) sum[i] = from[i] + a.residual[row * a.hidden + i];
            from = sum;
        }
        vf squares = splat(0);
        int i = 0;
        for (; i + VL <= a.hidden; i += VL) squares += load(from + i) * load(from + i);
        float square = sum_lanes(squares);
        for (; i < a.hidden; i++) square += from[i] * from[i];
        float norm = 1 / sqrtf(square / a.hidden + a.eps);
        for (i = 0; i < a.hidden; i++) to[i] = from[i] * norm * a.weight[i];
    }
}

/* Contract: reference.rms_norm. `residual` and `total` are both given or both NULL. */
EXPORT void akv_rms_norm(const float *x, const float *residual, const float *weight, float eps, float *out,
                         float *total, int num_rows, int hidden, int threads) {
    Norm args = {x, residual, weight, eps, out, total, hidden};
    share_rows(norm_rows, &args, num_rows, (int64_t)num_rows * hidden, threads);
}

typedef struct {
    const float *gate_up;
    float *out;
    int size;
} Silu;

/* silu(x) = x / (1 + 2^(-x log2 e)), the power held within +-126: what that changes is far below rounding. */
static void silu_rows(void *args, int begin, int end) {
    Silu a = *(Silu *)args;
    for (int64_t row = begin; row < end; row++) {
        const float *gate = a.gate_up + row * 2 * a.size, *up = gate + a.size;
        float *to = a.out + row * a.size;
        for (int i = 0; i < a.size; i += VL) {
            int n = a.size - i < VL ? a.size - i : VL;
            vf g = splat(0), u = splat(0);
            if (n == VL)
                g = load(gate + i), u = load(up + i);
            else
                memcpy(&g, gate + i, n * sizeof(float)), memcpy(&u, up + i, n * sizeof(float));
            vf power = -vmax(g * 1.44269504f, splat(-126)); /* exp2_lanes holds the other side */
            vf y = g / (1.0f + exp2_lanes(power)) * u;
            if (n == VL)
                store(to + i, y);
            else
                memcpy(to + i, &y, n * sizeof(float));
        }
    }
}

/* Contract: reference.silu_mul. */
EXPORT void akv_silu_mul(const float *gate_up, float *out, int num_rows, int size, int threads) {
    Silu args = {gate_up, out, size};
    share_rows(silu_rows, &args, num_rows, (int64_t)num_rows * size, threads);
}
