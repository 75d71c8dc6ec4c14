// Sixteen fp32 numbers at a time: one register with AVX-512, otherwise several narrower ones.
//
// The same operations in the same order on every processor: with a fused multiply-add (AVX2 and later, ARM) fp32 results have the
// same bits everywhere.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nmoe {

// The upper half of an fp32.
struct bf16 {
    uint16_t bits;
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

constexpr bool WIDE = true;  // 32 registers that hold sixteen numbers each

using v16 = __m512;
using mask16 = __mmask16;

// The first n of sixteen.
inline mask16 first(long n) { return n >= 16 ? 0xffff : static_cast<mask16>((1u << n) - 1); }

inline v16 all(float x) { return _mm512_set1_ps(x); }
inline v16 fma(v16 a, v16 b, v16 sum) { return _mm512_fmadd_ps(a, b, sum); }
inline v16 fnma(v16 a, v16 b, v16 sum) { return _mm512_fnmadd_ps(a, b, sum); }  // sum - a b
inline v16 min(v16 a, v16 b) { return _mm512_min_ps(a, b); }  // b where one is NaN
inline v16 max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
inline v16 select(mask16 mask, v16 a, v16 b) { return _mm512_mask_mov_ps(b, mask, a); }  // a under the mask, b elsewhere
inline v16 nearest(v16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline v16 times_two_to(v16 x, v16 n) { return _mm512_scalef_ps(x, n); }

// ((0 + 8) + (4 + 12)) + ((2 + 10) + (6 + 14)), the odd ones alike, then these two.
inline float sum_of(v16 x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(v16 x) { return _mm512_reduce_max_ps(x); }

inline v16 load(const float* p, mask16 mask = 0xffff) { return _mm512_maskz_loadu_ps(mask, p); }

inline v16 load(const bf16* p, mask16 mask = 0xffff) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store(float* p, v16 x, mask16 mask = 0xffff) { _mm512_mask_storeu_ps(p, mask, x); }

// Rounded to bf16, ties to even; NaN stays NaN.
inline __m256i narrowed(v16 x) {
#ifdef __AVX512BF16__
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const mask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
}

inline void store(bf16* p, v16 x, mask16 mask = 0xffff) { _mm256_mask_storeu_epi16(p, mask, narrowed(x)); }

inline v16 rounded_to_bf16(v16 x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrowed(x)), 16)); }

// Words of two bf16 each: the one in the lower half, the one in the upper half.
inline v16 lower_bf16(v16 x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16)); }
inline v16 upper_bf16(v16 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// Words of two bf16 each, of rounded numbers.
inline v16 paired_bf16(v16 lower, v16 upper) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(rounded_to_bf16(lower)), 16);
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(rounded_to_bf16(upper))));
}

// Sixteen vectors' sums: of each four neighbours (0 + 2) + (1 + 3), then of the four groups (0 + 1) + (2 + 3).
inline v16 sums_of(const v16 (&x)[16]) {
    v16 pairs[8], fours[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) pairs[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
    const v16 low = _mm512_shuffle_f32x4(fours[0], fours[1], 0x88) + _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd);
    const v16 high = _mm512_shuffle_f32x4(fours[2], fours[3], 0x88) + _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd);
    return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
}

#else

constexpr bool WIDE = false;  // 16 registers (ARM: 32) that hold eight or four numbers each

#ifdef __AVX__
constexpr int WIDTH = 8;
#define NMOE_BY_PART(each) {each(a), each(b)}
#else
constexpr int WIDTH = 4;
#define NMOE_BY_PART(each) {each(a), each(b), each(c), each(d)}
#endif

typedef float part __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t words_ __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));

// Members rather than an array: GCC keeps them in registers.
struct v16 {
#ifdef __AVX__
    part a, b;
#else
    part a, b, c, d;
#endif
};

// `f` of each part of the arguments.
template <class F, class... V>
inline v16 by_part(F f, V... x) {
#define NMOE_EACH(member) f(x.member...)
    return v16 NMOE_BY_PART(NMOE_EACH);
#undef NMOE_EACH
}

