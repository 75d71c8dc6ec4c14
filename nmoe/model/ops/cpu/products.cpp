// Linear layers and experts over packed weights.
#include <algorithm>
#include <cstring>

#include "tile.h"

// Shapes: N rows, D inputs, F outputs of a linear layer or width of an expert, T tokens, K chosen experts, E experts, R = T * K.

namespace nmoe {

// Rows that pass through a panel while it is in the L1 cache.
constexpr long ROWS_AT_ONCE = 8 * MOST_ROWS;

template <class T, class Out>
void linear(const T* x_ND, const T* packed, const T* bias_F, Out* out_NF, long N, long D, long F) {
    const long panels = (F + PANEL - 1) / PANEL, chunks = (N + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
#pragma omp parallel for collapse(2) schedule(static)
    for (long panel = 0; panel < panels; ++panel) {
        for (long chunk = 0; chunk < chunks; ++chunk) {
            const long f = panel * PANEL;
            const mask16 low = first(std::min(F - f, 16L)), high = first(std::clamp(F - f - 16, 0L, 16L));
            v16 bias_low = zero(), bias_high = zero();
            if (bias_F) bias_low = load(bias_F + f, low), bias_high = load(bias_F + f + 16, high);
            weight_product(x_ND, D, N * chunk / chunks, N * (chunk + 1) / chunks, packed + panel * D * PANEL,
                           [&](long n, v16 a, v16 b) {
                               store(out_NF + n * F + f, a + bias_low, low);
                               store(out_NF + n * F + f + 16, b + bias_high, high);
                           });
        }
    }
}

template <class T>
inline v16 swiglu(v16 gate, v16 up, float limit) {
    if (limit > 0) {
        gate = min(gate, all(limit));
        up = max(all(-limit), min(up, all(limit)));
        const v16 share = stored<T>(sigmoid(stored<T>(all(1.702f) * gate)));
        return stored<T>(gate * share) * stored<T>(up + all(1.0f));
    }
    return stored<T>(gate * sigmoid(gate)) * up;
}

// Rows sorted by expert, expert e's from `first_E[e]` to `first_E[e + 1]`, each times its expert's weight.
template <class T>
void linear_by_group(const T* x_RD, const T* packed, const int64_t* first_E, T* out_RF, long E, long D, long F) {
    const long panels = (F + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(dynamic, 4)
    for (long task = 0; task < E * panels; ++task) {
        const long e = task / panels, f = task % panels * PANEL;
        const mask16 low = first(std::min(F - f, 16L)), high = first(std::clamp(F - f - 16, 0L, 16L));
        weight_product(x_RD, D, first_E[e], first_E[e + 1], packed + task * D * PANEL, [&](long r, v16 a, v16 b) {
            store(out_RF + r * F + f, a, low);
            store(out_RF + r * F + f + 16, b, high);
        });
    }
}

// A dense feed-forward's first half: panels as those of an expert's gate_up.
template <class T>
void swiglu_linear(const T* x_ND, const T* packed, T* out_NF, long N, long D, long F) {
    const long panels = (F + 15) / 16, chunks = (N + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
#pragma omp parallel for collapse(2) schedule(static)
    for (long panel = 0; panel < panels; ++panel) {
        for (long chunk = 0; chunk < chunks; ++chunk) {
            const long f = panel * 16;
            weight_product(x_ND, D, N * chunk / chunks, N * (chunk + 1) / chunks, packed + panel * D * PANEL,
                           [&](long n, v16 gate, v16 up) {
                               store(out_NF + n * F + f, swiglu<T>(stored<T>(gate), stored<T>(up), 0), first(F - f));
                           });
        }
    }
}

// `hidden` has the width FP, F filled up to 16; a panel of gate_up holds 16 columns of the gate and the 16 of up that go with them.
// `scratch` has room for R * (2 * DP + FP) numbers and `places` for R + 2 * E + 1.
template <class T>
void experts(const T* x_TD, const int64_t* chosen_TK, const float* weights_TK, const T* gate_up, const T* down,
             const T* gate_up_bias, const T* down_bias_ED, float limit, T* out_TD, T* scratch, int32_t* places, long tokens,
             long K, long D, long F, long E) {
    const long R = tokens * K, FP = (F + 15) / 16 * 16, panels_F = FP / 16, panels_D = (D + PANEL - 1) / PANEL;
    const long DP = panels_D * PANEL;
    T *rows_RD = scratch, *hidden_RF = rows_RD + R * D, *outputs_RD = hidden_RF + R * FP;
    int32_t *row_R = places, *first_E = places + R, *next_E = first_E + E + 1;
    std::fill(first_E, first_E + E + 1, 0);
    for (long r = 0; r < R; ++r) ++first_E[chosen_TK[r] + 1];
    for (long e = 0; e < E; ++e) first_E[e + 1] += first_E[e], next_E[e] = first_E[e];
    for (long r = 0; r < R; ++r) row_R[r] = next_E[chosen_TK[r]]++;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; ++t)
            for (long k = 0; k < K; ++k) std::memcpy(rows_RD + row_R[t * K + k] * D, x_TD + t * D, D * sizeof(T));
#pragma omp for schedule(dynamic, 4)
        for (long task = 0; task < E * panels_F; ++task) {
            const long e = task / panels_F, panel = task % panels_F, f = panel * 16;
            const mask16 mask = first(F - f);
            v16 bias_gate = zero(), bias_up = zero();
            if (gate_up_bias) {
                bias_gate = load(gate_up_bias + e * 2 * F + f, mask);
                bias_up = load(gate_up_bias + e * 2 * F + F + f, mask);
            }
            weight_product(rows_RD, D, first_E[e], first_E[e + 1], gate_up + task * D * PANEL, [&](long r, v16 gate, v16 up) {
                gate = stored<T>(stored<T>(gate) + bias_gate);
                up = stored<T>(stored<T>(up) + bias_up);
                store(hidden_RF + r * FP + f, swiglu<T>(gate, up, limit));
            });
        }
#pragma omp for schedule(dynamic, 4)
        for (long task = 0; task < E * panels_D; ++task) {
            const long e = task / panels_D, panel = task % panels_D, d = panel * PANEL;
            v16 bias_low = zero(), bias_high = zero();
            if (down_bias_ED) {
                bias_low = load(down_bias_ED + e * D + d, first(std::min(D - d, 16L)));
                bias_high = load(down_bias_ED + e * D + d + 16, first(std::clamp(D - d - 16, 0L, 16L)));
            }
            weight_product(hidden_RF, FP, first_E[e], first_E[e + 1], down + task * FP * PANEL, [&](long r, v16 a, v16 b) {
                store(outputs_RD + r * DP + d, stored<T>(a) + bias_low);
                store(outputs_RD + r * DP + d + 16, stored<T>(b) + bias_high);
            });
        }
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; ++t) {
            for (long d = 0; d < D; d += 16) {
                v16 sum = zero();
                for (long k = 0; k < K; ++k) {
                    const v16 weight = stored<T>(all(weights_TK[t * K + k]));
                    sum = fma(weight, load(outputs_RD + row_R[t * K + k] * DP + d), sum);
                }
                store(out_TD + t * D + d, sum, first(D - d));
            }
        }
    }
}

}  // namespace nmoe

