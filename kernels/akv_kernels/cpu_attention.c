/* Attention over the segments of paged sequences.
 *
 * Every result is a function of its own row alone, bit for bit: not of the other rows in the call, of how a prompt was
 * cut into calls, nor of the number of threads. So each sum has one order, whoever computes it: a sequence's visible
 * keys are counted in stream order, cut into blocks of BLOCK and chunks of CHUNK blocks; an online softmax runs within
 * a chunk, and the chunks are folded in ascending order. A key that a row does not see weighs exactly 0, and adding 0
 * changes no bit. Tiles of several rows do the same operations per row as tiles of one: always inlined from one body,
 * products contracted into sums alike. Slots outside the plan are never read, so garbage or NaN in them cannot spread. No -ffast-math. */
#include "cpu.h"

#define BLOCK 64 /* keys of one step of the online softmax */
#define CHUNK 8  /* blocks that one thread takes at a time */
#define MAX_HEADS 32 /* KV heads of one task */
#define TASK_HEADS 192 /* query rows times grouped heads of a task, about */

typedef struct {
    const int32_t *row_index, *seq_rows, *seq_segments, *seq_pages, *page_table;
    const int32_t *seg_slot, *seg_length, *seg_start, *seg_delta;
    const float *seg_rotation;
    int32_t num_seqs, page_size, half_dim, interleaved;
} Plan;

typedef struct {
    const Plan *plan;
    const float *q;
    int64_t q_stride; /* floats from row to row */
    float *out;
    const char *k_pages, *v_pages;
    int kind, num_q_heads, num_kv_heads, head_dim, group;
    float scale; /* of the scores, times log2(e): probabilities are powers of two */
} Call;

typedef struct {
    int32_t seq, row, num_rows, num_keys; /* keys: those that its last row sees */
} RowBlock;

typedef struct { /* the visible keys number BLOCK * b ... of a sequence, in stream order */
    int num_keys, num_pieces;
    int piece_segment[BLOCK], piece_lane[BLOCK + 1];
    int32_t index[BLOCK], entry[BLOCK];
    int64_t token[BLOCK]; /* page * page_size + offset */
} KeyBlock;

typedef struct {
    float *turned, *score, *piece_score, *keys, *loaded, *values, *most, *sum, *acc, *total_most, *total_sum, *total;
    const float **value_row;
} Task;

static Task task_memory(int m, int heads, int d) {
    Task t = {0};
    size_t floats = (size_t)heads * m * (3 * d + 4) + (size_t)m * 2 * BLOCK + (size_t)3 * BLOCK * d + 12 * 16;
    char *p = scratch(SCRATCH_TASK, floats * sizeof(float) + BLOCK * sizeof(float *));
    if (!p) return t;
#define TAKE(field, count) t.field = (float *)p, p += (((size_t)(count)*4) + 63) & ~(size_t)63
    TAKE(turned, heads * m * d);
    TAKE(score, m * BLOCK);
    TAKE(piece_score, m * BLOCK);
    TAKE(keys, BLOCK * d);
    TAKE(loaded, BLOCK * d);
    TAKE(values, BLOCK * d);
    TAKE(most, heads * m);
    TAKE(sum, heads * m);
    TAKE(acc, heads * m * d);
    TAKE(total_most, heads * m);
    TAKE(total_sum, heads * m);
    TAKE(total, heads * m * d);
#undef TAKE
    t.value_row = (const float **)p;
    return t;
}

/* Which keys block `b` holds, at most up to key `num_keys` of the sequence; `segment` and `before` (keys in earlier
 * segments) are where the search starts, and are moved along. */
static void find_keys(const Plan *plan, int seq, int b, int num_keys, int *segment, int *before, KeyBlock *block) {
    int first = b * BLOCK, end = first + BLOCK < num_keys ? first + BLOCK : num_keys;
    const int32_t *table = plan->page_table + plan->seq_pages[seq];
    int lane = 0, g = *segment, skipped = *before;
    block->num_pieces = 0;
    while (first + lane < end) {
        while (skipped + plan->seg_length[g] <= first + lane) skipped += plan->seg_length[g++];
        int t = first + lane - skipped;
        int left = plan->seg_length[g] - t;
        if (left > end - first - lane) left = end - first - lane;
        block->piece_segment[block->num_pieces] = g;
        block->piece_lane[block->num_pieces++] = lane;
        int slot = plan->seg_slot[g] + t;
        int entry = slot / plan->page_size, offset = slot % plan->page_size;
        for (int i = 0; i < left; entry++, offset = 0) {
            int64_t token = (int64_t)table[entry] * plan->page_size + offset;
            for (; i < left && offset < plan->page_size; i++, offset++, lane++) {
                block->index[lane] = plan->seg_start[g] + t + i;
                block->entry[lane] = entry;
                block->token[lane] = token++;
            }
        }
    }
    block->piece_lane[block->num_pieces] = lane;
    block->num_keys = lane;
    *segment = g;
    *before = skipped;
}

