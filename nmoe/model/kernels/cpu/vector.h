// Sixteen numbers at a time (AVX-512), in fp32 whatever they are stored as.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace nmoe {

// The upper half of an fp32.
struct bf16 {
    uint16_t bits;
};

using v16 = __m512;

// The first n of sixteen.
inline __mmask16 first(long n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }

inline v16 all(float x) { return _mm512_set1_ps(x); }

inline v16 load(const float* p, __mmask16 mask = 0xffff) { return _mm512_maskz_loadu_ps(mask, p); }

inline v16 load(const bf16* p, __mmask16 mask = 0xffff) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store(float* p, v16 x, __mmask16 mask = 0xffff) { _mm512_mask_storeu_ps(p, mask, x); }

inline void store(bf16* p, v16 x, __mmask16 mask = 0xffff) {
    _mm256_mask_storeu_epi16(p, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

// x as it reads back once it has been stored as T: torch stores between operations, and the learner's bits are torch's.
template <class T>
inline v16 stored(v16 x);

template <>
inline v16 stored<float>(v16 x) {
    return x;
}

template <>
inline v16 stored<bf16>(v16 x) {
    const __m256i bits = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// e^x to two units in the last place: Cephes' polynomial over [-ln 2 / 2, ln 2 / 2]. 0 below -104, infinity above 89.
inline v16 exp(v16 x) {
    x = _mm512_max_ps(all(-104.0f), _mm512_min_ps(all(89.0f), x));  // in this order NaN stays NaN
    const v16 n = _mm512_roundscale_ps(_mm512_mul_ps(x, all(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    v16 r = _mm512_fnmadd_ps(n, all(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, all(-2.12194440e-4f), r);
    v16 p = all(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, all(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, all(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, all(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, all(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, all(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), all(1.0f));
    return _mm512_scalef_ps(p, n);
}

inline v16 sigmoid(v16 x) {
    return _mm512_div_ps(all(1.0f), _mm512_add_ps(all(1.0f), exp(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

}  // namespace nmoe
