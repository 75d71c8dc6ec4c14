// Log-probabilities and entropies over a wide vocabulary, and their gradients, from hidden states. Logits never leave the cache: a
// chunk of the vocabulary passes by all tokens while it is there, and the backward pass multiplies once more.
#include <algorithm>
#include <cmath>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "tile.h"

// Shapes: N tokens, D width, V vocabulary, v a chunk of it, C chunks.

namespace nmoe {

constexpr long CHUNK = 8 * MOST_ROWS;           // of the vocabulary; 112 rows of the head and of its gradient stay in the L2 cache
constexpr long BLOCK = 4 * PANEL;               // tokens whose gradients of logits stay there, too
constexpr long AT_ONCE_TOKENS = 10 * BLOCK;     // bounds what a thread holds for itself

// Tokens as panels for `x @ weight.T`, the head's rows being the rows: `[N / 32, D, 32]`, or in bf16 `[N / 32, D / 2, 32, 2]`, zeros
// for the tokens that fill up the last.
template <class T>
std::vector<T> tokens_in_columns(const T* x_ND, long N, long D) {
    constexpr long pair = 4 / sizeof(T);
    const long panels = (N + PANEL - 1) / PANEL;
    std::vector<T> packed(panels * D * PANEL);
#pragma omp parallel for schedule(static)
    for (long panel = 0; panel < panels; ++panel)
        for (long d = 0; d < D; ++d)
            for (long n = panel * PANEL; n < std::min(N, (panel + 1) * PANEL); ++n)
                packed[(panel * D + d / pair * pair) * PANEL + n % PANEL * pair + d % pair] = x_ND[n * D + d];
    return packed;
}

// Rows `from` to `to` of a `[.., D]` as panels of their columns in fp32: `[D / 32, rows, 32]`, of `rows` rows, the last of them zeros.
template <class T>
void columns_of(const T* a, long D, long from, long to, long rows, float* packed) {
    for (long d = 0; d < D; d += PANEL)
        for (long r = 0; r < rows; ++r)
            for (long h = 0; h < PANEL; h += 16, packed += 16)
                store(packed, from + r < to && d + h < D ? load(a + (from + r) * D + d + h, first(D - d - h)) : zero());
}

// For N tokens: the logarithm of the target's probability, the entropy, and the largest logit and sum of exponentials that the
// backward pass needs. A token's sums run over the vocabulary in order, so its bits depend neither on other tokens nor on threads.
template <class T>
void head_forward(const T* x_ND, const T* weight_VD, const int64_t* targets_N, float temperature, float* logprobs_N,
                  float* entropy_N, float* largest_N, float* total_N, long N, long D, long V) {
    const long panels = (N + PANEL - 1) / PANEL, width = panels * PANEL, chunks = (V + CHUNK - 1) / CHUNK;
    const std::vector<T> x = tokens_in_columns(x_ND, N, D);
    std::vector<float> largest(chunks * width), total(chunks * width), weighted(chunks * width), target(width);
#pragma omp parallel
    {
        std::vector<float> logits(CHUNK * PANEL);
#pragma omp for schedule(static)
        for (long chunk = 0; chunk < chunks; ++chunk) {
            const long from = chunk * CHUNK, rows = std::min(CHUNK, V - from);
            for (long panel = 0; panel < panels; ++panel) {
                float* at = logits.data();
                product(weight_VD + from * D, D, 0, rows, x.data() + panel * D * PANEL, [&](long v, v16 low, v16 high) {
                    if (temperature != 1) low = low / all(temperature), high = high / all(temperature);
                    store(at + v * PANEL, low);
                    store(at + v * PANEL + 16, high);
                });
                for (long h = 0; h < PANEL; h += 16) {
                    v16 most = load(at + h), sum = zero(), products = zero();
                    for (long v = 1; v < rows; ++v) most = max(most, load(at + v * PANEL + h));
                    for (long v = 0; v < rows; ++v) {
                        const v16 shifted = load(at + v * PANEL + h) - most, mass = exp(shifted);
                        sum = sum + mass;
                        products = fma(mass, shifted, products);
                    }
                    const long place = chunk * width + panel * PANEL + h;
                    store(largest.data() + place, most);
                    store(total.data() + place, sum);
                    store(weighted.data() + place, products);
                }
                for (long n = panel * PANEL; n < std::min(N, (panel + 1) * PANEL); ++n)
                    if (targets_N[n] >= from && targets_N[n] < from + rows)
                        target[n] = at[(targets_N[n] - from) * PANEL + n % PANEL];
            }
        }
#pragma omp for schedule(static)
        for (long start = 0; start < width; start += 16) {
            v16 most = load(largest.data() + start);
            for (long chunk = 1; chunk < chunks; ++chunk) most = max(most, load(largest.data() + chunk * width + start));
            float above[16], scale[16];
            double sum[16] = {}, products[16] = {};
            for (long chunk = 0; chunk < chunks; ++chunk) {
                const long place = chunk * width + start;
                const v16 shift = load(largest.data() + place) - most;
                store(above, shift);
                store(scale, exp(shift));
                for (int i = 0; i < 16; ++i) {
                    sum[i] += static_cast<double>(scale[i]) * total[place + i];
                    products[i] += scale[i] * (weighted[place + i] + static_cast<double>(total[place + i]) * above[i]);
                }
            }
            store(above, most);
            for (long n = start; n < std::min(N, start + 16); ++n) {
                const long i = n - start;
                logprobs_N[n] = static_cast<float>(static_cast<double>(target[n]) - above[i] - std::log(sum[i]));
                entropy_N[n] = static_cast<float>(std::log(sum[i]) - products[i] / sum[i]);
                largest_N[n] = above[i];
                total_N[n] = static_cast<float>(sum[i]);
            }
        }
    }
}

// How many tokens a block has, filled up to whole panels.
inline long tokens_of(long block, long N) { return (std::min(N - block * BLOCK, BLOCK) + PANEL - 1) / PANEL * PANEL; }

// The gradients of a chunk's logits, `[v, BLOCK]`, of the tokens `start` to `stop`.
template <class T>
void logit_gradients(const T* x, const T* weight_VD, const int64_t* targets_N, float temperature, const float* largest,
                     const float* a, const float* b, const float* onehot_N, float* grads, long from, long rows, long start,
                     long stop, long tokens, long D) {
    for (long n = 0; n < tokens; n += PANEL) {
        const float *at = largest + start + n, *factor = a + start + n, *slope = b + start + n;
        float* out = grads + n;
        product(weight_VD + from * D, D, 0, rows, x + (start + n) * D, [&](long v, v16 low, v16 high) {
            if (temperature != 1) low = low / all(temperature), high = high / all(temperature);
            low = low - load(at), high = high - load(at + 16);
            store(out + v * BLOCK, exp(low) * fma(low, load(slope), load(factor)));
            store(out + v * BLOCK + 16, exp(high) * fma(high, load(slope + 16), load(factor + 16)));
        });
    }
    for (long n = start; n < stop; ++n)
        if (targets_N[n] >= from && targets_N[n] < from + rows) grads[(targets_N[n] - from) * BLOCK + n - start] += onehot_N[n];
}

#ifdef __AVX512BF16__

// `head_backward` of bf16, whose products multiply pairs: the gradients of logits are rounded to bf16, as torch stores them.
void head_backward_in_pairs(const bf16* x_ND, const bf16* weight_VD, const int64_t* targets_N, float temperature,
                            const float* largest_N, const float* a_N, const float* b_N, const float* onehot_N, float* grad_x_ND,
                            float* grad_weight_VD, bool first_tokens, long N, long D, long V) {
    const long columns = (D + PANEL - 1) / PANEL * PANEL, blocks = (N + BLOCK - 1) / BLOCK, width = blocks * BLOCK;
    const std::integral_constant<long, 1> one;
    const std::vector<bf16> x = tokens_in_columns(x_ND, N, D);
    std::vector<float> x_pairs(grad_weight_VD ? width / 2 * columns : 0), largest(width), a(width), b(width);
    std::copy_n(largest_N, N, largest.data());
    std::copy_n(a_N, N, a.data());
    std::copy_n(b_N, N, b.data());
    std::vector<std::vector<float>> grads_x;
#pragma omp parallel
    {
#pragma omp single
#ifdef _OPENMP
        grads_x.resize(omp_get_num_threads());
#else
        grads_x.resize(1);
#endif
        if (grad_weight_VD) {  // pairs of tokens in panels of their columns, `[D / 32, tokens / 2, 32, 2]` of each block
#pragma omp for schedule(static)
            for (long block = 0; block < blocks; ++block) {
                float* out = x_pairs.data() + block * BLOCK / 2 * columns;
                const auto at = [&](long n, long d) {
                    n += block * BLOCK;
                    return n < N && d < D ? load(x_ND + n * D + d, first(D - d)) : zero();
                };
                for (long d = 0; d < columns; d += PANEL)
                    for (long n = 0; n < tokens_of(block, N); n += 2)
                        for (long h = 0; h < PANEL; h += 16, out += 16) store(out, paired_bf16(at(n, d + h), at(n + 1, d + h)));
            }
        }
#ifdef _OPENMP
        std::vector<float>& grad_x = grads_x[omp_get_thread_num()];  // `[D, width]`
#else
        std::vector<float>& grad_x = grads_x[0];
#endif
        grad_x.resize(grad_x_ND ? D * width : 0);
        std::vector<float> grads(CHUNK * BLOCK), pairs(CHUNK / 2 * BLOCK);
        std::vector<bf16> rows_of_grads(CHUNK * BLOCK), head(grad_x_ND ? D * CHUNK : 0);
#pragma omp for schedule(static)
        for (long chunk = 0; chunk < (V + CHUNK - 1) / CHUNK; ++chunk) {
            const long from = chunk * CHUNK, rows = std::min(CHUNK, V - from), steps = (rows + 1) / 2;
            if (grad_x_ND)  // `[D, v]`
                for (long v = 0; v < CHUNK; ++v)
                    for (long d = 0; d < D; ++d) head[d * CHUNK + v] = v < rows ? weight_VD[(from + v) * D + d] : bf16{0};
            for (long block = 0; block < blocks; ++block) {
                const long start = block * BLOCK, stop = std::min(N, start + BLOCK), tokens = tokens_of(block, N);
                logit_gradients(x.data(), weight_VD, targets_N, temperature, largest.data(), a.data(), b.data(), onehot_N,
                                grads.data(), from, rows, start, stop, tokens, D);
                for (long v = 0; v < rows; v += 2)
                    for (long n = 0; n < tokens; n += 16) {
                        const float* at = grads.data() + v * BLOCK + n;
                        const v16 low = load(at), high = v + 1 < rows ? load(at + BLOCK) : zero();
                        store(rows_of_grads.data() + v * BLOCK + n, low);
                        if (v + 1 < rows) store(rows_of_grads.data() + (v + 1) * BLOCK + n, high);
                        store(pairs.data() + (n / PANEL * steps + v / 2) * PANEL + n % PANEL, paired_bf16(low, high));
                    }
                if (grad_weight_VD) {
                    const bool adds = block > 0 || !first_tokens;
                    for (long d = 0; d < D; d += PANEL) {
                        float* out = grad_weight_VD + from * D + d;
                        const mask16 lower = first(D - d), upper = first(std::max(0L, D - d - 16));
                        product<bf16>(reinterpret_cast<const float*>(rows_of_grads.data()), BLOCK / 2, one, 0, rows,
                                      x_pairs.data() + (start * columns + d * tokens) / 2, tokens / 2,
                                      [&](long v, v16 low, v16 high) {
                                          float* row = out + v * D;
                                          if (adds) low = low + load(row, lower), high = high + load(row + 16, upper);
                                          store(row, low, lower);
                                          store(row + 16, high, upper);
                                      });
                    }
                }
                if (grad_x_ND)
                    for (long n = 0; n < tokens; n += PANEL)
                        product<bf16>(reinterpret_cast<const float*>(head.data()), CHUNK / 2, one, 0, D,
                                      pairs.data() + n * steps, steps, [&](long d, v16 low, v16 high) {
                                          float* row = grad_x.data() + d * width + start + n;
                                          store(row, low + load(row));
                                          store(row + 16, high + load(row + 16));
                                      });
            }
        }
        if (grad_x_ND) {
#pragma omp for schedule(static)
            for (long n = 0; n < N; ++n)
                for (long d = 0; d < D; ++d) {
                    float sum = 0;
                    for (const std::vector<float>& part : grads_x) sum += part[d * width + n];
                    grad_x_ND[n * D + d] = sum;
                }
        }
    }
}

#endif

// With l the logits at the temperature and e = e^(l - largest): the gradient of a logit is e (a + b (l - largest)), and of the
// target's `onehot` more. Writes the gradients of x and of the weight, where they are given, in fp32. Without an instruction for
// pairs of bf16 these products are of fp32, too.
template <class T>
void head_backward(const T* x_ND, const T* weight_VD, const int64_t* targets_N, float temperature,
                   const float* largest_N, const float* a_N, const float* b_N, const float* onehot_N, float* grad_x_ND,
                   float* grad_weight_VD, bool first_tokens, long N, long D, long V) {
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<T, bf16>)
        return head_backward_in_pairs(x_ND, weight_VD, targets_N, temperature, largest_N, a_N, b_N, onehot_N, grad_x_ND,
                                      grad_weight_VD, first_tokens, N, D, V);
#endif
    const long columns = (D + PANEL - 1) / PANEL * PANEL, blocks = (N + BLOCK - 1) / BLOCK, width = blocks * BLOCK;
    const std::vector<T> x = tokens_in_columns(x_ND, N, D);
    std::vector<float> x_rows(grad_weight_VD ? width * columns : 0), largest(width), a(width), b(width);
    std::copy_n(largest_N, N, largest.data());
    std::copy_n(a_N, N, a.data());
    std::copy_n(b_N, N, b.data());
    std::vector<std::vector<float>> grads_x;
#pragma omp parallel
    {
#pragma omp single
#ifdef _OPENMP
        grads_x.resize(omp_get_num_threads());
#else
        grads_x.resize(1);
#endif
        if (grad_weight_VD) {
#pragma omp for schedule(static)
            for (long block = 0; block < blocks; ++block)
                columns_of(x_ND, D, block * BLOCK, std::min(N, (block + 1) * BLOCK), tokens_of(block, N),
                           x_rows.data() + block * BLOCK * columns);
        }
#ifdef _OPENMP
        std::vector<float>& grad_x = grads_x[omp_get_thread_num()];
#else
        std::vector<float>& grad_x = grads_x[0];
#endif
        grad_x.resize(grad_x_ND ? N * columns : 0);
        std::vector<float> grads(CHUNK * BLOCK), head(grad_x_ND ? CHUNK * columns : 0);
#pragma omp for schedule(static)
        for (long chunk = 0; chunk < (V + CHUNK - 1) / CHUNK; ++chunk) {
            const long from = chunk * CHUNK, rows = std::min(CHUNK, V - from);
            if (grad_x_ND) columns_of(weight_VD, D, from, from + rows, rows, head.data());
            for (long block = 0; block < blocks; ++block) {
                const long start = block * BLOCK, stop = std::min(N, start + BLOCK), tokens = tokens_of(block, N);
                logit_gradients(x.data(), weight_VD, targets_N, temperature, largest.data(), a.data(), b.data(), onehot_N,
                                grads.data(), from, rows, start, stop, tokens, D);
                if (grad_weight_VD) {
                    const bool adds = block > 0 || !first_tokens;
                    for (long d = 0; d < D; d += PANEL) {
                        float* out = grad_weight_VD + from * D + d;
                        const mask16 lower = first(D - d), upper = first(std::max(0L, D - d - 16));
                        product<float>(grads.data(), BLOCK, std::integral_constant<long, 1>(), 0, rows,
                                       x_rows.data() + start * columns + d * tokens, tokens, [&](long v, v16 low, v16 high) {
                                           float* row = out + v * D;
                                           if (adds) low = low + load(row, lower), high = high + load(row + 16, upper);
                                           store(row, low, lower);
                                           store(row + 16, high, upper);
                                       });
                    }
                }
                if (grad_x_ND) {
                    for (long d = 0; d < columns; d += PANEL) {
                        float* out = grad_x.data() + start * columns + d;
                        product<float>(grads.data(), 1, BLOCK, 0, stop - start, head.data() + d * rows, rows,
                                       [&](long n, v16 low, v16 high) {
                                           float* row = out + n * columns;
                                           store(row, low + load(row));
                                           store(row + 16, high + load(row + 16));
                                       });
                    }
                }
            }
        }
        if (grad_x_ND) {
#pragma omp for schedule(static)
            for (long n = 0; n < N; ++n)
                for (long d = 0; d < D; ++d) {
                    float sum = 0;
                    for (const std::vector<float>& part : grads_x) sum += part[n * columns + d];
                    grad_x_ND[n * D + d] = sum;
                }
        }
    }
}

}  // namespace nmoe