#if defined(__AVX512F__)
/* a[i][j] becomes a[j][i]. */
INLINE void transpose16(__m512 a[16]) {
    __m512 b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            __m512d low = _mm512_castps_pd(b[i + k]), high = _mm512_castps_pd(b[i + k + 2]);
            a[i + 2 * k] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            a[i + 2 * k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    /* a[4i + k] holds, in its 128-bit part p, column 4p + k of rows 4i ... 4i + 3 */
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        b[k] = _mm512_shuffle_f32x4(a[k], a[k + 4], 0x88);
        b[k + 4] = _mm512_shuffle_f32x4(a[k + 8], a[k + 12], 0x88);
        b[k + 8] = _mm512_shuffle_f32x4(a[k], a[k + 4], 0xdd);
        b[k + 12] = _mm512_shuffle_f32x4(a[k + 8], a[k + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        a[k] = _mm512_shuffle_f32x4(b[k], b[k + 4], 0x88);
        a[k + 8] = _mm512_shuffle_f32x4(b[k], b[k + 4], 0xdd);
        a[k + 4] = _mm512_shuffle_f32x4(b[k + 8], b[k + 12], 0x88);
        a[k + 12] = _mm512_shuffle_f32x4(b[k + 8], b[k + 12], 0xdd);
    }
}
#endif

/* keys[d][lane] = rows[lane][d]: what the score tiles read. Lanes past the block's keys are left as they are. */
static void transpose(float *keys, const float *const *rows, int num_keys, int d) {
    int done = 0;
#if defined(__AVX512F__)
    done = d & ~15;
    for (int j0 = 0; j0 < num_keys; j0 += 16)
        for (int d0 = 0; d0 < done; d0 += 16) {
            __m512 a[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(rows[j0 + i < num_keys ? j0 + i : j0] + d0);
            transpose16(a);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) _mm512_storeu_ps(keys + (size_t)(d0 + i) * BLOCK + j0, a[i]);
        }
#elif defined(__AVX2__)
    done = d & ~7;
    for (int j0 = 0; j0 < num_keys; j0 += 8)
        for (int d0 = 0; d0 < done; d0 += 8) {
            __m256 a[8], b[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows[j0 + i < num_keys ? j0 + i : j0] + d0);
#pragma GCC unroll 4
            for (int i = 0; i < 8; i += 2) {
                b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
                b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
            }
#pragma GCC unroll 2
            for (int i = 0; i < 8; i += 4) {
                a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
                a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
                a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
                a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
            }
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                float *to = keys + (size_t)(d0 + k) * BLOCK + j0;
                _mm256_storeu_ps(to, _mm256_permute2f128_ps(a[k], a[k + 4], 0x20));
                _mm256_storeu_ps(to + 4 * BLOCK, _mm256_permute2f128_ps(a[k], a[k + 4], 0x31));
            }
        }
#endif
    for (int j = 0; j < num_keys; j++)
        for (int i = done; i < d; i++) keys[(size_t)i * BLOCK + j] = rows[j][i];
}

/* score[r][lane] = q[r] . key[lane] for `rows` rows and `wide` vectors of lanes; summed in parts of 64 dims, because
 * the rounding of one long sum grows with its length. */
INLINE void score_tile(int rows, int wide, const float *q, int d, const float *keys, float *score) {
    for (int begin = 0; begin < d; begin += 64) {
        int end = begin + 64 < d ? begin + 64 : d;
        vf acc[ROWS][WIDE];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++) acc[r][w] = splat(0);
        for (int i = begin; i < end; i++) {
            vf key[WIDE];
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++) key[w] = load(keys + (size_t)i * BLOCK + w * VL);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vf x = splat(q[r * d + i]);
#pragma GCC unroll 4
                for (int w = 0; w < wide; w++) acc[r][w] += x * key[w];
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++) {
                float *to = score + r * BLOCK + w * VL;
                store(to, begin ? load(to) + acc[r][w] : acc[r][w]);
            }
    }
}

