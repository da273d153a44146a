// One vector of floats as wide as the target's registers, in GCC/Clang vector extensions: the compiler knows the
// instructions, so one source serves every processor. Included once per target, inside its namespace.
#pragma once
#include <cstdint>
#include <cstring>

#ifndef ANAPHORA_LANES
#define ANAPHORA_LANES 8
#endif
#define INLINE inline __attribute__((always_inline))

namespace ANAPHORA_TARGET {

constexpr int kLanes = ANAPHORA_LANES;
typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vu16 __attribute__((vector_size(2 * kLanes)));
typedef int16_t vi16 __attribute__((vector_size(2 * kLanes)));
typedef int8_t vi8 __attribute__((vector_size(kLanes)));
typedef uint8_t vu8 __attribute__((vector_size(kLanes)));

template <typename V>
INLINE V load(const void *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <typename V>
INLINE void store(void *to, V v) {
    std::memcpy(to, &v, sizeof v);
}
INLINE vf splat(float x) { return x - vf{}; }
INLINE vf as_float(vu bits) { return (vf)bits; }
INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }  // -ffp-contract=fast: one rounding where the target has fma

// 2 x kLanes bfloat16 that lie as (even, odd) pairs -> the even and the odd ones.
INLINE void split_bf16(const void *from, vf &even, vf &odd) {
    vu pairs = load<vu>(from);
    even = as_float(pairs << 16);
    odd = as_float(pairs & 0xffff0000u);
}

INLINE float sum(vf v) {
    float total = 0;
    for (int i = 0; i < kLanes; ++i) total += v[i];
    return total;
}
INLINE float largest(vf v) {
    float best = v[0];
    for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

}  // namespace ANAPHORA_TARGET
