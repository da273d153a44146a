#include "elementwise.h"

#include "math.h"

namespace ANAPHORA_TARGET {

// 1 / sqrt(mean(x^2) + eps): lane by lane in order, then the lanes, then the rest.
float norm_factor(const float *x, int64_t width, float eps) {
    vf squares{};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        const vf v = load<vf>(x + i);
        squares = fma(v, v, squares);
    }
    float total = sum(squares);
    for (; i < width; ++i) total = x[i] * x[i] + total;
    return 1.0f / __builtin_sqrtf(total / static_cast<float>(width) + eps);
}

namespace {

using anaphora::QkNorm;
using anaphora::RotaryOp;
using anaphora::WeightType;
using anaphora::Weights;

void norm(const float *x, const float *weight, int64_t width, float eps, float scale, bool adds, float *out) {
    const float factor = norm_factor(x, width, eps);
    for (int64_t i = 0; i < width; ++i) {
        const float normed = x[i] * factor * weight[i];
        out[i] = adds ? out[i] + normed * scale : normed * scale;
    }
}

void rotate(const RotaryOp &op, float *qk, const float *cos, const float *sin) {
    const int64_t dim = op.head_dim, heads = op.query_heads + op.kv_heads, queries = op.query_heads * dim;
    if (op.norm == QkNorm::projection) {
        norm(qk, op.norm_weight, queries, op.norm_eps, 1, false, qk);
        norm(qk + queries, op.norm_weight + queries, op.kv_heads * dim, op.norm_eps, 1, false, qk + queries);
    }
    for (int64_t head = 0; head < heads; ++head) {
        float *x = qk + head * dim;
        if (op.norm == QkNorm::head) norm(x, op.norm_weight + head * dim, dim, op.norm_eps, 1, false, x);
        for (int i = 0; i < op.half; ++i) {
            const float first = x[i], second = x[i + op.half];
            x[i] = first * cos[i] - second * sin[i];
            x[i + op.half] = second * cos[i] + first * sin[i];
        }
    }
}

float from_bfloat16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    __builtin_memcpy(&value, &wide, sizeof value);
    return value;
}

void embed(const Weights &weights, int64_t token, float scale, float *out) {
    const auto *panel = static_cast<const char *>(weights.panels) + token / anaphora::kPanel * weights.panel_bytes();
    const int64_t lane = token % anaphora::kPanel;
    if (weights.type == WeightType::bfloat16) {
        const auto *values = reinterpret_cast<const uint16_t *>(panel) + lane * 2;
        for (int64_t k = 0; k < weights.inputs; ++k) out[k] = scale * from_bfloat16(values[k / 2 * 32 + k % 2]);
    } else {
        const auto *values = reinterpret_cast<const float *>(panel) + lane;
        for (int64_t k = 0; k < weights.inputs; ++k) out[k] = scale * values[k * anaphora::kPanel];
    }
}

int64_t argmax(const float *x, int64_t width) {
    vf best = splat(-__builtin_inff());
    vi at{}, unordered{}, index;
    for (int i = 0; i < kLanes; ++i) index[i] = i;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes, index += kLanes) {
        const vf v = load<vf>(x + i);
        const vi better = v > best;
        best = select(better, v, best);
        at = better ? index : at;
        unordered |= v != v;
    }
    float largest_value = best[0];
    int64_t found = at[0];
    int32_t nan = unordered[0];
    for (int lane = 1; lane < kLanes; ++lane) {
        nan |= unordered[lane];
        if (best[lane] > largest_value || (best[lane] == largest_value && at[lane] < found)) {
            largest_value = best[lane];
            found = at[lane];
        }
    }
    for (; i < width; ++i) {
        nan |= x[i] != x[i];
        if (x[i] > largest_value) {
            largest_value = x[i];
            found = i;
        }
    }
    if (!nan) return found;
    for (found = 0; x[found] == x[found];) ++found;
    return found;
}

uint32_t read(const void *memory, int64_t bytes) {
    vu bits[4]{};
    const auto *from = static_cast<const char *>(memory);
    constexpr int64_t kStep = 4 * sizeof(vu);
    for (int64_t at = 0; at + kStep <= bytes; at += kStep) {
        __builtin_prefetch(from + at + 1024);
        __builtin_prefetch(from + at + 1024 + 64);
        for (int i = 0; i < 4; ++i) bits[i] |= load<vu>(from + at + i * sizeof(vu));
    }
    const vu all = (bits[0] | bits[1]) | (bits[2] | bits[3]);
    return all[0] | all[kLanes - 1];
}

}  // namespace

extern const int lanes;
const int lanes = kLanes;
extern const anaphora::ElementwiseKernels elementwise_kernels;
const anaphora::ElementwiseKernels elementwise_kernels{embed, norm, rotate, argmax, read};

}  // namespace ANAPHORA_TARGET