/* acc[r] = acc[r] * keep[r] + sum_j p[r][j] value[j] for `rows` rows and `wide` vectors of dims. */
INLINE void value_tile(int rows, int wide, const float *p, const float *const *values, int num_keys, const float *keep,
                       float *acc, int d, int dim) {
    vf sum[ROWS][WIDE];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int w = 0; w < wide; w++) sum[r][w] = load(acc + r * d + dim + w * VL) * keep[r];
    for (int j = 0; j < num_keys; j++) {
        const float *from = values[j] + dim;
        vf value[WIDE];
#pragma GCC unroll 4
        for (int w = 0; w < wide; w++) value[w] = load(from + w * VL);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf x = splat(p[r * BLOCK + j]);
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++) sum[r][w] += x * value[w];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int w = 0; w < wide; w++) store(acc + r * d + dim + w * VL, sum[r][w]);
}

/* The keys and values that will be used next, and who asks for them: a few at each tile of the work before, since
 * asking for all at once would wait for the memory as reading them does. */
typedef struct {
    const Call *call;
    const KeyBlock *block;
    int head, heads, asked, per_tile;
} Ahead;

static void fetch_tile(Ahead *a) {
    const Call *c = a->call;
    size_t width = element_size(c->kind) * c->head_dim;
    int end = a->asked + a->per_tile < a->block->num_keys ? a->asked + a->per_tile : a->block->num_keys;
    for (; a->asked < end; a->asked++) {
        size_t at = (a->block->token[a->asked] * c->num_kv_heads + a->head) * width;
        for (size_t i = 0; i < a->heads * width; i += 64) {
            __builtin_prefetch(c->k_pages + at + i, 0, 2);
            __builtin_prefetch(c->v_pages + at + i, 0, 2);
        }
    }
}

static void score_lanes(int m, int wide, const float *q, int d, const float *keys, float *score, Ahead *ahead) {
    for (int r = 0; r < m; r += ROWS) {
        int rows = m - r < ROWS ? m - r : ROWS;
        fetch_tile(ahead);
#define TILE(n) score_tile(n, WIDE, q + r * d, d, keys, score + r * BLOCK)
#define NARROW(n) score_tile(n, 1, q + r * d, d, keys, score + r * BLOCK)
        if (wide) FOR_ROWS(rows, TILE) else FOR_ROWS(rows, NARROW)
#undef TILE
#undef NARROW
    }
}

static void add_values(int m, const float *p, const float *const *values, const int *seen, const float *keep,
                       float *acc, int d, Ahead *ahead) {
    for (int r = 0; r < m; r += ROWS) {
        int rows = m - r < ROWS ? m - r : ROWS;
        fetch_tile(ahead);
        int num_keys = seen[r + rows - 1]; /* later rows see no fewer */
        int dim = 0;
#define TILE(n) value_tile(n, WIDE, p + r * BLOCK, values, num_keys, keep + r, acc + r * d, d, dim)
#define NARROW(n) value_tile(n, 1, p + r * BLOCK, values, num_keys, keep + r, acc + r * d, d, dim)
        for (; dim + WIDE * VL <= d; dim += WIDE * VL) FOR_ROWS(rows, TILE)
        for (; dim + VL <= d; dim += VL) FOR_ROWS(rows, NARROW)
#undef TILE
#undef NARROW
        for (; dim < d; dim++)
            for (int i = r; i < r + rows; i++) {
                float sum = acc[i * d + dim] * keep[i];
                for (int j = 0; j < num_keys; j++) sum += p[i * BLOCK + j] * values[j][dim];
                acc[i * d + dim] = sum;
            }
    }
}

/* t->score[m][lane] for one block and head: the query is turned once per segment into `turned` [m][d], `turned_for`
 * says for which segment it is now. */
