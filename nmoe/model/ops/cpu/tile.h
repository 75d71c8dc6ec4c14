// Small matrix products: a few rows by 32 columns (16 if registers are narrow), whose sums stay in registers.
//
// A weight is packed in panels of 32 columns (the last padded with zeros): `[panels, K, 32]` in fp32, `[panels, K / 2, 32, 2]`
// in bf16, so that in both a step reads 32 words of 4 bytes in order. A row's sums run over K in order, so its bits do not
// depend on the other rows.
#pragma once

#include <type_traits>

#include "vector.h"

namespace nmoe {

constexpr long PANEL = 32;
constexpr int AT_ONCE = WIDE ? 2 : 1;  // of a panel's two halves of 16 columns
constexpr long MOST_ROWS = 14;

#ifdef __AVX512BF16__
constexpr bool BF16_PRODUCTS = true;
#else
constexpr bool BF16_PRODUCTS = false;
#endif

// The rows whose sums fit the registers. Without an instruction for pairs of bf16, their product needs four more vectors.
template <class T>
constexpr long TILE_ROWS = WIDE ? (sizeof(T) == 4 || BF16_PRODUCTS ? MOST_ROWS : 12) : (sizeof(T) == 4 ? 6 : 4);

// Words of 4 bytes that hold k numbers.
template <class T>
constexpr long words(long k) {
    return k * static_cast<long>(sizeof(T)) / 4;
}

template <class T>
inline v16 multiply_add(v16 a, v16 b, v16 sum);

template <>
inline v16 multiply_add<float>(v16 a, v16 b, v16 sum) {
    return fma(a, b, sum);
}

template <>
inline v16 multiply_add<bf16>(v16 a, v16 b, v16 sum) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
    return fma(upper_bf16(a), upper_bf16(b), fma(lower_bf16(a), lower_bf16(b), sum));
#endif
}

// A step of a lies `a_step` words after the one before. `AHEAD` fetches the panel after this one meanwhile: a weight comes from
// memory, which would stand idle while several rows pass by a panel.
template <class T, int ROWS, bool AHEAD, class Step, class Finish>
inline void tile(const float* a, long stride, Step a_step, const float* panel, long steps, long row, Finish& finish) {
    v16 done[ROWS][2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half += AT_ONCE) {
        v16 sums[ROWS][AT_ONCE];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
            for (int h = 0; h < AT_ONCE; ++h) sums[r][h] = zero();
        // One pointer serves three rows, since addressing can reach the two after it; so the registers suffice.
        const float* rows[(ROWS + 2) / 3];
#pragma GCC unroll 8
        for (int g = 0; g < (ROWS + 2) / 3; ++g) rows[g] = a + 3 * g * stride;
        const float* b = panel + 16 * half;
        for (long step = 0; step < steps; ++step) {
            v16 columns[AT_ONCE];
#pragma GCC unroll 2
            for (int h = 0; h < AT_ONCE; ++h) {
                columns[h] = load(b + 16 * h);
                if (AHEAD) __builtin_prefetch(b + 16 * h + steps * PANEL, 0, 2);
            }
            b += PANEL;
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const v16 x = all(rows[r / 3][(r % 3) * stride]);
#pragma GCC unroll 2
                for (int h = 0; h < AT_ONCE; ++h) sums[r][h] = multiply_add<T>(x, columns[h], sums[r][h]);
            }
#pragma GCC unroll 8
            for (int g = 0; g < (ROWS + 2) / 3; ++g) rows[g] += a_step;
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
            for (int h = 0; h < AT_ONCE; ++h) done[r][half + h] = sums[r][h];
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) finish(row + r, done[r][0], done[r][1]);
}

// Rows `from` to `to` of a times one panel; `finish(row, columns 0 to 15, columns 16 to 31)` takes each row's sums. Row r begins
// at `a + r * stride`; strides and steps count words.
template <class T, bool AHEAD = false, class Step, class Finish>
inline void product(const float* a, long stride, Step a_step, long from, long to, const float* panel, long steps, Finish finish) {
    const long blocks = (to - from + TILE_ROWS<T> - 1) / TILE_ROWS<T>;
    for (long i = 0; i < blocks; ++i) {
        const long start = from + (to - from) * i / blocks, stop = from + (to - from) * (i + 1) / blocks;
        switch (stop - start) {
#define NMOE_ROWS(n)                                                                               \
    case n:                                                                                        \
        if constexpr (n <= TILE_ROWS<T>)                                                           \
            tile<T, n, AHEAD>(a + start * stride, stride, a_step, panel, steps, start, finish);    \
        break;
            NMOE_ROWS(1) NMOE_ROWS(2) NMOE_ROWS(3) NMOE_ROWS(4) NMOE_ROWS(5) NMOE_ROWS(6) NMOE_ROWS(7)
            NMOE_ROWS(8) NMOE_ROWS(9) NMOE_ROWS(10) NMOE_ROWS(11) NMOE_ROWS(12) NMOE_ROWS(13) NMOE_ROWS(14)
#undef NMOE_ROWS
        }
    }
}

// The same of rows `width` numbers wide, one after another.
template <class T, class Finish>
inline void product(const T* a, long width, long from, long to, const T* panel, Finish finish) {
    const long steps = words<T>(width);
    product<T>(reinterpret_cast<const float*>(a), steps, std::integral_constant<long, 1>(), from, to,
               reinterpret_cast<const float*>(panel), steps, finish);
}

// The same with a panel of a packed weight, which the weight's next panel follows.
template <class T, class Finish>
inline void weight_product(const T* a, long width, long from, long to, const T* panel, Finish finish) {
    const long steps = words<T>(width);
    product<T, true>(reinterpret_cast<const float*>(a), steps, std::integral_constant<long, 1>(), from, to,
                     reinterpret_cast<const float*>(panel), steps, finish);
}

}  // namespace nmoe