// `f(i)` for the part of numbers i and on.
template <class F>
inline v16 from_parts(F f) {
#ifdef __AVX__
    return {f(0), f(8)};
#else
    return {f(0), f(4), f(8), f(12)};
#endif
}

inline v16 operator+(v16 a, v16 b) { return by_part([](part x, part y) { return x + y; }, a, b); }
inline v16 operator-(v16 a, v16 b) { return by_part([](part x, part y) { return x - y; }, a, b); }
inline v16 operator*(v16 a, v16 b) { return by_part([](part x, part y) { return x * y; }, a, b); }
inline v16 operator/(v16 a, v16 b) { return by_part([](part x, part y) { return x / y; }, a, b); }

// A mask is the first so many of sixteen.
using mask16 = int;

inline mask16 first(long n) { return n >= 16 ? 16 : static_cast<int>(n); }

inline v16 all(float x) {
#ifdef __AVX__
    const part each = _mm256_set1_ps(x);
#else
    const part each = {x, x, x, x};
#endif
    return from_parts([&](int) { return each; });
}

inline part fused(part a, part b, part sum) {
#if defined(__FMA__)
    return _mm256_fmadd_ps(a, b, sum);
#elif defined(__aarch64__)
    return vfmaq_f32(sum, a, b);
#else
    return a * b + sum;
#endif
}

inline v16 fma(v16 a, v16 b, v16 sum) { return by_part([](part x, part y, part z) { return fused(x, y, z); }, a, b, sum); }
inline v16 fnma(v16 a, v16 b, v16 sum) { return by_part([](part x, part y, part z) { return fused(-x, y, z); }, a, b, sum); }
inline v16 min(v16 a, v16 b) { return by_part([](part x, part y) { return x < y ? x : y; }, a, b); }
inline v16 max(v16 a, v16 b) { return by_part([](part x, part y) { return x > y ? x : y; }, a, b); }

inline v16 select(mask16 mask, v16 a, v16 b) {
    if (mask == 16) return a;
    float from[16], out[16];
    std::memcpy(from, &a, sizeof from);
    std::memcpy(out, &b, sizeof out);
    for (int i = 0; i < mask; ++i) out[i] = from[i];
    std::memcpy(&b, out, sizeof out);
    return b;
}

// Of numbers below 2^22, ties to even.
inline v16 nearest(v16 x) {
    const v16 anchor = all(12582912.0f);
    return (x + anchor) - anchor;
}

// In two steps, of which only the second can round: the least exponents are those of denormal numbers.
inline v16 times_two_to(v16 x, v16 n) {
    return by_part(
        [](part x, part n) {
            const ints whole = __builtin_convertvector(n, ints), half = whole >> 1;
            return x * reinterpret_cast<part>((half + 127) << 23) * reinterpret_cast<part>((whole - half + 127) << 23);
        },
        x, n);
}

inline float sum_of(v16 x) {
    float at[16];
    std::memcpy(at, &x, sizeof at);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) at[i] += at[i + width];
    return at[0];
}

inline float largest_of(v16 x) {
    float at[16];
    std::memcpy(at, &x, sizeof at);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) at[i] = at[i + width] > at[i] ? at[i + width] : at[i];
    return at[0];
}

inline v16 load(const float* p) {
    return from_parts([p](int i) {
        part x;
        std::memcpy(&x, p + i, sizeof x);
        return x;
    });
}

inline v16 load(const bf16* p) {
    return from_parts([p](int i) {
        halves narrow;
        std::memcpy(&narrow, p + i, sizeof narrow);
        return reinterpret_cast<part>(__builtin_convertvector(narrow, words_) << 16);
    });
}

// `f(part, i)` for the part of numbers i and on.
template <class F>
inline void to_parts(v16 x, F f) {
    f(x.a, 0), f(x.b, WIDTH);
#ifndef __AVX__
    f(x.c, 8), f(x.d, 12);
#endif
}

inline void store(float* p, v16 x) {
    to_parts(x, [p](part each, int i) { std::memcpy(p + i, &each, sizeof each); });
}