static void score_block(const Call *c, const RowBlock *rb, int head, const KeyBlock *block, Task *t, float *turned,
                        int *turned_for, Ahead *ahead) {
    const Plan *plan = c->plan;
    int d = c->head_dim, m = rb->num_rows * c->group;
    size_t width = element_size(c->kind) * d;
    const float *rows[BLOCK];
    for (int j = 0; j < block->num_keys; j++) {
        const char *at = c->k_pages + (block->token[j] * c->num_kv_heads + head) * width;
        if (c->kind == FLOAT32)
            rows[j] = (const float *)at;
        else
            read_floats(t->loaded + j * d, at, d, c->kind), rows[j] = t->loaded + j * d;
    }
    transpose(t->keys, rows, block->num_keys, d);
    for (int piece = 0; piece < block->num_pieces; piece++) {
        int g = block->piece_segment[piece], from = block->piece_lane[piece], to = block->piece_lane[piece + 1];
        if (*turned_for != g) {
            const float *table = plan->seg_rotation + (size_t)g * 2 * plan->half_dim;
            int half_dim = plan->seg_delta[g] ? plan->half_dim : 0; /* R(0) changes nothing */
            for (int r = 0; r < rb->num_rows; r++)
                for (int h = 0; h < c->group; h++) {
                    const float *q = c->q + (rb->row + r) * c->q_stride + (size_t)(head * c->group + h) * d;
                    float *to = turned + (r * c->group + h) * d;
                    turn(to, q, table, half_dim, d, plan->interleaved, -1, c->scale, c->scale);
                }
            *turned_for = g;
        }
        if (block->num_pieces == 1) {
            for (int lane = 0; lane < to; lane += WIDE * VL)
                score_lanes(m, 1, turned, d, t->keys + lane, t->score + lane, ahead);
            return;
        }
        for (int lane = from / VL * VL; lane < to; lane += VL) {
            score_lanes(m, 0, turned, d, t->keys + lane, t->piece_score + lane, ahead);
            int a = lane < from ? from : lane, b = lane + VL < to ? lane + VL : to;
            for (int r = 0; r < m; r++)
                for (int j = a; j < b; j++) t->score[r * BLOCK + j] = t->piece_score[r * BLOCK + j];
        }
    }
}

INLINE int count_seen(const KeyBlock *block, int32_t row_index) {
    int seen = block->num_keys;
    while (seen > 0 && block->index[seen - 1] > row_index) seen--;
    return seen;
}

/* One step of the online softmax of one row: scores become weights relative to the largest score so far. Returns by
 * how much the weights of earlier blocks shrink. */
static float weigh(float *score, int seen, float *most, float *sum) {
    if (seen == 0) {
        memset(score, 0, BLOCK * sizeof(float));
        return 1;
    }
    for (int j = seen; j < BLOCK; j++) score[j] = -INFINITY;
    vf high = load(score);
    for (int j = VL; j < BLOCK; j += VL) high = vmax(high, load(score + j));
    float now = max_lanes(high);
    float keep = 0;
    if (*most == -INFINITY)
        *sum = 0;
    else if (now <= *most)
        now = *most, keep = 1;
    else
        keep = exp2_one(*most - now);
    *most = now;
    for (int j = 0; j < BLOCK; j += VL) store(score + j, exp2_lanes(load(score + j) - now));
    for (int j = seen; j < BLOCK; j++) score[j] = 0;
    vf total = load(score);
    for (int j = VL; j < BLOCK; j += VL) total += load(score + j);
    *sum = *sum * keep + sum_lanes(total);
    return keep;
}

