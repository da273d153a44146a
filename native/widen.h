// Loads of narrow elements, a vector lane each. Included once per target, after simd.h.
//
// What vector extensions make of this is right but slow: GCC 12 widens bytes one by one. So here, and only here, the
// processor's own instructions are called by name where a target has them.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace ANAPHORA_TARGET {

#if defined(__AVX512F__) && ANAPHORA_LANES == 16
constexpr __mmask16 kEvery = 0xffff;  // GCC 12 warns of the unmasked ones
INLINE vi load_signed(const uint8_t *from) { return (vi)_mm512_maskz_cvtepi8_epi32(kEvery, load<__m128i>(from)); }
INLINE vi load_unsigned(const uint8_t *from) { return (vi)_mm512_maskz_cvtepu8_epi32(kEvery, load<__m128i>(from)); }
INLINE vf load_halves(const uint8_t *from) { return (vf)_mm512_maskz_cvtph_ps(kEvery, load<__m256i>(from)); }
#elif defined(__AVX2__) && defined(__F16C__) && ANAPHORA_LANES == 8
INLINE vi load_signed(const uint8_t *from) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)); }
INLINE vi load_unsigned(const uint8_t *from) {
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
INLINE vf load_halves(const uint8_t *from) { return (vf)_mm256_cvtph_ps(load<__m128i>(from)); }
#else
INLINE vi load_signed(const uint8_t *from) {
    return __builtin_convertvector(__builtin_convertvector(load<vi8>(from), vi16), vi);
}
INLINE vi load_unsigned(const uint8_t *from) {
    return __builtin_convertvector(__builtin_convertvector(load<vu8>(from), vu16), vi);
}
// A half's bits, moved to a float's places, are the number times 2^-112; all exponent bits set is no number.
INLINE vf load_halves(const uint8_t *from) {
    const vu half = __builtin_convertvector(load<vu16>(from), vu), size = (half & 0x7fffu) << 13;
    const vu special = (vu)(size >= 0x0f800000u) & 0x7f800000u;
    return as_float((vu)(as_float(size) * 0x1p112f) | special | (half & 0x8000u) << 16);
}
#endif

}  // namespace ANAPHORA_TARGET
