// Readers of the stored forms of keys and values (storage/formats). Included once per target, after simd.h.
//
// A unit is `unit` neighbouring dims of one token in unit_bytes bytes, made for one lane:
//     keys    lanes are tokens: element<e>() is dim e of the unit, of kLanes tokens
//     values  lanes are units of one token: a panel of 2 * kLanes dims is two vectors, half<0>() and half<1>(), whose
//             lanes hold the dims that place() says
// One vector at a time: the tiles fill all registers but three.
#pragma once
#include "attention_tile.h"
#include "simd.h"

namespace ANAPHORA_TARGET {

struct Fp32 {
    static constexpr int unit = 1, unit_bytes = 4;
    template <int>
    static INLINE vf element(const uint8_t *from) {
        return load<vf>(from);
    }
    template <int v>
    static INLINE vf half(const uint8_t *from) {
        return load<vf>(from + v * sizeof(vf));
    }
    static INLINE float decode(const uint8_t *codes, int dim) {
        float x;
        std::memcpy(&x, codes + 4 * dim, sizeof x);
        return x;
    }
    static INLINE void encode(float x, uint8_t *unit, int) { std::memcpy(unit, &x, sizeof x); }
};

struct Bf16 {
    static constexpr int unit = 2, unit_bytes = 4;
    template <int e>
    static INLINE vf element(const uint8_t *from) {
        const vu pair = load<vu>(from);
        return as_float(e ? pair & 0xffff0000u : pair << 16);
    }
    template <int v>
    static INLINE vf half(const uint8_t *from) {
        return element<v>(from);
    }
    static INLINE float decode(const uint8_t *codes, int dim) {
        uint16_t half;
        std::memcpy(&half, codes + 2 * dim, sizeof half);
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }
    static INLINE void encode(float x, uint8_t *unit, int place) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        const uint16_t half = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
        std::memcpy(unit + 2 * place, &half, sizeof half);
    }
};

struct Fp16 {
    static constexpr int unit = 2, unit_bytes = 4;
    // The bits of a half, moved to a float's places, are the number times 2^-112; all exponent bits set is no number.
    static INLINE vf widen(vu half) {
        const vu size = (half & 0x7fffu) << 13;
        const vf number = as_float(size) * 0x1p112f;
        const vu special = (vu)(size >= 0x0f800000u) & 0x7f800000u;
        return as_float((vu)number | special | (half & 0x8000u) << 16);
    }
    template <int e>
    static INLINE vf element(const uint8_t *from) {
        const vu pair = load<vu>(from);
        return widen(e ? pair >> 16 : pair & 0xffffu);
    }
    template <int v>
    static INLINE vf half(const uint8_t *from) {
        return element<v>(from);
    }
    static INLINE float decode(const uint8_t *codes, int dim) {
        uint16_t half;
        std::memcpy(&half, codes + 2 * dim, sizeof half);
        return widen(vu{} + static_cast<uint32_t>(half))[0];
    }
    // To the nearest, ties to even.
    static INLINE void encode(float x, uint8_t *unit, int place) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
        uint32_t half;
        if (size > 0x7f800000u) {
            half = 0x7e00u;
        } else if (size >= 0x477ff000u) {  // 65520: rounds to infinity
            half = 0x7c00u;
        } else if (size < 0x38800000u) {  // below 2^-14: the sum with 1/2 rounds to units of 2^-24
            float tiny;
            std::memcpy(&tiny, &size, sizeof tiny);
            tiny += 0.5f;
            std::memcpy(&half, &tiny, sizeof half);
            half -= 0x3f000000u;
        } else {
            half = (size - 0x38000000u + 0x0fffu + (size >> 13 & 1)) >> 13;
        }
        const uint16_t stored = static_cast<uint16_t>(half | sign);
        std::memcpy(unit + 2 * place, &stored, sizeof stored);
    }
};

// Where vector v's lane i of a panel belongs among the panel's dims.
template <typename Reader>
constexpr int place(int v, int i) {
    return Reader::unit == 2 ? 2 * i + v : v * kLanes + i;
}

// Dims with the last unit filled up.
template <typename Reader>
constexpr int padded(int dim) {
    return (dim + Reader::unit - 1) / Reader::unit * Reader::unit;
}

// Calls fn with the reader of a format.
template <typename Fn>
INLINE void with_reader(anaphora::Format format, Fn &&fn) {
    switch (format) {
        case anaphora::Format::fp32: return fn(Fp32{});
        case anaphora::Format::bf16: return fn(Bf16{});
        case anaphora::Format::fp16: return fn(Fp16{});
    }
}

// kv_write_kernels.cpp
void write_keys(const anaphora::NewTokens &tokens);
void write_values(const anaphora::NewTokens &tokens);

}  // namespace ANAPHORA_TARGET
