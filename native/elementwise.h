// What happens to rows between the products: the interface between the targets' kernels and the rest.
#pragma once
#include <cstdint>

#include "linear.h"

namespace anaphora {

enum class QkNorm : int { none, head, projection };

// Queries and keys of a row: [query_heads + kv_heads][head_dim].
struct RotaryOp {
    int query_heads, kv_heads, head_dim;
    QkNorm norm = QkNorm::none;
    const float *norm_weight = nullptr;  // [query_heads + kv_heads][head_dim]
    float norm_eps = 0;
    int half = 0;  // elements i and i + half turn together, i < half; 0 = no positions
};

struct ElementwiseKernels {
    // out[inputs] = scale * row `token` of the weight
    void (*embed)(const Weights &weights, int64_t token, float scale, float *out);
    // out = scale * norm(x) * weight, or out += that. x and out may be the same.
    void (*norm)(const float *x, const float *weight, int64_t width, float eps, float scale, bool adds, float *out);
    // Norm, then turn by cos and sin [half]; in place.
    void (*rotate)(const RotaryOp &op, float *qk, const float *cos, const float *sin);
    // The lowest index of the largest value; NaN counts as larger than any.
    int64_t (*argmax)(const float *x, int64_t width);
    // Reads whole cache lines of memory and does nothing with them; for measuring.
    uint32_t (*read)(const void *memory, int64_t bytes);
};

}  // namespace anaphora