/* One chunk of keys for one block of rows and `heads` KV heads: t->most, t->sum [heads][m] and t->acc [heads][m][d]. */
static void attend_chunk(const Call *c, const RowBlock *rb, int first_head, int heads, int chunk, Task *t) {
    const Plan *plan = c->plan;
    int d = c->head_dim, m = rb->num_rows * c->group;
    size_t width = element_size(c->kind) * d;
    for (int r = 0; r < heads * m; r++) t->most[r] = -INFINITY, t->sum[r] = 0;
    memset(t->acc, 0, (size_t)heads * m * d * sizeof(float));
    int segment = plan->seq_segments[rb->seq], before = 0, turned_for[MAX_HEADS];
    for (int h = 0; h < heads; h++) turned_for[h] = -1;
    int begin = chunk * CHUNK, end = (rb->num_keys + BLOCK - 1) / BLOCK;
    if (end > begin + CHUNK) end = begin + CHUNK;
    KeyBlock blocks[2];
    int tiles = heads * 2 * ((m + ROWS - 1) / ROWS); /* of a block: scores, then values */
    find_keys(plan, rb->seq, begin, rb->num_keys, &segment, &before, &blocks[begin % 2]);
    fetch_tile(&(Ahead){c, &blocks[begin % 2], first_head, heads, 0, BLOCK});
    for (int b = begin; b < end; b++) {
        const KeyBlock *block = &blocks[b % 2];
        KeyBlock *next = &blocks[(b + 1) % 2];
        next->num_keys = 0;
        if (b + 1 < end) find_keys(plan, rb->seq, b + 1, rb->num_keys, &segment, &before, next);
        Ahead ahead = {c, next, first_head, heads, 0, (BLOCK + tiles - 1) / tiles};
        for (int h = 0; h < heads; h++) {
            int head = first_head + h, seen[TASK_HEADS];
            float keep[TASK_HEADS];
            score_block(c, rb, head, block, t, t->turned + (size_t)h * m * d, &turned_for[h], &ahead);
            for (int r = 0; r < rb->num_rows; r++) {
                int count = count_seen(block, plan->row_index[rb->row + r]);
                for (int i = r * c->group; i < (r + 1) * c->group; i++) {
                    seen[i] = count;
                    keep[i] = weigh(t->score + i * BLOCK, count, t->most + h * m + i, t->sum + h * m + i);
                }
            }
            for (int j = 0; j < block->num_keys; j++) {
                const char *at = c->v_pages + (block->token[j] * c->num_kv_heads + head) * width;
                if (c->kind == FLOAT32)
                    t->value_row[j] = (const float *)at;
                else
                    read_floats(t->values + j * d, at, d, c->kind), t->value_row[j] = t->values + j * d;
            }
            add_values(m, t->score, t->value_row, seen, keep, t->acc + (size_t)h * m * d, d, &ahead);
        }
    }
}

/* total = total (+) part, for one row: two softmaxes over neighbouring keys become one. */
static void fold(float *total_most, float *total_sum, float *total, float most, float sum, const float *acc, int d) {
    if (most == -INFINITY) return;
    if (*total_most == -INFINITY) {
        *total_most = most, *total_sum = sum;
        memcpy(total, acc, d * sizeof(float));
        return;
    }
    float now = most > *total_most ? most : *total_most;
    float keep = exp2_one(*total_most - now), gain = exp2_one(most - now);
    *total_most = now;
    *total_sum = *total_sum * keep + sum * gain;
    for (int i = 0; i < d; i++) total[i] = total[i] * keep + acc[i] * gain;
}

static void clear_total(const Call *c, const RowBlock *rb, int heads, Task *t) {
    int rows = heads * rb->num_rows * c->group;
    for (int i = 0; i < rows; i++) t->total_most[i] = -INFINITY, t->total_sum[i] = 0;
    memset(t->total, 0, (size_t)rows * c->head_dim * sizeof(float));
}

static void fold_rows(const Call *c, const RowBlock *rb, int heads, Task *t, const float *most, const float *sum,
                      const float *acc) {
    int d = c->head_dim;
    for (int i = 0; i < heads * rb->num_rows * c->group; i++)
        fold(t->total_most + i, t->total_sum + i, t->total + i * d, most[i], sum[i], acc + i * d, d);
}

static void finish(const Call *c, const RowBlock *rb, int first_head, int heads, const Task *t, float *row_weight) {
    int d = c->head_dim, i = 0;
    for (int head = first_head; head < first_head + heads; head++)
        for (int r = 0; r < rb->num_rows; r++)
            for (int h = 0; h < c->group; h++, i++) {
                size_t at = (size_t)(rb->row + r) * c->num_q_heads + head * c->group + h;
                float inverse = t->total_most[i] == -INFINITY ? 0 : 1 / t->total_sum[i];
                for (int k = 0; k < d; k++) c->out[at * d + k] = t->total[i * d + k] * inverse;
                if (row_weight) row_weight[2 * at] = t->total_most[i], row_weight[2 * at + 1] = inverse;
            }
}

typedef struct { /* all the work of one call; a task is one block of rows and `heads` KV heads */
    const Call *call;
    const RowBlock *blocks;
    int num_blocks, most_rows, max_chunks, heads, tasks;
    float *parts;      /* [tasks][max_chunks][heads * most_rows * (head_dim + 2)] where chunks are shared out */
    float *row_weight; /* [num_rows][num_q_heads][2] where page_mass is wanted, else NULL */
    float *page_mass;
    int failed;
} Work;

