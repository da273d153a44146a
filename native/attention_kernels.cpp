// A tile of queries against one partition. Whether stored keys and values are decoded in registers (few rows) or once
// for all rows into the first cache changes no number: both give the same floats to the same chains.
#include "attention_code_values.h"

namespace ANAPHORA_TARGET {
namespace {

// Decodes the keys of groups first .. end - 1, and asks for those of the groups behind them, up to `last`.
template <typename Reader>
void decode_keys(const Source &source, int units, int first, int end, int last, float *decoded, Source &into) {
    into.step = kGroup * sizeof(float);
    for (int g = first; g < end; ++g, decoded += units * Reader::unit * kGroup) {
        into.group[g] = reinterpret_cast<const uint8_t *>(decoded);
        const int next = g + end - first < last ? g + end - first : g;
        for (int u = 0; u < units; ++u) {
            __builtin_prefetch(source.group[next] + u * source.step);
            UNROLL for (int v = 0; v < kGroup / kLanes; ++v) {
                const uint8_t *from = source.group[g] + u * source.step + v * kLanes * Reader::unit_bytes;
                each<Reader::unit>([&]<int e>() {
                    store(decoded + (u * Reader::unit + e) * kGroup + v * kLanes, Reader::template element<e>(from));
                });
            }
        }
    }
}

template <typename Reader>
void scores_of(const Tile &tile, const Segment &segment) {
    const int units = padded<Reader>(tile.key_dim) / Reader::unit, dims = units * Reader::unit;
    const int last = segment.first_row + segment.rows;
    const Range all = seen(tile, segment, segment.first_row, segment.rows);
    if (all.begin >= all.end) return;
    Source source;
    locate<Reader>(tile, segment, true, source);
    float *const query = tile.scratch.query, *const scores = tile.scratch.scores;
    if (segment.rows <= kDirect) {
        by_rows(segment.first_row, last, [&]<int R>(int row) {
            score<Reader, R>(source, units, query + row * dims, dims, all.begin / kGroup, (all.end - 1) / kGroup + 1,
                             scores + row * kPartition);
        });
        return;
    }
    const int fits = 4096 / (kGroup * dims), chunk = fits > 2 ? fits : 2, end = (all.end - 1) / kGroup + 1;
    Source decoded;
    for (int g = all.begin / kGroup; g < end; g += chunk) {
        const int stop = g + chunk < end ? g + chunk : end;
        decode_keys<Reader>(source, units, g, stop, end, tile.scratch.decoded, decoded);
        by_rows(segment.first_row, last, [&]<int R>(int row) {
            const Range range = seen(tile, segment, row, R);
            const int from = range.begin / kGroup, to = (range.end + kGroup - 1) / kGroup;
            score<Decoded, R>(decoded, dims, query + row * dims, dims, from > g ? from : g, to < stop ? to : stop,
                           scores + row * kPartition);
        });
    }
}

template <typename Reader>
void mix_of(const Tile &tile, const Segment &segment) {
    const int last = segment.first_row + segment.rows, panels = (tile.value_dim + kPanelDims - 1) / kPanelDims;
    const int64_t stride = panels * kPanelDims;
    const Range all = seen(tile, segment, segment.first_row, segment.rows);
    if (all.begin >= all.end) return;
    Source source;
    locate<Reader>(tile, segment, false, source);
    const float *const weights = tile.scratch.scores;
    float *const mixed = tile.scratch.mixed;
    if (segment.rows <= kDirect && padded<Reader>(tile.value_dim) >= kPanelDims) {
        by_rows(segment.first_row, last, [&]<int R>(int row) {
            constexpr int N = kPairs<R>;
            for (int t = all.begin; t < all.end; t = (t / kChunk + 1) * kChunk) {
                const int stop = (t / kChunk + 1) * kChunk, end = stop < all.end ? stop : all.end;
                for (int p = 0; p < panels;) {
                    int64_t offset[N];
                    for (int n = 0; n < N; ++n)
                        offset[n] = panel_dim<Reader>(p + n, tile.value_dim) / Reader::unit * Reader::unit_bytes;
                    const float *w = weights + row * kPartition;
                    float *to = mixed + row * stride + p * kPanelDims;
                    if (p + N <= panels) {
                        mix<Reader, R, N>(source, offset, t, end, all.end, w, to, stride);
                        p += N;
                    } else {
                        mix<Reader, R, 1>(source, offset, t, end, all.end, w, to, stride);
                        p += 1;
                    }
                }
            }
        });
        return;
    }
    Source decoded;
    const int64_t none[1] = {0};
    for (int p = 0; p < panels; ++p) {
        const int first_dim = panel_dim<Reader>(p, tile.value_dim);
        decode_values<Reader>(source, tile.value_dim, first_dim, all.begin, all.end, tile.scratch.decoded, decoded);
        by_rows(segment.first_row, last, [&]<int R>(int row) {
            const Range range = seen(tile, segment, row, R);
            mix<Decoded, R, 1>(decoded, none, range.begin, range.end, range.end, weights + row * kPartition,
                            mixed + row * stride + p * kPanelDims, stride);
        });
    }
}

// Memory is slow to begin: what the loops would wait for first is asked for before anything is computed.

constexpr int kLine = 64;                                           // bytes
constexpr int kFirstGroups = kTilesAhead * 4 * kLanes / kGroup;  // of the first tiles, at most four vectors wide

INLINE void expect(const uint8_t *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at);
}

// Keys that the loops do not ask for early enough: those of the first tiles, and all scales.
template <typename Reader>
void expect_keys(const Tile &tile, const Segment &segment) {
    const Range all = seen(tile, segment, segment.first_row, segment.rows);
    if (all.begin >= all.end) return;
    Source source;
    locate<Reader>(tile, segment, true, source);
    const int begin = all.begin / kGroup, end = (all.end - 1) / kGroup + 1;
    const int rows = code_bytes(tile.key, tile.key_dim) / Reader::unit_bytes;
    const int in_line = source.step < kLine ? kLine / static_cast<int>(source.step) : 1;
    for (int g = begin; g < end && g < begin + kFirstGroups; ++g)
        for (int row = 0; row < rows; row += in_line)
            expect(source.group[g] + row * source.step, kGroup * Reader::unit_bytes);
    if constexpr (kScaled<Reader>) {
        locate_scales(tile, segment, true, source);
        for (int g = begin; g < end; ++g)
            for (int row = 0; row < scale_bytes(tile.key, tile.key_dim) / 2; ++row)
                __builtin_prefetch(source.group[g] + row * source.step);
    }
}

// Values of the first chunk, or of all chunks where they are decoded at once, and all scales.
template <typename Reader>
void expect_values(const Tile &tile, const Segment &segment) {
    const Range all = seen(tile, segment, segment.first_row, segment.rows);
    if (all.begin >= all.end) return;
    Source source;
    locate<Reader>(tile, segment, false, source);
    const int end = segment.rows > kDirect || all.begin + kChunk > all.end ? all.end : all.begin + kChunk;
    for (int t = all.begin; t < end; ++t) expect(source.group[t / kGroup] + t % kGroup * source.step, source.step);
    if constexpr (kScaled<Reader>) {
        locate_scales(tile, segment, false, source);
        for (int g = all.begin / kGroup; g * kGroup < all.end; ++g) expect(source.group[g], kGroup * source.step);
    }
}

void load_queries(const Tile &tile, const float *const *query, float factor) {
    int dims = 0;
    with_key_reader(tile.key, [&](auto reader) { dims = padded<decltype(reader)>(tile.key_dim); });
    float *to = tile.scratch.query;
    if (tile.key == anaphora::Format::int4_keys) {
        for (int r = 0; r < tile.rows; ++r, to += dims + 1) load_query_of_int4(query[r], dims, factor, to);
        return;
    }
    for (int r = 0; r < tile.rows; ++r, to += dims) {
        for (int d = 0; d < tile.key_dim; ++d) to[d] = query[r][d] * factor;
        for (int d = tile.key_dim; d < dims; ++d) to[d] = 0;
    }
}

// The panel's dims in order.
template <typename Reader>
INLINE void in_order(vf &left, vf &right) {
    if constexpr (Reader::unit == 2) {
        const vf even = left, odd = right;
#if ANAPHORA_LANES == 16
        left = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        right = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
        left = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
        right = __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
    }
}

template <typename Reader>
void write_record(const Tile &tile, int row, int panels) {
    const float *mixed = tile.scratch.mixed + static_cast<int64_t>(row) * panels * kPanelDims;
    float *to = tile.record[row];
    for (int p = 0; p < panels; ++p, mixed += kPanelDims) {
        const int first = panel_dim<Reader>(p, tile.value_dim), rest = tile.value_dim - first;
        vf left = load<vf>(mixed), right = load<vf>(mixed + kLanes);
        in_order<Reader>(left, right);
        if (rest >= kPanelDims) {
            store(to + first, left);
            store(to + first + kLanes, right);
        } else {
            for (int i = 0; i < rest; ++i) to[first + i] = i < kLanes ? left[i] : right[i - kLanes];
        }
    }
}

void partition(const Tile &tile) {
    const int panels = (tile.value_dim + kPanelDims - 1) / kPanelDims;
    with_key_reader(tile.key, [&](auto reader) {
        using Reader = decltype(reader);
        for (int i = 0; i < tile.segments; ++i) expect_keys<Reader>(tile, tile.segment[i]);
        for (int i = 0; i < tile.segments; ++i)
            if constexpr (kScaled<Reader>)
                scores_of_codes<Reader>(tile, tile.segment[i]);
            else
                scores_of<Reader>(tile, tile.segment[i]);
    });
    with_value_reader(tile.value, [&](auto reader) {
        for (int i = 0; i < tile.segments; ++i) expect_values<decltype(reader)>(tile, tile.segment[i]);
    });
    const Range all = seen(tile, Segment{0, tile.rows, 0, kPartition, nullptr}, 0, tile.rows);
    for (int r = 0; r < tile.rows; ++r) {
        float *scores = tile.scratch.scores + r * kPartition, *mixed = tile.scratch.mixed + r * panels * kPanelDims;
        const Range own{tile.begin[r], tile.end[r]};
        for (int i = 0; i < panels * kPanelDims; i += kLanes) store(mixed + i, vf{});
        if (own.begin >= own.end) {
            for (int t = all.begin / kLanes * kLanes; t < all.end; t += kLanes) store(scores + t, vf{});
            continue;
        }
        if (tile.softcap > 0 || tile.slope)
            bend(scores, own.begin, own.end, tile.softcap, tile.slope ? tile.slope[r] : 0, tile.position[r]);
        float *record = tile.record[r];
        weigh(scores, own, all, record[tile.value_dim], record[tile.value_dim + 1]);
    }
    with_value_reader(tile.value, [&](auto reader) {
        using Reader = decltype(reader);
        for (int i = 0; i < tile.segments; ++i)
            if constexpr (kScaled<Reader>)
                mix_of_codes<Reader>(tile, tile.segment[i]);
            else
                mix_of<Reader>(tile, tile.segment[i]);
        for (int r = 0; r < tile.rows; ++r)
            if (tile.begin[r] < tile.end[r]) write_record<Reader>(tile, r, panels);
    });
}

void fold(float *state, const float *part, int value_dim) {
    const float old = state[value_dim], other = part[value_dim], top = other > old ? other : old;
    const vf keep = exp2(splat(old - top)), add = exp2(splat(other - top));
    int d = 0;
    for (; d + kLanes <= value_dim; d += kLanes)
        store(state + d, fma(load<vf>(part + d), add, load<vf>(state + d) * keep));
    for (; d < value_dim; ++d) state[d] = (splat(part[d]) * add + splat(state[d]) * keep)[0];
    state[value_dim] = top;
    state[value_dim + 1] = (splat(part[value_dim + 1]) * add + splat(state[value_dim + 1]) * keep)[0];
}

}  // namespace

extern const anaphora::AttentionKernels attention_kernels;
const anaphora::AttentionKernels attention_kernels{load_queries, partition, fold, write_keys, write_values, turn};

}  // namespace ANAPHORA_TARGET
