#include "packed.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "pool.h"

namespace anaphora {
namespace {

// Weights lie one behind the other in large pieces of memory: huge pages without a rest at the end of each matrix.
std::shared_ptr<std::byte[]> lasting(size_t bytes) {
    constexpr size_t kPiece = size_t{64} << 20;
    static std::mutex mutex;
    static std::shared_ptr<std::byte[]> piece;
    static size_t used = kPiece;
    const size_t whole = (bytes + 63) / 64 * 64;
    if (whole > kPiece / 4) return std::shared_ptr<std::byte[]>(allocate(whole).release(), Free{});
    std::lock_guard lock(mutex);
    if (used + whole > kPiece) {
        piece = std::shared_ptr<std::byte[]>(allocate(kPiece).release(), Free{});
        used = 0;
    }
    std::byte *begin = piece.get() + used;
    used += whole;
    return std::shared_ptr<std::byte[]>(piece, begin);
}

// Row of the given weight that is output `lane` of a panel; -1 for what only fills it up.
int64_t source_row(const Weights &weights, int64_t panel, int64_t lane) {
    const int64_t half = weights.gated ? panel % 2 : 0;
    const int64_t row = (weights.gated ? panel / 2 : panel) * kPanel + lane;
    return row < weights.outputs ? half * weights.outputs + row : -1;
}

// T: two bfloat16 or one float32; the inputs are taken T by T. Sixteen T of each of sixteen rows are turned at a time,
// so that every line of memory is read and written whole.
template <typename T>
void pack(const Weights &weights, const std::byte *source, size_t element, std::byte *to, int64_t panel) {
    const int64_t steps = weights.panel_bytes() / static_cast<int64_t>(kPanel * sizeof(T));
    const size_t row_bytes = static_cast<size_t>(weights.inputs) * element;
    T *out = reinterpret_cast<T *>(to + panel * weights.panel_bytes());
    constexpr int64_t kTile = 16;
    T tile[kPanel][kTile];
    for (int64_t first = 0; first < steps; first += kTile) {
        const int64_t count = std::min(kTile, steps - first);
        const size_t at = static_cast<size_t>(first) * sizeof(T);
        const size_t bytes = std::min(row_bytes - at, sizeof tile[0]);
        for (int64_t lane = 0; lane < kPanel; ++lane) {
            const int64_t row = source_row(weights, panel, lane);
            if (row < 0 || bytes < sizeof tile[0]) std::memset(tile[lane], 0, sizeof tile[lane]);
            if (row >= 0) std::memcpy(tile[lane], source + static_cast<size_t>(row) * row_bytes + at, bytes);
        }
        for (int64_t step = 0; step < count; ++step)
            for (int64_t lane = 0; lane < kPanel; ++lane) out[(first + step) * kPanel + lane] = tile[lane][step];
    }
}

}  // namespace

Packed::Packed(const void *weight, WeightType type, int64_t outputs, int64_t inputs, bool gated, const float *bias) {
    weights_.inputs = inputs;
    weights_.outputs = gated ? outputs / 2 : outputs;
    weights_.panel_count = (weights_.outputs + kPanel - 1) / kPanel * (gated ? 2 : 1);
    weights_.type = type;
    weights_.gated = gated;
    memory_ = lasting(bytes());
    weights_.panels = memory_.get();
    const auto *source = static_cast<const std::byte *>(weight);
    const int panels = static_cast<int>(weights_.panel_count);
    pool()->run([&](Worker &worker) {
        for (int panel; (panel = worker.claim(panels)) >= 0;) {
            if (type == WeightType::bfloat16)
                pack<uint32_t>(weights_, source, 2, memory_.get(), panel);
            else
                pack<float>(weights_, source, 4, memory_.get(), panel);
        }
    });
    if (!bias) return;
    bias_.resize(static_cast<size_t>(panels) * kPanel);
    for (int64_t i = 0; i < panels * kPanel; ++i) {
        const int64_t row = source_row(weights_, i / kPanel, i % kPanel);
        if (row >= 0) bias_[i] = bias[row];
    }
    weights_.bias = bias_.data();
}

}  // namespace anaphora
