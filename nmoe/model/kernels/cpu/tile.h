// Small matrix products: up to 14 rows by 32 columns whose sums stay in registers.
//
// A weight is packed in panels of 32 columns (the last filled up with zeros): `[panels, K, 32]` in fp32, `[panels, K / 2, 32, 2]` in
// bf16, so that in both a step reads 32 words of 4 bytes in order. A row's sums run over K in order whatever other rows there are:
// its bits do not depend on the batch.
#pragma once

#include "vector.h"

namespace nmoe {

constexpr long PANEL = 32;
constexpr long TILE_ROWS = 14;

// Words of 4 bytes that hold k numbers.
template <class T>
constexpr long words(long k) {
    return k * static_cast<long>(sizeof(T)) / 4;
}

template <class T>
inline v16 multiply_add(v16 a, v16 b, v16 sum);

template <>
inline v16 multiply_add<float>(v16 a, v16 b, v16 sum) {
    return _mm512_fmadd_ps(a, b, sum);
}

template <>
inline v16 multiply_add<bf16>(v16 a, v16 b, v16 sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

template <class T, int ROWS, class Finish>
inline void tile(const float* a, long stride, const float* b, long steps, long row, Finish& finish) {
    v16 sums[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    // One pointer for three rows: addressing reaches the two after it, and registers suffice.
    const float* rows[(ROWS + 2) / 3];
#pragma GCC unroll 8
    for (int g = 0; g < (ROWS + 2) / 3; ++g) rows[g] = a + 3 * g * stride;
    for (long step = 0; step < steps; ++step) {
        const v16 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16);
        b += PANEL;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const v16 x = _mm512_set1_ps(rows[r / 3][(r % 3) * stride]);
            sums[r][0] = multiply_add<T>(x, b0, sums[r][0]);
            sums[r][1] = multiply_add<T>(x, b1, sums[r][1]);
        }
#pragma GCC unroll 8
        for (int g = 0; g < (ROWS + 2) / 3; ++g) ++rows[g];
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) finish(row + r, sums[r][0], sums[r][1]);
}

// Rows `from` to `to` of a times one panel; `finish(row, columns 0 to 15, columns 16 to 31)` takes each row's sums.
template <class T, class Finish>
inline void product(const T* a, long width, long from, long to, const T* panel, Finish finish) {
    const long stride = words<T>(width), blocks = (to - from + TILE_ROWS - 1) / TILE_ROWS;
    const float* b = reinterpret_cast<const float*>(panel);
    for (long i = 0; i < blocks; ++i) {
        const long start = from + (to - from) * i / blocks, stop = from + (to - from) * (i + 1) / blocks;
        const float* x = reinterpret_cast<const float*>(a + start * width);
        switch (stop - start) {
#define NMOE_ROWS(n) \
    case n: tile<T, n>(x, stride, b, stride, start, finish); break;
            NMOE_ROWS(1) NMOE_ROWS(2) NMOE_ROWS(3) NMOE_ROWS(4) NMOE_ROWS(5) NMOE_ROWS(6) NMOE_ROWS(7)
            NMOE_ROWS(8) NMOE_ROWS(9) NMOE_ROWS(10) NMOE_ROWS(11) NMOE_ROWS(12) NMOE_ROWS(13) NMOE_ROWS(14)
#undef NMOE_ROWS
        }
    }
}

}  // namespace nmoe
