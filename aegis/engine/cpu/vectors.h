/* Vectors of 16 floats, and bfloat16 as the upper halves of floats. */

#ifndef AEGIS_VECTORS_H
#define AEGIS_VECTORS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE __m512 widened(const uint16_t *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16));
}

/* Nearest, ties to even, as torch rounds; what is no number stays none. */
INLINE __m512i halves_of(__m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i nearest = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    return _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}

INLINE void store_halves(uint16_t *to, __m512 x) {
    _mm256_storeu_si256((void *)to, _mm512_cvtepi32_epi16(halves_of(x)));
}

INLINE __m512 rounded(__m512 x, int bf16) {
    return bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(halves_of(x), 16)) : x;
}

/* A weight or cached value: [at, at + 16) of an array of its type. */
INLINE __m512 loaded(const void *array, int64_t at, int bf16) {
    return bf16 ? widened((const uint16_t *)array + at) : _mm512_loadu_ps((const float *)array + at);
}

/* Cody and Waite's reduction, and a polynomial of the sixth degree: within 2 units of the last place. */
INLINE __m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-104.0f)), _mm512_set1_ps(89.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

#endif
