// Every sum is one chain of multiply-adds over the inputs in order, whatever the rows, the tile or the thread: a row's
// result never depends on what else is in the batch.
#include "linear.h"

#include "math.h"

namespace ANAPHORA_TARGET {

float norm_factor(const float *x, int64_t width, float eps);  // elementwise_kernels.cpp

namespace {

using namespace anaphora;

constexpr int kVectors = kPanel / kLanes;         // of a panel
constexpr int kTileRows = kLanes == 16 ? 12 : 5;  // with six of 8 lanes GCC spills a sum in every round
constexpr int kAhead = 1024;                      // bytes of weights to ask for before a single tile needs them

struct Bfloat16 {
    static constexpr int kPairBytes = kPanel * 4;
    INLINE static vf get(const char *pair, int odd, int v) {
        const vu both = load<vu>(pair + v * kLanes * 4);
        return as_float(odd ? both & 0xffff0000u : both << 16);
    }
};

struct Float32 {
    static constexpr int kPairBytes = kPanel * 8;
    INLINE static vf get(const char *pair, int odd, int v) {
        return load<vf>(pair + odd * kPanel * 4 + v * kLanes * 4);
    }
};

// Where several tiles read a piece of weights, their time is there to fetch the next piece into the second cache: each
// tile asks for its share, `step` bytes for a pair of inputs.
struct Coming {
    const char *at;
    int step;
};

// sums [M][stride] (+)= rows [M][kSlabStride] x `pairs` pairs of inputs of a panel
template <typename W, int M, bool Alone>
void tile(const float *rows, const char *panel, int pairs, float *sums, int64_t stride, bool first, Coming coming) {
    vf sum[M][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[m][v] = first ? vf{} : load<vf>(sums + m * stride + v * kLanes);
    for (int p = 0; p < pairs; ++p, panel += W::kPairBytes, rows += 2) {
        if constexpr (Alone) {
            for (int line = 0; line < W::kPairBytes; line += 64) __builtin_prefetch(panel + kAhead + line);
        } else {
            __builtin_prefetch(coming.at, 0, 2);
            coming.at += coming.step;
        }
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
            asm volatile("" ::: "memory");  // later loads stay below: the registers are enough for one half
            vf weight[kVectors];
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) weight[v] = W::get(panel, odd, v);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const vf x = splat(rows[m * kSlabStride + odd]);
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) sum[m][v] = fma(x, weight[v], sum[m][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) store(sums + m * stride + v * kLanes, sum[m][v]);
}

using Tile = void (*)(const float *, const char *, int, float *, int64_t, bool, Coming);

template <typename W, bool Alone, int M = 1>
INLINE Tile tile_of(int rows) {
    if constexpr (M < kTileRows)
        return rows == M ? static_cast<Tile>(tile<W, M, Alone>) : tile_of<W, Alone, M + 1>(rows);
    else
        return tile<W, M, Alone>;
}

template <typename W>
void sum_up(const Weights &weights, int count, int first, int last, const float *packed, float *sums) {
    const auto *panels = static_cast<const char *>(weights.panels);
    const int64_t stride = static_cast<int64_t>(last - first) * kPanel;
    // Tiles of at most kTileRows rows, as even as can be: five and five rather than six and four.
    const int tiles = (count + kTileRows - 1) / kTileRows;
    for (int64_t slab = 0; slab < weights.slabs(); ++slab, packed += static_cast<int64_t>(count) * kSlabStride) {
        const int64_t begin = slab * (kSlab / 2);
        const int64_t left = weights.pairs() - begin;
        const int pairs = static_cast<int>(left < kSlab / 2 ? left : kSlab / 2);
        for (int panel = first; panel < last; ++panel) {
            const char *at = panels + panel * weights.panel_bytes() + begin * W::kPairBytes;
            float *to = sums + (panel - first) * kPanel;
            Coming coming{at + weights.panel_bytes(), W::kPairBytes / tiles};
            for (int i = 0; i < tiles; ++i, coming.at += static_cast<int64_t>(pairs) * coming.step) {
                const int row = count * i / tiles, rows = count * (i + 1) / tiles - row;
                const Tile run = tiles == 1 ? tile_of<W, true>(rows) : tile_of<W, false>(rows);
                run(packed + static_cast<int64_t>(row) * kSlabStride, at, pairs, to + row * stride, stride, slab == 0,
                    coming);
            }
        }
    }
}

INLINE vf activate(Activation activation, vf x) {
    switch (activation) {
        case Activation::silu: return silu(x);
        case Activation::gelu: return gelu(x);
        case Activation::gelu_tanh: return gelu_tanh(x);
        case Activation::relu: return relu(x);
        case Activation::none: break;
    }
    return x;
}

// One vector of finished sums, as y of LinearOp.
INLINE vf finish(const LinearOp &op, const float *sums, const float *bias, Activation activation) {
    vf y = load<vf>(sums);
    if (bias) y += load<vf>(bias);
    if (op.scale != 1) y *= op.scale;
    if (op.softcap != 0) y = tanh(y / op.softcap) * op.softcap;
    return activate(activation, y);
}

INLINE void put(float *out, vf y, int64_t width, bool adds) {
    if (width >= kLanes) {
        store(out, adds ? load<vf>(out) + y : y);
        return;
    }
    for (int64_t i = 0; i < width; ++i) out[i] = adds ? out[i] + y[i] : y[i];
}

void deliver(const LinearOp &op, const LinearRows &rows, int begin, int count, int first, int last,
             const float *sums) {
    const Weights &weights = op.weights;
    const int step = weights.gated ? 2 : 1;
    for (int row = 0; row < count; ++row) {
        float *out = rows.out + (begin + row) * rows.out_stride;
        for (int panel = first; panel < last; panel += step) {
            const float *bias = weights.bias ? weights.bias + panel * kPanel : nullptr;
            const int64_t column = static_cast<int64_t>(panel / step) * kPanel;
            for (int i = 0; i < kPanel && column + i < weights.outputs; i += kLanes) {
                vf y = finish(op, sums + i, bias ? bias + i : nullptr, op.activation);
                if (weights.gated)
                    y *= finish(op, sums + kPanel + i, bias ? bias + kPanel + i : nullptr, Activation::none);
                put(out + column + i, y, weights.outputs - column - i, op.adds);
            }
            sums += step * kPanel;
        }
    }
}

void prepare(const LinearOp &op, const LinearRows &rows, int begin, int end, float *packed) {
    const int64_t inputs = op.weights.inputs;
    for (int row = begin; row < end; ++row) {
        const float *x = rows.x + (rows.picked ? rows.picked[row] : row) * rows.x_stride;
        const float factor = op.norm ? norm_factor(x, inputs, op.norm_eps) : 1;
        float *to = packed + static_cast<int64_t>(row - begin) * kSlabStride;
        for (int64_t k = 0; k < inputs; k += kSlab, to += static_cast<int64_t>(end - begin) * kSlabStride) {
            const int64_t width = inputs - k < kSlab ? inputs - k : kSlab;
            if (op.norm)
                for (int64_t i = 0; i < width; ++i) to[i] = x[k + i] * factor * op.norm[k + i];
            else
                for (int64_t i = 0; i < width; ++i) to[i] = x[k + i];
            if (width % 2) to[width] = 0;
        }
    }
}

void multiply(const LinearOp &op, const LinearRows &rows, int begin, int end, int first, int last, const float *packed,
              float *sums) {
    const auto sum = op.weights.type == WeightType::bfloat16 ? sum_up<Bfloat16> : sum_up<Float32>;
    sum(op.weights, end - begin, first, last, packed, sums);
    deliver(op, rows, begin, end - begin, first, last, sums);
}

}  // namespace

extern const anaphora::LinearKernels linear_kernels;
const anaphora::LinearKernels linear_kernels{prepare, multiply};

}  // namespace ANAPHORA_TARGET