static int work_memory(Work *work, Task *t) {
    *t = task_memory(work->most_rows, work->heads, work->call->head_dim);
    if (!t->turned) work->failed = 1; /* whoever fails writes the same 1 */
    return !work->failed;
}

static const RowBlock *block_of(const Work *work, int task, int *first_head) {
    int per_block = work->call->num_kv_heads / work->heads;
    *first_head = task % per_block * work->heads;
    return work->blocks + task / per_block;
}

static void whole_tasks(void *args, int begin, int end) {
    Work *work = args;
    const Call *c = work->call;
    Task t;
    if (!work_memory(work, &t)) return;
    for (int n = begin; n < end; n++) {
        int head; /* a prompt's last rows see most: begin with the longest */
        const RowBlock *rb = block_of(work, work->tasks - 1 - n, &head);
        clear_total(c, rb, work->heads, &t);
        for (int chunk = 0; chunk * BLOCK * CHUNK < rb->num_keys; chunk++) {
            attend_chunk(c, rb, head, work->heads, chunk, &t);
            fold_rows(c, rb, work->heads, &t, t.most, t.sum, t.acc);
        }
        finish(c, rb, head, work->heads, &t, work->row_weight);
    }
}

static size_t part_size(const Work *work) {
    return (size_t)work->heads * work->most_rows * (work->call->head_dim + 2);
}

static void single_chunks(void *args, int begin, int end) {
    Work *work = args;
    int head, rows = work->heads * work->most_rows;
    Task t;
    if (!work_memory(work, &t)) return;
    for (int n = begin; n < end; n++) {
        const RowBlock *rb = block_of(work, n / work->max_chunks, &head);
        int chunk = n % work->max_chunks;
        if (chunk * BLOCK * CHUNK >= rb->num_keys) continue;
        t.most = work->parts + n * part_size(work), t.sum = t.most + rows, t.acc = t.sum + rows;
        attend_chunk(work->call, rb, head, work->heads, chunk, &t);
    }
}

static void fold_tasks(void *args, int begin, int end) {
    Work *work = args;
    const Call *c = work->call;
    int head, rows = work->heads * work->most_rows;
    Task t;
    if (!work_memory(work, &t)) return;
    for (int task = begin; task < end; task++) {
        const RowBlock *rb = block_of(work, task, &head);
        clear_total(c, rb, work->heads, &t);
        for (int chunk = 0; chunk * BLOCK * CHUNK < rb->num_keys; chunk++) {
            const float *most = work->parts + ((size_t)task * work->max_chunks + chunk) * part_size(work);
            fold_rows(c, rb, work->heads, &t, most, most + rows, most + 2 * rows);
        }
        finish(c, rb, head, work->heads, &t, work->row_weight);
    }
}

/* The attention mass of the pages of sequences [begin, end): the scores once more, and each finished row's largest
 * score and inverse sum. */
static void mass_of_sequences(void *args, int begin, int end) {
    Work *work = args;
    const Call *c = work->call;
    const Plan *plan = c->plan;
    Task t;
    if (!work_memory(work, &t)) return;
    for (int n = 0; n < work->num_blocks * c->num_kv_heads; n++) {
        const RowBlock *rb = work->blocks + n / c->num_kv_heads;
        if (rb->seq < begin || rb->seq >= end) continue;
        float *page_mass = work->page_mass + plan->seq_pages[rb->seq];
        int head = n % c->num_kv_heads, segment = plan->seq_segments[rb->seq], before = 0, turned_for = -1;
        for (int b = 0; b * BLOCK < rb->num_keys; b++) {
            KeyBlock block;
            find_keys(plan, rb->seq, b, rb->num_keys, &segment, &before, &block);
            Ahead nothing = {c, &block, head, 1, block.num_keys, 0};
            score_block(c, rb, head, &block, &t, t.turned, &turned_for, &nothing);
            float mass[BLOCK] = {0}; /* of each key */
            for (int r = 0; r < rb->num_rows; r++) {
                int seen = count_seen(&block, plan->row_index[rb->row + r]);
                for (int h = 0; h < c->group; h++) {
                    size_t at = (size_t)(rb->row + r) * c->num_q_heads + head * c->group + h;
                    float most = work->row_weight[2 * at], inverse = work->row_weight[2 * at + 1];
                    float *score = t.score + (r * c->group + h) * BLOCK;
                    for (int j = 0; j < BLOCK; j += VL)
                        store(score + j, exp2_lanes(load(score + j) - most) * inverse);
                    for (int j = 0; j < seen; j++) mass[j] += score[j];
                }
            }
            for (int j = 0; j < block.num_keys; j++) page_mass[block.entry[j]] += mass[j];
        }
    }
}

