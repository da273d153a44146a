// Small products: vectors of one head by that head's matrix.
#include "kv_formats.h"

namespace ANAPHORA_TARGET {
namespace {

using anaphora::Turn;

// Columns first .. first + V * kLanes - 1 of R rows.
template <int R, int V>
INLINE void columns(const Turn &turn, const float *from, int64_t from_stride, int first, float *to,
                    int64_t to_stride) {
    vf sums[R][V] = {};
    for (int d = 0; d < turn.dim; ++d) {
        const float *weights = turn.matrix + static_cast<int64_t>(d) * turn.dim + first;
        const float mean = turn.mean ? turn.mean[d] : 0.0f;
        for (int r = 0; r < R; ++r) {
            const vf x = splat(from[r * from_stride + d] - mean);
            for (int v = 0; v < V; ++v) sums[r][v] = fma(x, load<vf>(weights + v * kLanes), sums[r][v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(to + r * to_stride + first + v * kLanes, sums[r][v] * turn.scale);
}

template <int R>
void all_columns(const Turn &turn, const float *from, int64_t from_stride, float *to, int64_t to_stride) {
    constexpr int step = 16, wide = 64;
    int first = 0;
    if (R == 1)
        for (; first + wide <= turn.dim; first += wide)
            columns<R, wide / kLanes>(turn, from, from_stride, first, to, to_stride);
    for (; first < turn.dim; first += step) columns<R, step / kLanes>(turn, from, from_stride, first, to, to_stride);
}

}  // namespace

void turn(const Turn &turn, const float *from, int64_t from_stride, int rows, float *to, int64_t to_stride) {
    int row = 0;
    for (; row + 4 <= rows; row += 4)
        all_columns<4>(turn, from + row * from_stride, from_stride, to + row * to_stride, to_stride);
    for (; row < rows; ++row)
        all_columns<1>(turn, from + row * from_stride, from_stride, to + row * to_stride, to_stride);
}

}  // namespace ANAPHORA_TARGET
