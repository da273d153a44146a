// Where the tokens of a tile's segment lie, and which of them are wanted. Included once per target.
#pragma once
#include "attention_loops.h"

namespace ANAPHORA_TARGET {
namespace {

using anaphora::Segment;
using anaphora::Tile;

// Stored keys (or values, `skip` bytes behind them) of the groups that [first, end) touches.
template <typename Reader>
void locate(const Tile &tile, const Segment &segment, bool keys, Source &source) {
    const int64_t row = (tile.value_dim + Reader::unit - 1) / Reader::unit * Reader::unit_bytes;
    source.step = keys ? tile.block_size * Reader::unit_bytes : row;
    const int64_t token = keys ? Reader::unit_bytes : row;
    for (int g = segment.first_token / kGroup; g * kGroup < segment.end_token; ++g) {
        const int at = g * kGroup;
        const uint8_t *piece = segment.pieces[at / tile.block_size] + (keys ? 0 : tile.key_bytes);
        source.group[g] = piece + at % tile.block_size * token;
    }
}

// The segment's tokens that any of the rows sees.
INLINE Range seen(const Tile &tile, const Segment &segment, int row, int rows) {
    Range range{kPartition, 0};
    for (int r = row; r < row + rows; ++r)
        if (tile.begin[r] < tile.end[r]) {
            if (tile.begin[r] < range.begin) range.begin = tile.begin[r];
            if (tile.end[r] > range.end) range.end = tile.end[r];
        }
    if (range.begin < segment.first_token) range.begin = segment.first_token;
    if (range.end > segment.end_token) range.end = segment.end_token;
    return range;
}

// A panel's first dim: the last one ends with the last dim, and may overlap the one before (the same chains again).
template <typename Reader>
INLINE int panel_dim(int panel, int dim) {
    const int last = padded<Reader>(dim) - kPanelDims, at = panel * kPanelDims;
    return at < last ? at : last > 0 ? last : 0;
}

// A panel's dims of tokens first .. end - 1 as floats [kPartition][kPanelDims].
template <typename Reader>
void decode_values(const Source &source, int dim, int first_dim, int first, int end, float *decoded, Source &into) {
    into.step = kPanelDims * sizeof(float);
    const bool whole = padded<Reader>(dim) >= kPanelDims;
    for (int t = first; t < end; ++t) {
        const uint8_t *token = source.group[t / kGroup] + t % kGroup * source.step;
        float *to = decoded + t * kPanelDims;
        into.group[t / kGroup] = reinterpret_cast<const uint8_t *>(decoded + t / kGroup * kGroup * kPanelDims);
        if (whole) {
            const uint8_t *panel = token + first_dim / Reader::unit * Reader::unit_bytes;
            store(to, Reader::template half<0>(panel));
            store(to + kLanes, Reader::template half<1>(panel));
        } else {
            for (int v = 0; v < 2; ++v)
                for (int i = 0; i < kLanes; ++i) {
                    const int d = place<Reader>(v, i);
                    to[v * kLanes + i] = d < dim ? Reader::decode(token, d) : 0;
                }
        }
    }
}

}  // namespace
}  // namespace ANAPHORA_TARGET