/* Contract: reference.segment_batch_attention. Returns 0, or -1 for want of memory. */
EXPORT int akv_attention(const Plan *plan, const float *q, int64_t q_stride, const void *k_pages, const void *v_pages,
                         int kind, int num_q_heads, int num_kv_heads, int head_dim, float scale, float *out,
                         float *page_mass, int threads) {
    int group = num_q_heads / num_kv_heads, d = head_dim;
    Call c = {plan, q, q_stride, out, k_pages, v_pages, kind, num_q_heads, num_kv_heads, d, group, scale * 1.44269504f};
    int rows_per_block = group < TASK_HEADS ? TASK_HEADS / group : 1;
    int num_rows = plan->seq_rows[plan->num_seqs];

    size_t block_bytes = ((size_t)num_rows * sizeof(RowBlock) + 63) & ~(size_t)63;
    char *memory = scratch(SCRATCH_CALL, block_bytes + (size_t)num_rows * num_q_heads * 2 * sizeof(float) + 64);
    if (!memory) return -1;
    RowBlock *blocks = (RowBlock *)memory;
    Work work = {.call = &c, .blocks = blocks, .page_mass = page_mass};
    if (page_mass) work.row_weight = (float *)(memory + block_bytes);
    int64_t products = 0;
    for (int s = 0; s < plan->num_seqs; s++)
        for (int row = plan->seq_rows[s]; row < plan->seq_rows[s + 1]; row += rows_per_block) {
            int left = plan->seq_rows[s + 1] - row;
            RowBlock rb = {s, row, left < rows_per_block ? left : rows_per_block, 0};
            int last = plan->row_index[row + rb.num_rows - 1];
            for (int g = plan->seq_segments[s]; g < plan->seq_segments[s + 1] && plan->seg_start[g] <= last; g++) {
                int reach = last + 1 - plan->seg_start[g];
                rb.num_keys += reach < plan->seg_length[g] ? reach : plan->seg_length[g];
            }
            int chunks = (rb.num_keys + BLOCK * CHUNK - 1) / (BLOCK * CHUNK);
            if (chunks > work.max_chunks) work.max_chunks = chunks;
            if (rb.num_rows * group > work.most_rows) work.most_rows = rb.num_rows * group;
            products += (int64_t)rb.num_rows * rb.num_keys * num_q_heads * d;
            blocks[work.num_blocks++] = rb;
        }
    /* Few rows: a key's heads lie together and are best read together, if that leaves every thread its share. */
    int pieces = work.num_blocks * (work.max_chunks < 4 * threads ? work.max_chunks : 4 * threads);
    int is_decode = work.most_rows <= 4 * group && num_kv_heads <= MAX_HEADS;
    work.heads = is_decode && (threads == 1 || pieces >= 2 * threads) ? num_kv_heads : 1;
    work.tasks = work.num_blocks * num_kv_heads / work.heads;
    int turns = (work.tasks + threads - 1) / threads; /* of the thread that takes most tasks */
    if (work.max_chunks > 1 && turns < 4 && 10 * turns * threads > 11 * work.tasks) { /* uneven: share out chunks */
        work.parts = scratch(SCRATCH_PARTS, part_size(&work) * work.tasks * work.max_chunks * sizeof(float));
        if (!work.parts) return -1;
        share(single_chunks, &work, work.tasks * work.max_chunks, 1, products / 4, threads);
        share(fold_tasks, &work, work.tasks, 1, products / 256, threads);
    } else
        share(whole_tasks, &work, work.tasks, 1, products / 4, threads);
    if (page_mass && !work.failed) share(mass_of_sequences, &work, plan->num_seqs, 1, products / 4, threads);
    return work.failed ? -1 : 0;
}

