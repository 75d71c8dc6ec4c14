// Causal attention within packed sequences and its gradients, for training: sums and weights are fp32, whatever the inputs are.
//
// Rows that sequences of a cluster share, such as a common prompt, lie in memory once: as queries they run with the first of these
// sequences, and as keys with all of them. A task is a key-value head of a cluster with all its query heads, so that no two tasks
// add to the same gradient, and no result depends on how many threads there are.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tile.h"

// Shapes: S rows, H query heads, J key-value heads, G = H / J, C key width, U value width, L keys of a sequence, R rows of queries by
// position and then by head.

namespace nmoe {

constexpr long BLOCK_ROWS = 4 * MOST_ROWS, BLOCK_KEYS = 14 * PANEL;  // of the backward pass: what is between stays in the L2 cache

inline long whole_panels(long n) { return (n + PANEL - 1) / PANEL * PANEL; }

// A sequence: `prefix` rows from the cluster's first on, then `own` rows from `start` on, whose queries are its own.
struct Span {
    long prefix, start, own;
    long keys() const { return prefix + own; }
    long row(long key, long first) const { return key < prefix ? first + key : start + key - prefix; }
};

// Numbers of a head in rows of tokens.
template <class T>
struct Rows {
    T* at;
    long token, head;
    T* operator()(long row, long h) const { return at + row * token + h * head; }
};

// `from` to `to` of a sequence's keys in columns, `[L / 32, width, 32]`.
template <class T>
void in_columns(Rows<const T> x, long j, const Span& span, long first, long from, long to, long width, float* packed) {
    for (long key = from; key < to; ++key) {
        const T* row = x(span.row(key, first), j);
        float* out = packed + key / PANEL * PANEL * width + key % PANEL;
        float wide[16];
        for (long c = 0; c < width; c += 16) {
            store(wide, load(row + c, nmoe::first(width - c)));
            for (long i = 0; i < std::min(16L, width - c); ++i) out[(c + i) * PANEL] = wide[i];
        }
    }
}

// The same keys in rows of panels of their columns, `[width / 32, most, 32]`.
template <class T>
void in_rows(Rows<const T> x, long j, const Span& span, long first, long from, long to, long width, long most, float* packed) {
    for (long key = from; key < to; ++key) {
        const T* row = x(span.row(key, first), j);
        for (long c = 0; c < width; c += 16)
            store(packed + (c / PANEL * most + key) * PANEL + c % PANEL, load(row + c, nmoe::first(width - c)));
    }
}

// Rows of queries `from` to `to` of a sequence times `scale`, `[R, width]`.
template <class T>
void queries(Rows<const T> x, long j, long group, const Span& span, long from, long to, long width, float scale, float* out) {
    for (long r = from; r < to; ++r, out += width) {
        const T* row = x(span.start + r / group, j * group + r % group);
        for (long c = 0; c < width; c += 16) {
            const mask16 mask = first(width - c);
            store(out + c, load(row + c, mask) * all(scale), mask);
        }
    }
}

// Writes rows `[R, stride]` times `scale[r]` back where `queries` reads them.
template <class T, class Scale>
void write_queries(const float* x, long stride, Scale scale, Rows<T> out, long j, long group, const Span& span, long from, long to,
                   long width) {
    for (long r = from; r < to; ++r, x += stride) {
        T* row = out(span.start + r / group, j * group + r % group);
        const v16 factor = all(scale(r - from));
        for (long c = 0; c < width; c += 16) {
            const mask16 mask = first(width - c);
            store(row + c, load(x + c, mask) * factor, mask);
        }
    }
}

// Rows `[R, width]` as panels of their columns, `[width / 32, R, 32]`.
void panels_of(const float* x, long rows, long width, float* packed) {
    for (long c = 0; c < whole_panels(width); c += 16)
        for (long r = 0; r < rows; ++r)
            store(packed + (c / PANEL * rows + r) * PANEL + c % PANEL, c < width ? load(x + r * width + c, first(width - c)) : zero());
}

// `x[row][columns c to c + 31] += sums`, as far as the row is wide.
inline void add_to(float* row, long c, long width, v16 low, v16 high) {
    const mask16 lower = first(width - c), upper = first(std::max(0L, width - c - 16));
    store(row + c, load(row + c, lower) + low, lower);
    if (width > c + 16) store(row + c + 16, load(row + c + 16, upper) + high, upper);
}

// Softmax weights of `keys` scores, not divided by their sum, and zeros up to `end`. Returns the largest score and the sum.
std::pair<float, float> weigh(float* scores, long keys, long end) {
    const v16 lowest = all(-std::numeric_limits<float>::infinity());
    v16 most = lowest, sum = zero();
    for (long k = 0; k < keys; k += 16) most = max(most, select(first(keys - k), load(scores + k), lowest));
    const float largest = largest_of(most);
    for (long k = 0; k < end; k += 16) {
        const v16 weight = select(first(std::max(0L, keys - k)), exp(load(scores + k) - all(largest)), zero());
        sum = sum + weight;
        store(scores + k, weight);
    }
    return {largest, sum_of(sum)};
}

template <class T>
void packed_attention(Rows<const T> q, Rows<const T> k, Rows<const T> v, const int64_t* spans, const int64_t* clusters, float scale,
                      T* out, float* log_sums, long count, long H, long J, long C, long U, long most) {
    const long group = H / J, width = whole_panels(U), ld = whole_panels(most);
#pragma omp parallel
    {
        std::vector<float> keys(ld * C), values(width * most), scores(MOST_ROWS * ld), rows(MOST_ROWS * C), sums(MOST_ROWS * width);
        float total[MOST_ROWS];
#pragma omp for schedule(dynamic) collapse(2)
        for (long cluster = 0; cluster < count; ++cluster)
            for (long j = 0; j < J; ++j) {
                const long first_row = spans[3 * clusters[cluster] + 1];
                long common = 0;  // leading keys that are packed already
                for (long b = clusters[cluster]; b < clusters[cluster + 1]; ++b) {
                    const Span span{spans[3 * b], spans[3 * b + 1], spans[3 * b + 2]};
                    const long from = std::min(common, span.prefix);
                    in_columns(k, j, span, first_row, from, span.keys(), C, keys.data());
                    in_rows(v, j, span, first_row, from, span.keys(), U, most, values.data());
                    common = span.prefix ? span.prefix : span.own;
                    for (long start = 0; start < span.own * group; start += MOST_ROWS) {
                        const long stop = std::min(start + MOST_ROWS, span.own * group), last = span.prefix + (stop - 1) / group;
                        queries(q, j, group, span, start, stop, C, scale, rows.data());
                        for (long p = 0; p <= last; p += PANEL)
                            product<float>(rows.data(), C, std::integral_constant<long, 1>(), 0, stop - start, keys.data() + p * C, C,
                                           [&](long r, v16 low, v16 high) {
                                               store(scores.data() + r * ld + p, low);
                                               store(scores.data() + r * ld + p + 16, high);
                                           });
                        for (long r = 0; r < stop - start; ++r) {
                            const long row = (start + r) / group;
                            const auto [largest, sum] = weigh(scores.data() + r * ld, span.prefix + row + 1, last + 1);
                            total[r] = 1 / sum;
                            log_sums[(span.start + row) * H + j * group + (start + r) % group] = largest + std::log(sum);
                        }
                        for (long u = 0; u < U; u += PANEL)
                            product<float>(scores.data(), ld, std::integral_constant<long, 1>(), 0, stop - start,
                                           values.data() + u * most, last + 1, [&](long r, v16 low, v16 high) {
                                               store(sums.data() + r * width + u, low);
                                               store(sums.data() + r * width + u + 16, high);
                                           });
                        write_queries(sums.data(), width, [&](long r) { return total[r]; }, Rows<T>{out, H * U, U}, j, group, span,
                                      start, stop, U);
                    }
                }
            }
    }
}

// The gradients of keys and values are added to, in fp32.
template <class T>
void packed_attention_backward(Rows<const T> q, Rows<const T> k, Rows<const T> v, const T* out, const T* grad, const float* log_sums,
                               const int64_t* spans, const int64_t* clusters, float scale, T* grad_q, float* grad_k, float* grad_v,
                               long count, long H, long J, long C, long U, long most) {
    const long group = H / J, wide = whole_panels(C), wide_u = whole_panels(U), ld = BLOCK_KEYS;
#pragma omp parallel
    {
        std::vector<float> keys(whole_panels(most) * C), key_rows(wide * most), values(whole_panels(most) * U);
        std::vector<float> rows(BLOCK_ROWS * C), row_panels(BLOCK_ROWS * wide), grads(BLOCK_ROWS * U), outs(BLOCK_ROWS * U);
        std::vector<float> grad_panels(BLOCK_ROWS * wide_u), weights(BLOCK_ROWS * ld), slopes(BLOCK_ROWS * ld), sums(BLOCK_ROWS * wide);
        float log_sum[BLOCK_ROWS], mean[BLOCK_ROWS];
        const std::integral_constant<long, 1> one;
#pragma omp for schedule(dynamic) collapse(2)
        for (long cluster = 0; cluster < count; ++cluster)
            for (long j = 0; j < J; ++j) {
                const long first_row = spans[3 * clusters[cluster] + 1];
                long common = 0;
                for (long b = clusters[cluster]; b < clusters[cluster + 1]; ++b) {
                    const Span span{spans[3 * b], spans[3 * b + 1], spans[3 * b + 2]};
                    const long from = std::min(common, span.prefix);
                    in_columns(k, j, span, first_row, from, span.keys(), C, keys.data());
                    in_columns(v, j, span, first_row, from, span.keys(), U, values.data());
                    in_rows(k, j, span, first_row, from, span.keys(), C, most, key_rows.data());
                    common = span.prefix ? span.prefix : span.own;
                    for (long start = 0; start < span.own * group; start += BLOCK_ROWS) {
                        const long stop = std::min(start + BLOCK_ROWS, span.own * group), R = stop - start;
                        const long last = span.prefix + (stop - 1) / group;
                        queries(q, j, group, span, start, stop, C, scale, rows.data());
                        queries(Rows<const T>{grad, H * U, U}, j, group, span, start, stop, U, 1, grads.data());
                        queries(Rows<const T>{out, H * U, U}, j, group, span, start, stop, U, 1, outs.data());
                        panels_of(rows.data(), R, C, row_panels.data());
                        panels_of(grads.data(), R, U, grad_panels.data());
                        for (long r = 0; r < R; ++r) {
                            log_sum[r] = log_sums[(span.start + (start + r) / group) * H + j * group + (start + r) % group];
                            v16 sum = zero();
                            for (long u = 0; u < U; u += 16) {
                                const mask16 mask = first(U - u);
                                sum = fma(load(grads.data() + r * U + u, mask), load(outs.data() + r * U + u, mask), sum);
                            }
                            mean[r] = sum_of(sum);
                        }
                        for (long block = 0; block <= last; block += BLOCK_KEYS) {
                            const long L = std::min(BLOCK_KEYS, last + 1 - block);
                            for (long p = 0; p < L; p += PANEL) {
                                product<float>(rows.data(), C, one, 0, R, keys.data() + (block + p) * C, C,
                                               [&](long r, v16 low, v16 high) {
                                                   const long seen = span.prefix + (start + r) / group + 1 - block - p;
                                                   float* at = weights.data() + r * ld + p;
                                                   const v16 sum = all(log_sum[r]);
                                                   store(at, select(first(std::max(0L, seen)), exp(low - sum), zero()));
                                                   store(at + 16, select(first(std::max(0L, seen - 16)), exp(high - sum), zero()));
                                               });
                                product<float>(grads.data(), U, one, 0, R, values.data() + (block + p) * U, U,
                                               [&](long r, v16 low, v16 high) {
                                                   const float* at = weights.data() + r * ld + p;
                                                   float* out = slopes.data() + r * ld + p;
                                                   store(out, load(at) * (low - all(mean[r])));
                                                   store(out + 16, load(at + 16) * (high - all(mean[r])));
                                               });
                            }
                            const auto key_at = [&](float* x, long key, long width) {
                                return x + (span.row(block + key, first_row) * J + j) * width;
                            };
                            for (long u = 0; u < U; u += PANEL)
                                product<float>(weights.data(), 1, ld, 0, L, grad_panels.data() + u * R, R,
                                               [&](long key, v16 low, v16 high) { add_to(key_at(grad_v, key, U), u, U, low, high); });
                            for (long c = 0; c < C; c += PANEL) {
                                product<float>(slopes.data(), 1, ld, 0, L, row_panels.data() + c * R, R,
                                               [&](long key, v16 low, v16 high) { add_to(key_at(grad_k, key, C), c, C, low, high); });
                                product<float>(slopes.data(), ld, one, 0, R, key_rows.data() + c * most + block * PANEL, L,
                                               [&](long r, v16 low, v16 high) {
                                                   float* at = sums.data() + r * wide + c;
                                                   if (block) low = low + load(at), high = high + load(at + 16);
                                                   store(at, low);
                                                   store(at + 16, high);
                                               });
                            }
                        }
                        write_queries(sums.data(), wide, [&](long) { return scale; }, Rows<T>{grad_q, H * C, C}, j, group, span, start,
                                      stop, C);
                    }
                }
            }
    }
}

}  // namespace nmoe