// Rounded to bf16, ties to even, as the upper halves of words; NaN stays NaN.
inline v16 rounded_to_bf16(v16 x) {
    return by_part(
        [](part x) {
            const words_ bits = reinterpret_cast<words_>(x);
            const words_ rounded = bits + 0x7fff + ((bits >> 16) & 1), kept = x == x ? rounded : bits | 0x400000;
            return reinterpret_cast<part>(kept & 0xffff0000);
        },
        x);
}

inline void store(bf16* p, v16 x) {
    x = rounded_to_bf16(x);
    to_parts(x, [p](part each, int i) {
        const halves narrow = __builtin_convertvector(reinterpret_cast<words_>(each) >> 16, halves);
        std::memcpy(p + i, &narrow, sizeof narrow);
    });
}

// The rest of a row, which ends within the sixteen: through a buffer.
template <class T>
inline v16 load(const T* p, mask16 mask) {
    if (mask == 16) return load(p);
    T buffer[16] = {};
    for (int i = 0; i < mask; ++i) buffer[i] = p[i];
    return load(buffer);
}

#ifdef __AVX__
template <>
inline v16 load<float>(const float* p, mask16 mask) {
    static const int32_t ones[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    const auto part_of = [&](int from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ones + 16 - mask + from));
    };
    return {_mm256_maskload_ps(p, part_of(0)), _mm256_maskload_ps(p + 8, part_of(8))};
}
#endif

template <class T>
inline void store(T* p, v16 x, mask16 mask) {
    if (mask == 16) return store(p, x);
    T buffer[16];
    store(buffer, x);
    for (int i = 0; i < mask; ++i) p[i] = buffer[i];
}

inline v16 lower_bf16(v16 x) {
    return by_part([](part x) { return reinterpret_cast<part>(reinterpret_cast<words_>(x) << 16); }, x);
}

inline v16 upper_bf16(v16 x) {
    return by_part([](part x) { return reinterpret_cast<part>(reinterpret_cast<words_>(x) & 0xffff0000); }, x);
}

inline v16 sums_of(const v16 (&x)[16]) {
#ifdef __AVX__
    // Of four vectors the sums of each four neighbours, those of one vector's halves in `low` and in `high`.
    const auto fours = [](part a, part b, part c, part d) {
        const __m256d ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b));
        const __m256d cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d));
        return _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)) + _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
    };
    const auto halves_added = [](part low, part high) {
        return _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
    };
    const auto ends = [&](int i) {
        return halves_added(fours(x[i].a, x[i + 1].a, x[i + 2].a, x[i + 3].a), fours(x[i].b, x[i + 1].b, x[i + 2].b, x[i + 3].b));
    };
    return {halves_added(ends(0), ends(4)), halves_added(ends(8), ends(12))};
#else
    float out[16], at[16], groups[4];
    for (int i = 0; i < 16; ++i) {
        std::memcpy(at, &x[i], sizeof at);
        for (int g = 0; g < 4; ++g) groups[g] = (at[4 * g] + at[4 * g + 2]) + (at[4 * g + 1] + at[4 * g + 3]);
        out[i] = (groups[0] + groups[1]) + (groups[2] + groups[3]);
    }
    return load(out);
#endif
}

#endif

inline v16 zero() { return all(0.0f); }

// x rounded as if it were stored as T and loaded again, because torch stores results between operations and the learner uses
// torch.
template <class T>
inline v16 stored(v16 x);

template <>
inline v16 stored<float>(v16 x) {
    return x;
}

template <>
inline v16 stored<bf16>(v16 x) {
    return rounded_to_bf16(x);
}

// e^x to two units in the last place: Cephes' polynomial over [-ln 2 / 2, ln 2 / 2]. 0 below -104, infinity above 89.
inline v16 exp(v16 x) {
    x = max(all(-104.0f), min(all(89.0f), x));  // in this order NaN stays NaN
    const v16 n = nearest(x * all(1.44269504f));
    v16 r = fnma(n, all(0.693359375f), x);
    r = fnma(n, all(-2.12194440e-4f), r);
    v16 p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r) + all(1.0f);
    return times_two_to(p, n);
}

inline v16 sigmoid(v16 x) { return all(1.0f) / (all(1.0f) + exp(zero() - x)); }

}  // namespace nmoe
