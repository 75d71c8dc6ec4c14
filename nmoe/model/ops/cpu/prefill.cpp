// Attention of many queries of one sequence to the keys up to each: blocks of queries pass blocks of keys, with a running softmax
// (FlashAttention, Dao et al. 2022, arXiv:2205.14135).
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "tile.h"

// Shapes: L queries, the last of S positions, H query heads, J key-value heads, C key width, U value width.

namespace nmoe {

constexpr long QUERIES = 4 * MOST_ROWS, KEYS = 4 * PANEL;  // of a block

// A number of `source` with token and head strides, as T.
template <class T>
struct View {
    const T* at;
    long token, head;
    const T* operator()(long t, long h) const { return at + t * token + h * head; }
};

// `packed[k, column]` of a panel with 32 columns, where bf16 lie in pairs of k.
template <class T>
inline T& place(T* panel, long k, long column) {
    constexpr long pair = 4 / sizeof(T);
    return panel[(k / pair * PANEL + column) * pair + k % pair];
}

// Softmax weights of scores below `largest`, as T; returns their sum.
template <class T>
inline float weigh(const float* scores, float largest, T* weights) {
    v16 sum = zero();
    for (long s = 0; s < KEYS; s += 16) {
        const v16 weight = exp(load(scores + s) - all(largest));
        sum = sum + weight;
        store(weights + s, weight);
    }
    return sum_of(sum);
}

template <class T>
void causal_attention(View<T> q, View<T> k, View<T> v, const float* sinks_H, float scale, long window, T* out_LHU, long L, long S,
                      long H, long J, long C, long U) {
    const long blocks = (S + KEYS - 1) / KEYS, columns = (U + PANEL - 1) / PANEL * PANEL, tasks = (L + QUERIES - 1) / QUERIES;
    std::vector<T> keys(J * blocks * KEYS * C), values(J * blocks * KEYS * columns);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long block = 0; block < J * blocks; ++block) {
            const long j = block / blocks, start = block % blocks * KEYS;
            for (long s = 0; s < std::min(KEYS, S - start); ++s) {
                T* panel = keys.data() + (block * KEYS + s / PANEL * PANEL) * C;
                const T *key = k(start + s, j), *value = v(start + s, j);
                for (long c = 0; c < C; ++c) place(panel, c, s % PANEL) = key[c];
                for (long u = 0; u < U; ++u)
                    place(values.data() + (block * columns + u / PANEL * PANEL) * KEYS, s, u % PANEL) = value[u];
            }
        }
        std::vector<T> queries(QUERIES * C), weights(QUERIES * KEYS);
        std::vector<float> scores(QUERIES * KEYS), sums(QUERIES * columns), largest(QUERIES), total(QUERIES), kept(QUERIES);
        const std::integral_constant<long, 1> one;
#pragma omp for schedule(dynamic)
        for (long task = 0; task < tasks * H; ++task) {
            const long h = task % H, j = h / (H / J), start = (tasks - 1 - task / H) * QUERIES;  // the longest first
            const long rows = std::min(QUERIES, L - start), position = S - L + start;
            for (long r = 0; r < rows; ++r) std::copy_n(q(start + r, h), C, queries.data() + r * C);
            std::fill(sums.begin(), sums.end(), 0.0f);
            std::fill(largest.begin(), largest.end(), -INFINITY);
            std::fill(total.begin(), total.end(), 0.0f);
            const long from = window > 0 ? std::max(0L, position - window + 1) / KEYS : 0;
            for (long block = from; block <= (position + rows - 1) / KEYS; ++block) {
                const long first_key = block * KEYS;
                for (long panel = 0; panel < KEYS; panel += PANEL)
                    product<T>(reinterpret_cast<const float*>(queries.data()), words<T>(C), one, 0, rows,
                               reinterpret_cast<const float*>(keys.data() + ((j * blocks + block) * KEYS + panel) * C),
                               words<T>(C), [&](long r, v16 low, v16 high) {
                                   store(scores.data() + r * KEYS + panel, low * all(scale));
                                   store(scores.data() + r * KEYS + panel + 16, high * all(scale));
                               });
                for (long r = 0; r < rows; ++r) {
                    float* row = scores.data() + r * KEYS;
                    const long seen = std::min(KEYS, position + r + 1 - first_key);
                    const long hidden = window > 0 ? std::clamp(position + r + 1 - window - first_key, 0L, KEYS) : 0;
                    std::fill(row + std::max(0L, seen), row + KEYS, -INFINITY);
                    std::fill(row, row + hidden, -INFINITY);
                    v16 most = load(row);
                    for (long s = 16; s < KEYS; s += 16) most = max(most, load(row + s));
                    const float before = largest[r], now = std::max(before, largest_of(most));
                    // A query that has seen nothing yet has a largest of -inf, from which nothing can be subtracted.
                    kept[r] = now == before ? 1 : std::exp(before - now);
                    largest[r] = now;
                    total[r] = total[r] * kept[r] + weigh(row, now == -INFINITY ? 0 : now, weights.data() + r * KEYS);
                }
                for (long u = 0; u < columns; u += PANEL)
                    product<T>(reinterpret_cast<const float*>(weights.data()), words<T>(KEYS), one, 0, rows,
                               reinterpret_cast<const float*>(values.data() + ((j * blocks + block) * columns + u) * KEYS),
                               words<T>(KEYS), [&](long r, v16 low, v16 high) {
                                   float* sum = sums.data() + r * columns + u;
                                   store(sum, fma(load(sum), all(kept[r]), low));
                                   store(sum + 16, fma(load(sum + 16), all(kept[r]), high));
                               });
            }
            for (long r = 0; r < rows; ++r) {
                if (sinks_H) total[r] += std::exp(sinks_H[h] - largest[r]);
                T* out = out_LHU + ((start + r) * H + h) * U;
                for (long u = 0; u < U; u += 16)
                    store(out + u, load(sums.data() + r * columns + u) * all(1 / total[r]), first(U - u));
            }
        }
    }
}

}  // namespace nmoe

#define NMOE_PREFILL(suffix, T)                                                                                                \
    extern "C" void nmoe_causal_attention_##suffix(const T* q, long q_token, long q_head, const T* k, long k_token, long k_head, \
                                                   const T* v, long v_token, long v_head, const float* sinks, float scale,     \
                                                   long window, T* out, long L, long S, long H, long J, long C, long U) {      \
        nmoe::causal_attention<T>({q, q_token, q_head}, {k, k_token, k_head}, {v, v_token, v_head}, sinks, scale, window, out,  \
                                  L, S, H, J, C, U);                                                                           \
    }

NMOE_PREFILL(fp32, float)
NMOE_PREFILL(bf16, nmoe::bf16)
