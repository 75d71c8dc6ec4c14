// Decode attention that reads the blocks of the paged cache in place, and the steps just before it: QK-norm and rotary turns.
#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.h"

// Shapes: B rows, H query heads, J key-value heads, G = H / J, C key width, U value width, M blocks of a row, T tokens, N heads
// turned.

namespace nmoe {

constexpr long BLOCK = 16;  // positions

// The dot products of a query with a block's sixteen keys.
template <class T>
inline v16 scores(const float* q_C, const T* keys_PC, long C) {
    constexpr int AT_ONCE = WIDE ? 16 : 4;  // keys whose sums stay in registers
    v16 sums[BLOCK];
    for (int from = 0; from < BLOCK; from += AT_ONCE) {
        v16 parts[AT_ONCE];
#pragma GCC unroll 16
        for (int p = 0; p < AT_ONCE; ++p) parts[p] = zero();
        const auto add = [&](long c, auto... mask) {
            const v16 q = load(q_C + c, mask...);
#pragma GCC unroll 16
            for (int p = 0; p < AT_ONCE; ++p) parts[p] = fma(q, load(keys_PC + (from + p) * C + c, mask...), parts[p]);
        };
        long c = 0;
        for (; c + 16 <= C; c += 16) add(c);
        if (c < C) add(c, first(C - c));
#pragma GCC unroll 16
        for (int p = 0; p < AT_ONCE; ++p) sums[from + p] = parts[p];
    }
    return sums_of(sums);
}

// Prefetches numbers that are read soon: blocks lie anywhere in memory, so the hardware cannot predict them.
template <class T>
inline void fetch(const T* p, long count) {
    for (long i = 0; i < count; i += 64 / static_cast<long>(sizeof(T))) __builtin_prefetch(p + i);
}

// Weighted sums of values for up to four heads, in as many columns at a time as fit the registers.
template <class T, int HEADS>
inline void values(const float* weights_GL, long L, const T* values_JPU, const int64_t* blocks, long block_stride, long skipped,
                   long length, long U, const float* shares_G, T* out_GU) {
    constexpr int AT_ONCE = WIDE ? 4 : 4 / HEADS;  // vectors of columns
    for (long u = 0; u < U; u += 16 * AT_ONCE) {
        mask16 masks[AT_ONCE];
        for (int i = 0; i < AT_ONCE; ++i) masks[i] = first(std::clamp(U - u - 16 * i, 0L, 16L));
        v16 sums[HEADS][AT_ONCE];
        for (auto& head : sums)
            for (auto& sum : head) sum = zero();
        for (long l = skipped; l < length; ++l) {
            const T* v = values_JPU + blocks[l / BLOCK] * block_stride + l % BLOCK * U + u;
            v16 x[AT_ONCE];
#pragma GCC unroll 4
            for (int i = 0; i < AT_ONCE; ++i) x[i] = load(v + 16 * i, masks[i]);
#pragma GCC unroll 4
            for (int g = 0; g < HEADS; ++g) {
                const v16 weight = all(weights_GL[g * L + l]);
#pragma GCC unroll 4
                for (int i = 0; i < AT_ONCE; ++i) sums[g][i] = fma(weight, x[i], sums[g][i]);
            }
        }
        for (int g = 0; g < HEADS; ++g)
            for (int i = 0; i < AT_ONCE; ++i)
                store(out_GU + g * U + u + 16 * i, sums[g][i] * all(shares_G[g]), masks[i]);
    }
}

// Writes each row's key and value, where they are given, to its place in the cache, and attends: to its own position and those
// before it. Strides count numbers between rows. A row's blocks are those of its sequence in the table, `sequence_B[b]`, or b
// where that is null. A query's keys are taken in order of position, so its bits do not depend on the rest of the batch.
template <class T>
void attention(const T* q_BHC, long q_stride, const T* k_BJC, long k_stride, const T* v_BJU, long v_stride, T* keys_NJPC,
               T* values_NJPU, const int64_t* table_SM, long table_stride, const int64_t* sequence_B, const int64_t* positions_B,
               const float* sinks_H, float scale, long window, T* out_BHU, long B, long H, long J, long C, long U) {
    const long G = H / J;
#pragma omp parallel
    {
        std::vector<float> query(G * C), weights, shares(G);
#pragma omp for schedule(dynamic, 4)
        for (long item = 0; item < B * J; ++item) {
            const long b = item / J, j = item % J, position = positions_B[b], length = position + 1;
            const long skipped = window > 0 ? std::max(0L, length - window) : 0, first_block = skipped / BLOCK;
            const int64_t* blocks = table_SM + (sequence_B ? sequence_B[b] : b) * table_stride;
            if (k_BJC) {
                const long own = (blocks[position / BLOCK] * J + j) * BLOCK + position % BLOCK;
                std::copy_n(k_BJC + b * k_stride + j * C, C, keys_NJPC + own * C);
                std::copy_n(v_BJU + b * v_stride + j * U, U, values_NJPU + own * U);
            }
            const T* q = q_BHC + b * q_stride + j * G * C;
            for (long g = 0; g < G; ++g)
                for (long c = 0; c < C; c += 16)
                    store(query.data() + g * C + c, load(q + g * C + c, first(C - c)) * all(scale), first(C - c));
            const long L = (length + BLOCK - 1) / BLOCK * BLOCK;
            if (static_cast<long>(weights.size()) < G * L) weights.resize(G * L);
            for (long i = first_block; i < L / BLOCK; ++i) {
                const T* keys_PC = keys_NJPC + (blocks[i] * J + j) * BLOCK * C;
                if (i + 1 < L / BLOCK) fetch(keys_NJPC + (blocks[i + 1] * J + j) * BLOCK * C, BLOCK * C);
                fetch(values_NJPU + (blocks[i] * J + j) * BLOCK * U, BLOCK * U);
                const long start = i * BLOCK;
                for (long g = 0; g < G; ++g) {
                    v16 seen = select(first(length - start), scores(query.data() + g * C, keys_PC, C), all(-INFINITY));
                    if (skipped > start) seen = select(first(skipped - start), all(-INFINITY), seen);
                    store(weights.data() + g * L + start, seen);
                }
            }
            for (long g = 0; g < G; ++g) {
                float* row = weights.data() + g * L;
                v16 highest = all(-INFINITY), total = zero();
                for (long l = first_block * BLOCK; l < L; l += 16) highest = max(highest, load(row + l));
                float most = largest_of(highest);
                if (sinks_H) most = std::max(most, sinks_H[j * G + g]);
                for (long l = first_block * BLOCK; l < L; l += 16) {
                    const v16 e = exp(load(row + l) - all(most));
                    total = total + e;
                    store(row + l, e);
                }
                shares[g] = 1 / (sum_of(total) + (sinks_H ? std::exp(sinks_H[j * G + g] - most) : 0.0f));
            }
            const T* base = values_NJPU + j * BLOCK * U;
            T* out = out_BHU + (b * H + j * G) * U;
            long g = 0;
            for (; g + 4 <= G; g += 4)
                values<T, 4>(weights.data() + g * L, L, base, blocks, J * BLOCK * U, skipped, length, U, shares.data() + g, out + g * U);
            for (; g + 2 <= G; g += 2)
                values<T, 2>(weights.data() + g * L, L, base, blocks, J * BLOCK * U, skipped, length, U, shares.data() + g, out + g * U);
            if (g < G)
                values<T, 1>(weights.data() + g * L, L, base, blocks, J * BLOCK * U, skipped, length, U, shares.data() + g, out + g * U);
        }
    }
}

// The inverse of a row's root mean square.
template <class T>
inline float inverse_rms(const T* x_D, long D, float eps) {
    v16 squares = zero();
    for (long d = 0; d < D; d += 16) {
        const v16 x = load(x_D + d, first(D - d));
        squares = fma(x, x, squares);
    }
    return 1 / std::sqrt(sum_of(squares) / D + eps);
}

template <class T>
inline v16 normed(v16 x, float inverse, v16 weight) {
    return stored<T>(stored<T>(x * all(inverse)) * weight);
}

template <class T>
void rms_norm(const T* x_ND, const T* weight_D, float eps, T* out_ND, long N, long D) {
#pragma omp parallel for schedule(static) if (N * D > 4096)
    for (long n = 0; n < N; ++n) {
        const float inverse = inverse_rms(x_ND + n * D, D, eps);
        for (long d = 0; d < D; d += 16) {
            const mask16 mask = first(D - d);
            store(out_ND + n * D + d, normed<T>(load(x_ND + n * D + d, mask), inverse, load(weight_D + d, mask)), mask);
        }
    }
}

// In place: the first H heads normed by one weight, the next J by another (neither where they are null), then turned by the
// positions' angles: pairs are (i, i + C / 2), cos and sin `[T, C / 2]`. A row holds `stride` numbers.
template <class T>
void norm_and_turn(T* qkv, long stride, const T* q_weight_C, const T* k_weight_C, float eps, const float* cos_Tc,
                   const float* sin_Tc, long tokens, long H, long J, long C) {
    const long half = C / 2;
#pragma omp parallel for schedule(static) if (tokens * (H + J) * C > 4096)
    for (long t = 0; t < tokens; ++t) {
        for (long n = 0; n < H + J; ++n) {
            T* x = qkv + t * stride + n * C;
            const T* weight = n < H ? q_weight_C : k_weight_C;
            const float inverse = weight ? inverse_rms(x, C, eps) : 1;
            for (long c = 0; c < half; c += 16) {
                const mask16 mask = first(half - c);
                v16 a = load(x + c, mask), b = load(x + half + c, mask);
                if (weight) {
                    a = normed<T>(a, inverse, load(weight + c, mask));
                    b = normed<T>(b, inverse, load(weight + half + c, mask));
                }
                const v16 cos = load(cos_Tc + t * half + c, mask), sin = load(sin_Tc + t * half + c, mask);
                store(x + c, fnma(b, sin, stored<T>(a * cos)), mask);
                store(x + half + c, fma(a, sin, stored<T>(b * cos)), mask);
            }
        }
    }
}

}  // namespace nmoe

