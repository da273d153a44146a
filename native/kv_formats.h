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
#include "widen.h"

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

// Formats with scales (storage/formats). Their codes are read as they are: scales multiply sums of keys' codes, and
// values' elements, which is exact (at most 8 bits times 11).
//     keys    element<e>(): `group` neighbouring dims share a scale
//     values  panel(): both vectors of a panel, times the scales that lie in floats, one for each `group` dims

INLINE vf whole(vi x) { return __builtin_convertvector(x, vf); }

struct Int8 {
    static constexpr int unit = 1, unit_bytes = 1, group = 32;
    template <int>
    static INLINE vf element(const uint8_t *from) {
        return whole(load_signed(from));
    }
    static INLINE float decode(const uint8_t *codes, int dim) { return static_cast<int8_t>(codes[dim]); }
};

struct Fp8 {  // e4m3
    static constexpr int unit = 1, unit_bytes = 1, group = 64;
    // The bits, moved to a float's places, are the number times 2^-120.
    static INLINE vf widen(vi code) { return as_float((vu)code << 20 & 0x87f00000u) * 0x1p120f; }
    template <int>
    static INLINE vf element(const uint8_t *from) {
        return widen(load_signed(from));
    }
    static INLINE float decode(const uint8_t *codes, int dim) {
        return widen(vi{} + static_cast<int8_t>(codes[dim]))[0];
    }
};

struct Int4Keys {  // after the wide dims, which are Int8's
    static constexpr int unit = 2, unit_bytes = 1, group = 1 << 16;
    static constexpr float wide_step = 0.125f;
    template <int e>
    static INLINE vf element(const uint8_t *from) {  // without the 8 that is taken off
        const vi pair = load_unsigned(from);
        return whole(e ? pair >> 4 : pair & 15);
    }
};

struct Int4Values {
    static constexpr int unit = 2, unit_bytes = 1, group = 8;
    static INLINE float decode(const uint8_t *codes, int dim) {
        return static_cast<float>((codes[dim / 2] >> dim % 2 * 4 & 15) - 8);
    }
};

// Dims first .. first + 2 * kLanes - 1 of a token's values, a vector at a time, in the order that place() says.
template <typename Reader>
INLINE void panel(const uint8_t *codes, const float *left_scale, const float *right_scale, vf &left, vf &right) {
    left = Reader::template element<0>(codes) * splat(*left_scale);
    right = Reader::template element<0>(codes + kLanes) * splat(*right_scale);
}
template <>
INLINE void panel<Int4Values>(const uint8_t *codes, const float *scale, const float *, vf &left, vf &right) {
#if ANAPHORA_LANES == 16
    const vi lanes = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
#else
    const vi lanes = {0, 0, 0, 0, 1, 1, 1, 1};
#endif
    const vi pair = load_unsigned(codes);
    const vf size = __builtin_shuffle(load<vf>(scale), lanes), off = size * -8.0f;
    left = fma(whole(pair & 15), size, off);  // exact
    right = fma(whole(pair >> 4), size, off);
}

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

// Whether the format has scales.
template <typename Reader>
constexpr bool kScaled = requires { Reader::group; };

// Calls fn with the reader of keys', or values', format.
template <typename Fn>
INLINE void with_either(anaphora::Format format, Fn &&fn) {
    switch (format) {
        case anaphora::Format::fp32: return fn(Fp32{});
        case anaphora::Format::bf16: return fn(Bf16{});
        case anaphora::Format::fp16: return fn(Fp16{});
        case anaphora::Format::int8: return fn(Int8{});
        case anaphora::Format::fp8: return fn(Fp8{});
        default: return;
    }
}
template <typename Fn>
INLINE void with_key_reader(anaphora::Format format, Fn &&fn) {
    format == anaphora::Format::int4_keys ? fn(Int4Keys{}) : with_either(format, fn);
}
template <typename Fn>
INLINE void with_value_reader(anaphora::Format format, Fn &&fn) {
    format == anaphora::Format::int4_values ? fn(Int4Values{}) : with_either(format, fn);
}

// kv_write_kernels.cpp
bool write_keys(const anaphora::NewTokens &tokens);
bool write_values(const anaphora::NewTokens &tokens);
// turn_kernels.cpp
void turn(const anaphora::Turn &turn, const float *from, int64_t from_stride, int rows, float *to, int64_t to_stride);

}  // namespace ANAPHORA_TARGET