#define NMOE_PRODUCTS(suffix, T)                                                                                            \
    extern "C" void nmoe_linear_##suffix(const T* x, const T* packed, const T* bias, T* out, long N, long D, long F) {      \
        nmoe::linear(x, packed, bias, out, N, D, F);                                                                     \
    }                                                                                                                       \
    extern "C" void nmoe_linear_by_group_##suffix(const T* x, const T* packed, const int64_t* groups, T* out, long E,       \
                                                  long D, long F) {                                                         \
        nmoe::linear_by_group<T>(x, packed, groups, out, E, D, F);                                                          \
    }                                                                                                                       \
    extern "C" void nmoe_swiglu_linear_##suffix(const T* x, const T* packed, T* out, long N, long D, long F) {              \
        nmoe::swiglu_linear<T>(x, packed, out, N, D, F);                                                                    \
    }                                                                                                                       \
    extern "C" void nmoe_experts_##suffix(const T* x, const int64_t* chosen, const float* weights, const T* gate_up,       \
                                          const T* down, const T* gate_up_bias, const T* down_bias, float limit, T* out,    \
                                          T* scratch, int32_t* places, long tokens, long K, long D, long F, long E) {       \
        nmoe::experts<T>(x, chosen, weights, gate_up, down, gate_up_bias, down_bias, limit, out, scratch, places, tokens,   \
                         K, D, F, E);                                                                                       \
    }

NMOE_PRODUCTS(fp32, float)
NMOE_PRODUCTS(bf16, nmoe::bf16)

// bf16 multiplied in pairs, whose sums are fp32 and stay so. Says whether there is an instruction for it; otherwise widened weights
// are faster.
extern "C" long nmoe_multiplies_bf16() { return nmoe::BF16_PRODUCTS; }
extern "C" void nmoe_linear_bf16_in_fp32(const nmoe::bf16* x, const nmoe::bf16* packed, float* out, long N, long D, long F) {
    nmoe::linear<nmoe::bf16, float>(x, packed, nullptr, out, N, D, F);
}
