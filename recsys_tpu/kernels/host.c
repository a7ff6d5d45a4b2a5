/* Lookup and row-wise Adagrad over a flat float32 table, for the CPU.  Rows lie anywhere in memory, so
   they are fetched some rows ahead of their turn.  A row, and a bag, belongs to one thread and is summed
   in the order of its ids: results have the same bits for any number of threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

enum { AHEAD = 12, LINE = 16 /* floats of a cache line */ };

static inline void fetch(const float *row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LINE)
        __builtin_prefetch(row + d, 0, 3);
}

/* Adds `source[indices[i]] * weights[i]`, weights NULL: 1, over [start, stop), to `sum`; fetches the rows of
   the indices that follow, before `end`. */
static inline void add_rows(float *restrict sum, const float *restrict source, const int32_t *indices,
                            const float *weights, int64_t start, int64_t stop, int64_t end, int64_t dim) {
    for (int64_t i = start; i < stop; i++) {
        if (i + AHEAD < end)
            fetch(source + (int64_t)indices[i + AHEAD] * dim, dim);
        const float *row = source + (int64_t)indices[i] * dim;
        if (weights) {
            float weight = weights[i];
            for (int64_t d = 0; d < dim; d++)
                sum[d] += weight * row[d];
        } else {
            for (int64_t d = 0; d < dim; d++)
                sum[d] += row[d];
        }
    }
}

/* Position of the first of `indices` outside [0, limit), or -1. */
static int64_t first_outside(const int32_t *indices, int64_t count, int64_t limit) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++)
        largest = (uint32_t)indices[i] > largest ? (uint32_t)indices[i] : largest;
    if (count == 0 || largest < (uint64_t)limit)
        return -1;
    for (int64_t i = 0;; i++)
        if ((uint32_t)indices[i] >= (uint64_t)limit)
            return i;
}

/* out [bags, dim]: sum of each bag's rows, `rows[offsets[b] .. offsets[b + 1])`.  Returns -1, or the
   position of a row outside the table (nothing is written). */
int64_t pooled_lookup(const float *table, int64_t table_rows, const int32_t *rows, const float *weights,
                      const int32_t *offsets, int64_t bags, int64_t dim, float *out, int threads) {
    int64_t ids = offsets[bags], outside = first_outside(rows, ids, table_rows);
    if (outside >= 0)
        return outside;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t bag = 0; bag < bags; bag++) {
        int64_t start = offsets[bag], stop = offsets[bag + 1];
        memset(out + bag * dim, 0, dim * sizeof(float));
        add_rows(out + bag * dim, table, rows, weights, start, stop, ids, dim);
    }
    return -1;
}

/* For each of `unique` rows: gradient = sum over its occurrences, [row_offsets[u] .. row_offsets[u + 1]),
   of grad[bags[i]] * weights[i]; state += mean of its squares; row -= rate * gradient / (sqrt(state) + eps).
   Returns -1, the position of a row outside the table, or -2 without memory for a row a thread (nothing is
   changed then). */
int64_t rowwise_adagrad(float *table, int64_t table_rows, float *state, const float *grad, const int32_t *unique_rows,
                    const int32_t *row_offsets, const int32_t *bags, const float *weights, int64_t unique,
                    int64_t dim, float rate, float eps, int threads) {
    int64_t outside = first_outside(unique_rows, unique, table_rows);
    if (outside >= 0)
        return outside;
    float *buffers = malloc((size_t)threads * dim * sizeof(float));
    if (!buffers)
        return -2;
#pragma omp parallel num_threads(threads)
    {
#ifdef _OPENMP
        float *restrict sum = buffers + omp_get_thread_num() * dim;
#else
        float *restrict sum = buffers;
#endif
#pragma omp for schedule(static)
        for (int64_t u = 0; u < unique; u++) {
            if (u + AHEAD < unique) {
                int64_t later = unique_rows[u + AHEAD];
                fetch(table + later * dim, dim);
                __builtin_prefetch(state + later, 1, 3);
            }
            float *restrict row = table + (int64_t)unique_rows[u] * dim;
            memset(sum, 0, dim * sizeof(float));
            add_rows(sum, grad, bags, weights, row_offsets[u], row_offsets[u + 1], row_offsets[unique], dim);
            float squares = 0;
#pragma omp simd reduction(+ : squares)
            for (int64_t d = 0; d < dim; d++)
                squares += sum[d] * sum[d];
            float accumulated = state[unique_rows[u]] + squares / dim;
            state[unique_rows[u]] = accumulated;
            float step = rate / (sqrtf(accumulated) + eps);
            for (int64_t d = 0; d < dim; d++)
                row[d] -= step * sum[d];
        }
    }
    free(buffers);
    return -1;
}
