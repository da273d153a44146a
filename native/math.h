// Functions of whole vectors. Included once per target, after simd.h. The polynomials are least-squares fits,
// reweighted until the error is even (Lawson), of the functions named beside them.
#pragma once
#include "simd.h"

namespace ANAPHORA_TARGET {

INLINE vf abs(vf x) { return as_float((vu)x & 0x7fffffffu); }
INLINE vf copy_sign(vf size, vf sign) { return as_float(((vu)size & 0x7fffffffu) | ((vu)sign & 0x80000000u)); }

// x = n ln 2 + r, |r| <= ln 2 / 2; e^r = 1 + r + r^2 p(r). Within about 1 ulp; below -87.3 it is 0, above 88.7
// infinite, and NaN stays NaN.
INLINE vf exp(vf x) {
    const vf low = splat(-87.33654f), high = splat(88.72283f);
    const vf clamped = select(x < low, low, select(x > high, high, x));
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: the low bits of a sum with it are the rounded integer
    const vf shifted = fma(clamped, splat(1.44269504f), magic);
    const vf n = shifted - magic;
    vf r = fma(n, splat(-0.693145751953125f), clamped);  // ln 2 in two parts: the first times n is exact
    r = fma(n, splat(-1.428606765330187e-6f), r);
    vf p = splat(1.39517174e-3f);
    p = fma(p, r, splat(8.36959854e-3f));
    p = fma(p, r, splat(4.16661873e-2f));
    p = fma(p, r, splat(1.66665122e-1f));
    p = fma(p, r, splat(0.5f));
    const vf power = fma(r * r, p, r) + 1.0f;
    // 2^n in two steps: n = 128 has no float of its own
    const vi whole = (vi)shifted - (vi)magic, part = whole >> 1;
    const vf result = power * as_float((vu)((part + 127) << 23)) * as_float((vu)((whole - part + 127) << 23));
    return select(x < low, splat(0.0f), select(x > high, splat(__builtin_inff()), result));
}

INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

INLINE vf tanh(vf x) {
    const vf size = abs(x), square = x * x;
    vf p = splat(-5.66078071e-3f);  // (tanh(x) / x - 1) / x^2 in x^2, |x| < 0.63
    p = fma(p, square, splat(2.0601999e-2f));
    p = fma(p, square, splat(-5.37292287e-2f));
    p = fma(p, square, splat(1.33313283e-1f));
    p = fma(p, square, splat(-3.33332777e-1f));
    const vf small = fma(p * square, x, x);
    const vf large = 1.0f - 2.0f / (exp(size + size) + 1.0f);
    return select(size < 0.625f, small, copy_sign(large, x));
}

// x * Phi(x), Phi the normal distribution.
INLINE vf gelu(vf x) {
    const vf z = x * 0.707106781f, size = abs(z), square = z * z;
    vf p = splat(-5.6314189e-4f);  // erf(z) / z in z^2, |z| < 1
    p = fma(p, square, splat(4.91755083e-3f));
    p = fma(p, square, splat(-2.67113112e-2f));
    p = fma(p, square, splat(1.12801798e-1f));
    p = fma(p, square, splat(-3.7612325e-1f));
    p = fma(p, square, splat(1.12837911f));
    const vf inner = fma(p, z, splat(1.0f));
    const vf t = select(size > 5.0f, splat(5.0f), size);
    vf q = splat(-1.74563393e-05f);  // ln erfc(z) in z, 1 <= z <= 5
    q = fma(q, t, splat(3.85035848e-4f));
    q = fma(q, t, splat(-3.89172742e-3f));
    q = fma(q, t, splat(2.42676381e-2f));
    q = fma(q, t, splat(-1.0676565e-1f));
    q = fma(q, t, splat(-6.34917974e-1f));
    q = fma(q, t, splat(-1.12863362f));
    q = fma(q, t, splat(-3.17952872e-05f));
    const vf beyond = exp(q);  // 1 - erf(|z|)
    const vf outer = select(z < 0.0f, beyond, 2.0f - beyond);
    return 0.5f * x * select(size < 1.0f, inner, outer);
}

// As x * sigmoid(2u): 1 + tanh(u) = 2 sigmoid(2u), and nothing cancels.
INLINE vf gelu_tanh(vf x) {
    const vf u = 0.797884561f * fma(x * x * x, splat(0.044715f), x);
    return x * sigmoid(u + u);
}

INLINE vf silu(vf x) { return x * sigmoid(x); }
INLINE vf relu(vf x) { return select(x < 0.0f, splat(0.0f), x); }  // NaN stays

}  // namespace ANAPHORA_TARGET