#define NMOE_HEAD(suffix, T)                                                                                                   \
    extern "C" void nmoe_head_forward_##suffix(const T* x_ND, const T* weight_VD, const int64_t* targets_N, float temperature, \
                                               float* logprobs_N, float* entropy_N, float* largest_N, float* total_N, long N,  \
                                               long D, long V) {                                                               \
        for (long n = 0; n < N; n += nmoe::AT_ONCE_TOKENS)                                                                     \
            nmoe::head_forward(x_ND + n * D, weight_VD, targets_N + n, temperature, logprobs_N + n, entropy_N + n,             \
                               largest_N + n, total_N + n, std::min(N - n, nmoe::AT_ONCE_TOKENS), D, V);                       \
    }                                                                                                                          \
    extern "C" void nmoe_head_backward_##suffix(const T* x_ND, const T* weight_VD, const int64_t* targets_N, float temperature, \
                                                const float* largest_N, const float* a_N, const float* b_N,                    \
                                                const float* onehot_N, float* grad_x_ND, float* grad_weight_VD, long N,        \
                                                long D, long V) {                                                              \
        for (long n = 0; n < N; n += nmoe::AT_ONCE_TOKENS)                                                                     \
            nmoe::head_backward(x_ND + n * D, weight_VD, targets_N + n, temperature, largest_N + n, a_N + n, b_N + n,          \
                                onehot_N + n, grad_x_ND ? grad_x_ND + n * D : nullptr, grad_weight_VD, n == 0,                 \
                                std::min(N - n, nmoe::AT_ONCE_TOKENS), D, V);                                                  \
    }

NMOE_HEAD(fp32, float)
NMOE_HEAD(bf16, nmoe::bf16)
