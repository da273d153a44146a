// Every operation is torch's, in its order (storage/formats/{scaled,nibbles}.py has the reasons). Compiled without
// contraction.
#include "kv_encode.h"

#include "kv_formats.h"

namespace ANAPHORA_TARGET {
namespace {

using anaphora::kMostDims;

constexpr float kLargestHalf = 65504.0f, kLargestFp8 = 448.0f;
// Of scales that are tried, the first of the best stays (nibbles.py).
constexpr float kSizes[] = {1.0 / -8, 1.06 / -8, 0.94 / -8, 0.88 / -8, 0.82 / -8, 0.76 / -8, 0.7 / -8};
constexpr int kNumSizes = sizeof kSizes / sizeof *kSizes;

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float size_of(float x) { return __builtin_fabsf(x); }

INLINE float clamp(float x, float largest) { return x < -largest ? -largest : x > largest ? largest : x; }

// The largest size; NaN and infinity are above any other.
INLINE uint32_t largest_bits(const float *x, int n) {
    uint32_t most = 0;
    for (int i = 0; i < n; ++i) {
        const uint32_t size = bits_of(x[i]) & 0x7fffffffu;
        most = size > most ? size : most;
    }
    return most;
}

INLINE bool finite(uint32_t size) { return size < 0x7f800000u; }

INLINE float as_number(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE vf sizes_of(vf x) { return as_float((vu)x & 0x7fffffffu); }

INLINE vf within(vf x, vf low, vf high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

INLINE vf nearest(vf x) {
    const vf magic = splat(12582912.0f);
    return x + magic - magic;
}

// To the nearest e4m3, ties to even; |x| <= 448.
INLINE vu fp8_of(vf x) {
    const vu size = (vu)x & 0x7fffffffu;
    const vu small = (vu)(as_float(size) + 16384.0f) - 0x46800000u;  // below 2^-6: the sum rounds to units of 2^-9
    const vu normal = (size - 0x3c000000u + 0x7ffffu + (size >> 20 & 1)) >> 20;
    return (size < 0x3c800000u ? small : normal) | ((vu)x >> 24 & 0x80u);
}

template <typename Code>
INLINE bool encode_bytes(const float *x, int dim, int group, float largest, uint8_t *codes, uint8_t *scales,
                         Code &&code) {
    for (int first = 0; first < dim; first += group, scales += 2) {
        const int end = dim - first < group ? dim : first + group;
        const uint32_t most = largest_bits(x + first, end - first);
        if (!finite(most)) return false;
        Fp16::encode(clamp(as_number(most) / largest, kLargestHalf), scales, 0);
        const float scale = Fp16::decode(scales, 0);
        const vf divisor = splat(scale > 0x1p-24f ? scale : 0x1p-24f);
        for (int i = first; i < end; i += kLanes) {
            const vf ratio = within(load<vf>(x + i) / divisor, splat(-largest), splat(largest));
            store(codes + i, __builtin_convertvector(code(ratio), vu8));
        }
    }
    return true;
}

// A token's keys, those with four bits first, and what their codes may be.
struct Keys {
    int dim;
    float x[kMostDims], step[kMostDims], low[kMostDims], high[kMostDims];
};

// Codes of one scale, and their squared error.
struct Tried {
    float codes[kMostDims];
    float scale, error;
    uint8_t stored[2];
};

// By halves: the order is torch's. Overwrites x, which has room for one number more.
INLINE float sum_of(float *x, int n) {
    while (n > 1) {
        if (n % 2) x[n++] = 0;
        n /= 2;
        int i = 0;
        for (; i + kLanes <= n; i += kLanes) store(x + i, load<vf>(x + i) + load<vf>(x + i + n));
        for (; i < n; ++i) x[i] += x[i + n];
    }
    return x[0];
}

INLINE void try_scale(const Keys &keys, float scale, Tried &to) {
    Fp16::encode(clamp(scale, kLargestHalf), to.stored, 0);
    to.scale = Fp16::decode(to.stored, 0);
    const float divisor = to.scale == 0 ? 0x1p-14f : to.scale;
    float errors[kMostDims + 1];
    for (int i = 0; i < keys.dim; i += kLanes) {
        const vf x = load<vf>(keys.x + i), step = load<vf>(keys.step + i);
        const vf ratio = within(x / (splat(divisor) * step), splat(-1e6f), splat(1e6f));
        const vf code = within(nearest(ratio), load<vf>(keys.low + i), load<vf>(keys.high + i));
        const vf off = code * step * to.scale - x;
        store(to.codes + i, code);
        store(errors + i, off * off);
    }
    to.error = sum_of(errors, keys.dim);
}

INLINE void pack(const float *codes, int n, uint8_t *to) {
    for (int i = 0; i < n; i += 2)
        to[i / 2] = static_cast<uint8_t>((static_cast<int>(codes[i]) + 8) | (static_cast<int>(codes[i + 1]) + 8) << 4);
}

// Groups of values, a group a lane: codes of one scale each, and their squared errors.
struct TriedGroups {
    vf codes[Int4Values::group], error;
    vu stored;
};

INLINE TriedGroups try_scales(const vf *x, vf scales) {
    constexpr int n = Int4Values::group;
    TriedGroups to;
    vf errors[n];
    to.stored = fp8_of(within(scales, splat(-kLargestFp8), splat(kLargestFp8)));
    const vf scale = Fp8::widen((vi)(to.stored << 24) >> 24);
    const vf divisor = scale == 0.0f ? splat(0x1p-6f) : scale;
    for (int i = 0; i < n; ++i) {
        const vf ratio = within(x[i] / divisor, splat(-1e6f), splat(1e6f));
        to.codes[i] = within(nearest(ratio), splat(-8), splat(7));
        const vf off = to.codes[i] * scale - x[i];
        errors[i] = off * off;
    }
    for (int half = n / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) errors[i] += errors[i + half];
    to.error = errors[0];
    return to;
}

}  // namespace

bool encode_int8(const float *x, int dim, uint8_t *codes, uint8_t *scales) {
    return encode_bytes(x, dim, Int8::group, 127.0f, codes, scales,
                        [](vf x) { return (vu)__builtin_convertvector(nearest(x), vi); });
}

bool encode_fp8(const float *x, int dim, uint8_t *codes, uint8_t *scales) {
    return encode_bytes(x, dim, Fp8::group, kLargestFp8, codes, scales, fp8_of);
}

bool encode_int4_keys(const float *x, int dim, uint8_t *codes, uint8_t *scales) {
    const int wides = dim / anaphora::kWideShare, n = dim - wides;
    if (!finite(largest_bits(x, dim))) return false;
    const float least = as_number(largest_bits(x, wides)) / (127 * Int4Keys::wide_step);
    Keys keys;
    keys.dim = dim;
    for (int i = 0; i < dim; ++i) {
        const bool wide = i >= n;
        keys.x[i] = x[wide ? i - n : i + wides];
        keys.step[i] = wide ? Int4Keys::wide_step : 1.0f;
        keys.low[i] = wide ? -127 : -8, keys.high[i] = wide ? 127 : 7;
    }
    float extreme = keys.x[0];  // the first of several
    for (int i = 1; i < n; ++i)
        if (size_of(keys.x[i]) > size_of(extreme)) extreme = keys.x[i];
    Tried tried[2], *best = nullptr, *next = tried;
    for (float size : kSizes) {
        const float scale = extreme * size;
        try_scale(keys, size_of(scale) >= least ? scale : scale < 0 ? -least : least, *next);
        if (best == nullptr || next->error < best->error) best = next, next = &tried[best == tried];
    }
    for (int i = 0; i < wides; ++i) codes[i] = static_cast<uint8_t>(static_cast<int8_t>(best->codes[n + i]));
    pack(best->codes, n, codes + wides);
    std::memcpy(scales, best->stored, 2);
    return true;
}

bool encode_int4_values(const float *x, int dim, uint8_t *codes, uint8_t *scales) {
    constexpr int n = Int4Values::group;
    if (!finite(largest_bits(x, dim))) return false;
    for (int left = dim / n; left > 0; left -= kLanes, x += kLanes * n, codes += kLanes * n / 2, scales += kLanes) {
        const int groups = left < kLanes ? left : kLanes;
        float turned[n][kLanes] = {};
        for (int g = 0; g < groups; ++g)
            for (int i = 0; i < n; ++i) turned[i][g] = x[g * n + i];
        vf each[n];
        for (int i = 0; i < n; ++i) each[i] = load<vf>(turned[i]);
        vf extreme = each[0];  // the first of several
        for (int i = 1; i < n; ++i) extreme = sizes_of(each[i]) > sizes_of(extreme) ? each[i] : extreme;
        TriedGroups best = try_scales(each, extreme * kSizes[0]);
        for (int s = 1; s < kNumSizes; ++s) {
            const TriedGroups other = try_scales(each, extreme * kSizes[s]);
            const vi better = other.error < best.error;
            for (int i = 0; i < n; ++i) best.codes[i] = better ? other.codes[i] : best.codes[i];
            best.error = better ? other.error : best.error;
            best.stored = better ? other.stored : best.stored;
        }
        vu word = {};  // the group's codes, the first in the low bits
        for (int i = 0; i < n; ++i) word |= (vu)__builtin_convertvector(best.codes[i] + 8.0f, vi) << 4 * i;
        const vu8 bytes = __builtin_convertvector(best.stored, vu8);
        std::memcpy(codes, &word, groups * n / 2);
        std::memcpy(scales, &bytes, groups);
    }
    return true;
}

}  // namespace ANAPHORA_TARGET