#define NMOE_PACKED(suffix, T)                                                                                                     \
    extern "C" void nmoe_packed_attention_##suffix(const T* q, long q_token, const T* k, long k_token, const T* v, long v_token,   \
                                                   const int64_t* spans, const int64_t* clusters, float scale, T* out,             \
                                                   float* log_sums, long count, long H, long J, long C, long U, long most) {       \
        nmoe::packed_attention<T>({q, q_token, C}, {k, k_token, C}, {v, v_token, U}, spans, clusters, scale, out, log_sums, count, \
                                  H, J, C, U, most);                                                                               \
    }                                                                                                                              \
    extern "C" void nmoe_packed_attention_backward_##suffix(                                                                       \
        const T* q, long q_token, const T* k, long k_token, const T* v, long v_token, const T* out, const T* grad,                 \
        const float* log_sums, const int64_t* spans, const int64_t* clusters, float scale, T* grad_q, float* grad_k,               \
        float* grad_v, long count, long H, long J, long C, long U, long most) {                                                    \
        nmoe::packed_attention_backward<T>({q, q_token, C}, {k, k_token, C}, {v, v_token, U}, out, grad, log_sums, spans, clusters, \
                                           scale, grad_q, grad_k, grad_v, count, H, J, C, U, most);                                \
    }

NMOE_PACKED(fp32, float)
NMOE_PACKED(bf16, nmoe::bf16)