#define NMOE_ATTENTION(suffix, T)                                                                                           \
    extern "C" void nmoe_attention_##suffix(const T* q, long q_stride, const T* k, long k_stride, const T* v, long v_stride, \
                                            T* keys, T* values, const int64_t* table, long table_stride,                    \
                                            const int64_t* sequence, const int64_t* positions, const float* sinks,          \
                                            float scale, long window, T* out, long B, long H, long J, long C, long U) {     \
        nmoe::attention<T>(q, q_stride, k, k_stride, v, v_stride, keys, values, table, table_stride, sequence, positions,   \
                           sinks, scale, window, out, B, H, J, C, U);                                                       \
    }                                                                                                                       \
    extern "C" void nmoe_rms_norm_##suffix(const T* x, const T* weight, float eps, T* out, long N, long D) {                \
        nmoe::rms_norm<T>(x, weight, eps, out, N, D);                                                                       \
    }                                                                                                                       \
    extern "C" void nmoe_norm_and_turn_##suffix(T* qkv, long stride, const T* q_weight, const T* k_weight, float eps,       \
                                                const float* cos, const float* sin, long tokens, long H, long J, long C) {  \
        nmoe::norm_and_turn<T>(qkv, stride, q_weight, k_weight, eps, cos, sin, tokens, H, J, C);                            \
    }

NMOE_ATTENTION(fp32, float)
NMOE_ATTENTION(bf16, nmoe::bf16)
