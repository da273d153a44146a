// Products of a few or many rows with packed weights: the interface between the targets' kernels and the rest.
#pragma once
#include <cstdint>

namespace anaphora {

constexpr int kPanel = 16;       // outputs that lie together
constexpr int kSlab = 512;       // inputs that a tile takes at a time: its rows and its weights stay in the first cache
constexpr int kSlabStride = 528;  // floats from row to row of a slab: not a power of two, rows fall into different sets
constexpr int kBlockRows = 96;   // rows that are prepared together: a slab of them stays in the second cache

enum class WeightType : int { bfloat16, float32 };
enum class Activation : int { none, silu, gelu, gelu_tanh, relu };

// weight [outputs, inputs] as panels of 16 outputs, filled up with zeros:
//     bfloat16  [panels][pairs][16][2]      inputs 2p and 2p + 1 of an output lie side by side
//     float32   [panels][pairs * 2][16]
// With `gated` the panels alternate: 16 outputs of the gate, the same 16 of the other half, and so on; `outputs` is
// then what is left after gating.
struct Weights {
    const void *panels = nullptr;
    const float *bias = nullptr;  // [panels * 16], or none
    int64_t inputs = 0;
    int64_t outputs = 0;
    int64_t panel_count = 0;
    WeightType type = WeightType::bfloat16;
    bool gated = false;

    [[gnu::always_inline]] int64_t pairs() const { return (inputs + 1) / 2; }
    [[gnu::always_inline]] int64_t slabs() const { return (2 * pairs() + kSlab - 1) / kSlab; }
    [[gnu::always_inline]] int64_t panel_bytes() const { return pairs() * kPanel * (type == WeightType::bfloat16 ? 4 : 8); }
};

// y = (norm(x) weight^T + bias) * scale;  softcap * tanh(y / softcap);  activation(gate) * y;  out = y or out + y
struct LinearOp {
    Weights weights;
    const float *norm = nullptr;  // [inputs]: the rows are RMS-normed first
    float norm_eps = 0;
    float scale = 1;
    float softcap = 0;  // 0 = none
    Activation activation = Activation::none;  // of the gate, when gated
    bool adds = false;
};

struct LinearRows {
    const float *x;
    int64_t x_stride;
    float *out;
    int64_t out_stride;
    const int32_t *picked = nullptr;  // row i of the product is row picked[i] of x
};

struct LinearKernels {
    // Rows begin .. end (at most kBlockRows), normed where the op says so -> packed [slabs][end - begin][kSlabStride].
    void (*prepare)(const LinearOp &op, const LinearRows &rows, int begin, int end, float *packed);
    // Their product with panels first .. last -> out. `sums`: room for [end - begin][(last - first) * 16].
    void (*multiply)(const LinearOp &op, const LinearRows &rows, int begin, int end, int first, int last,
                     const float *packed, float *sums);
};

}  // namespace anaphora
