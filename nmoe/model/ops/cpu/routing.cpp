// Picks the experts of each token, and their weights.
#include <algorithm>
#include <cmath>
#include <vector>

#include "tile.h"

// Shapes: T tokens, D width, E experts, K chosen experts.

namespace nmoe {

constexpr long TOKENS_AT_ONCE = 8;  // few, so that a small batch keeps all threads busy

// Scores are the softmax, or each expert's sigmoid, of x W' + b in fp32. The choice is by score plus `balance_E`, of equals the lower
// number; the weights are the scores, made to add up to 1 where asked for, times `scale`.
template <class T>
void route(const T* x_TD, const float* packed, const float* bias_E, const float* balance_E, long sigmoids, long renormalize,
           float scale, float* weights_TK, int64_t* chosen_TK, long tokens, long D, long E, long K) {
    const long panels = (E + PANEL - 1) / PANEL, EP = panels * PANEL, chunks = (tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
#pragma omp parallel
    {
        std::vector<float> x(TOKENS_AT_ONCE * D), scores(TOKENS_AT_ONCE * EP), choice(EP);
#pragma omp for schedule(static)
        for (long chunk = 0; chunk < chunks; ++chunk) {
            const long from = tokens * chunk / chunks, count = tokens * (chunk + 1) / chunks - from;
            for (long i = 0; i < count; ++i)
                for (long d = 0; d < D; d += 16)
                    store(x.data() + i * D + d, load(x_TD + (from + i) * D + d, first(D - d)), first(D - d));
            for (long panel = 0; panel < panels; ++panel)
                product(x.data(), D, 0, count, packed + panel * D * PANEL, [&](long i, v16 a, v16 b) {
                    store(scores.data() + i * EP + panel * PANEL, a);
                    store(scores.data() + i * EP + panel * PANEL + 16, b);
                });
            for (long i = 0; i < count; ++i) {
                float* row = scores.data() + i * EP;
                if (bias_E)
                    for (long e = 0; e < E; ++e) row[e] += bias_E[e];
                const float most = *std::max_element(row, row + E);
                v16 sum = zero();
                for (long e = 0; e < E; e += 16) {
                    const v16 logits = load(row + e);
                    const v16 score = sigmoids ? sigmoid(logits) : exp(logits - all(most));
                    store(row + e, score, first(E - e));
                    sum = sum + select(first(E - e), score, zero());
                }
                const float total = sigmoids ? 1 : sum_of(sum);
                for (long e = 0; e < E; ++e) choice[e] = (row[e] /= total) + balance_E[e];
                float* weights = weights_TK + (from + i) * K;
                int64_t* chosen = chosen_TK + (from + i) * K;
                float kept = 0;
                for (long k = 0; k < K; ++k) {
                    const long best = std::max_element(choice.data(), choice.data() + E) - choice.data();
                    choice[best] = -INFINITY;
                    chosen[k] = best, weights[k] = row[best], kept += row[best];
                }
                // Sigmoids can all be 0, so this adds 1e-20, as DeepSeek-V3's release does.
                const float share = renormalize ? scale / (sigmoids ? kept + 1e-20f : kept) : scale;
                for (long k = 0; k < K; ++k) weights[k] *= share;
            }
        }
    }
}

}  // namespace nmoe

#define NMOE_ROUTE(suffix, T)                                                                                              \
    extern "C" void nmoe_route_##suffix(const T* x, const float* packed, const float* bias, const float* balance,         \
                                        long sigmoids, long renormalize, float scale, float* weights, int64_t* chosen,    \
                                        long tokens, long D, long E, long K) {                                             \
        nmoe::route<T>(x, packed, bias, balance, sigmoids, renormalize, scale, weights, chosen, tokens, D, E, K);          \
    }

NMOE_ROUTE(fp32, float)
NMOE_ROUTE(bf16, nmoe::bf16)
