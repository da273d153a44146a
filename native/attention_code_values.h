// Mixed values that are kept with scales. Included once per target.
//
// Either the weights are made times a scale that covers whole panels, and the codes chained; or the values are made whole,
// which is exact, and chained as values of any format are. The format and the number of dims decide which.
#pragma once
#include "attention_codes.h"

namespace ANAPHORA_TARGET {
namespace {

// The scales of kGroup tokens' values as floats [kGroup][groups]; what nobody wrote may be anything.
template <typename Reader>
INLINE void decode_scales(const Source &scale, int group, int groups, float *to) {
    const uint8_t *from = scale.group[group];
    for (int i = 0; i < kGroup * groups; i += kLanes)
        if constexpr (Reader::group == 8)
            store(to + i, Fp8::widen(load_signed(from + i)));
        else
            store(to + i, load_halves(from + 2 * i));
}

constexpr int kScaleRoom = 8192;  // floats of the scratch; a vector more may be read

// Places of a panel's dims in a token: codes, and scales of both vectors.
struct Panel {
    int64_t codes;
    int left_scale, right_scale;
};
template <typename Reader>
INLINE Panel place_panel(int number, int dim) {
    const int first = panel_dim<Reader>(number, dim);
    return {first / Reader::unit, first / Reader::group, (first + kLanes) / Reader::group};
}

// Adds the values of tokens first .. end - 1 to N panels of R rows; scales [tokens][groups] from first's group on.
template <typename Reader, int R, int N>
NOINLINE void mix_codes(const Source &source, const Panel *panels, const float *scales, int groups, int first, int end,
                        int last, const float *weights, float *mixed, int64_t stride) {
    const auto add = [&](vf (&sums)[R][2 * N], const uint8_t *token, int t, int64_t ahead, const float *weight)
                         INLINE_CALL {
        const float *scale = scales + (t - first / kGroup * kGroup) * groups;
        UNROLL for (int n = 0; n < N; ++n) {
            const uint8_t *codes = token + panels[n].codes;
            if (kAheadOfCodes<Reader>) __builtin_prefetch(codes + ahead);
            vf left, right;
            panel<Reader>(codes, scale + panels[n].left_scale, scale + panels[n].right_scale, left, right);
            add_two(sums, 2 * n, left, right, [&](int r) { return splat(weight[r * kPartition]); });
            if (N > 1) forget(weight);
        }
    };
    over_tokens<R, N>(source, first, end, last, weights, mixed, stride, add);
}

// One panel of all tokens as floats [kPartition][kPanelDims].
template <typename Reader>
void decode_panel(const Source &source, const Source &scale, int dim, int groups, int number, Range all, float *decoded,
                  Source &into) {
    into.step = kPanelDims * sizeof(float);
    const Panel place_of = place_panel<Reader>(number, dim);
    float every[kGroup * (anaphora::kMostDims / 8) + kLanes];
    for (int t = all.begin; t < all.end; ++t) {
        if (t == all.begin || t % kGroup == 0) decode_scales<Reader>(scale, t / kGroup, groups, every);
        const uint8_t *token = source.group[t / kGroup] + t % kGroup * source.step;
        const float *scales = every + t % kGroup * groups;
        float *to = decoded + t * kPanelDims;
        into.group[t / kGroup] = reinterpret_cast<const uint8_t *>(decoded + t / kGroup * kGroup * kPanelDims);
        if (dim >= kPanelDims) {
            vf left, right;
            panel<Reader>(token + place_of.codes, scales + place_of.left_scale, scales + place_of.right_scale, left,
                          right);
            store(to, left), store(to + kLanes, right);
        } else {
            for (int v = 0; v < 2; ++v)
                for (int i = 0; i < kLanes; ++i) {
                    const int d = place<Reader>(v, i);
                    to[v * kLanes + i] = d < dim ? Reader::decode(token, d) * scales[d / Reader::group] : 0;
                }
        }
    }
}

// Formats whose scale covers whole panels: the weights are made times the scale, and the codes mixed as they are.
template <typename Reader>
INLINE bool scales_weights(int dim) {
    return Reader::unit == 1 && Reader::group % kPanelDims == 0 && dim % kPanelDims == 0;
}

// Codes as values: a lane is a dim.
template <typename Reader>
struct Codes : Reader {
    template <int v>
    static INLINE vf half(const uint8_t *from) {
        return Reader::template element<0>(from + v * kLanes * Reader::unit_bytes);
    }
};

template <>
constexpr bool kBare<Codes<Int8>> = true;

constexpr int kMostGroups = anaphora::kMostDims / 32;

// Scales of the tokens in groups of them that [first, end) touches, as floats [groups][kPartition].
INLINE void gather_scales(const Source &scale, int groups, int first, int end, float *to) {
    for (int g = first / kGroup; g * kGroup < end; ++g) {
        const uint8_t *from = scale.group[g];
        for (int t = g * kGroup; t < (g + 1) * kGroup; t += kLanes, from += 2 * kLanes * groups)
            if (groups == 1) {
                store(to + t, load_halves(from));
            } else if (groups == 2) {
                const vf x = load_halves(from), y = load_halves(from + 2 * kLanes);
#if ANAPHORA_LANES == 16
                store(to + t, __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
                store(to + kPartition + t,
                      __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
#else
                store(to + t, __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14));
                store(to + kPartition + t, __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15));
#endif
            } else {
                float every[kMostGroups * kLanes];
                for (int i = 0; i < groups; ++i) store(every + i * kLanes, load_halves(from + 2 * i * kLanes));
                for (int i = 0; i < kLanes * groups; ++i) to[i % groups * kPartition + t + i / groups] = every[i];
            }
    }
}

// weights[r][t] * scales[t] for the vectors that [first, end) touches.
template <int R>
INLINE void scale_weights(const float *weights, const float *scales, int first, int end, float *to) {
    for (int t = first / kLanes * kLanes; t < end; t += kLanes)
        UNROLL for (int r = 0; r < R; ++r)
            store(to + r * kPartition + t, load<vf>(weights + r * kPartition + t) * load<vf>(scales + t));
}

template <typename Reader>
void mix_with_scaled_weights(const Tile &tile, const Segment &segment, Range all) {
    constexpr int kInGroup = Reader::group / kPanelDims;
    const int last = segment.first_row + segment.rows, dim = tile.value_dim, panels = dim / kPanelDims;
    const int groups = (dim + Reader::group - 1) / Reader::group;
    const int64_t stride = dim;
    Source source, scale, whole;
    locate<Reader>(tile, segment, false, source);
    locate_scales(tile, segment, false, scale);
    const float *const weights = tile.scratch.scores;
    float *const mixed = tile.scratch.mixed, *const decoded = tile.scratch.decoded;
    float scales[kMostGroups * kPartition], scaled[kMost * kPartition];
    const bool direct = segment.rows <= kDirect;
    for (int t = all.begin; t < all.end;) {
        const int stop = (t / kChunk + 1) * kChunk, end = direct && stop < all.end ? stop : all.end;
        gather_scales(scale, groups, t, end, scales);
        for (int g = 0; g < groups; ++g) {
            const float *const own = scales + g * kPartition;
            const int first = g * kInGroup, left = panels - first, until = first + (left < kInGroup ? left : kInGroup);
            if (direct) {
                by_rows(segment.first_row, last, [&]<int R>(int row) {
                    constexpr int N = kInGroup < kPairs<R> ? kInGroup : kPairs<R>;
                    scale_weights<R>(weights + row * kPartition, own, t, end, scaled);
                    for (int p = first, n; p < until; p += n) {
                        const int64_t offsets[2] = {p * kPanelDims, (p + 1) * kPanelDims};
                        float *to = mixed + row * stride + p * kPanelDims;
                        n = p + N <= until ? N : 1;
                        if (n == N)
                            mix<Codes<Reader>, R, N>(source, offsets, t, end, all.end, scaled, to, stride);
                        else
                            mix<Codes<Reader>, R, 1>(source, offsets, t, end, all.end, scaled, to, stride);
                    }
                });
                continue;
            }
            const int64_t none[1] = {0};
            for (int p = first; p < until; ++p) {
                decode_values<Codes<Reader>>(source, dim, p * kPanelDims, t, end, decoded, whole);
                by_rows(segment.first_row, last, [&]<int R>(int row) {
                    const Range range = seen(tile, segment, row, R);
                    scale_weights<R>(weights + row * kPartition, own, range.begin, range.end, scaled);
                    mix<Decoded, R, 1>(whole, none, range.begin, range.end, range.end, scaled,
                                       mixed + row * stride + p * kPanelDims, stride);
                });
            }
        }
        t = end;
    }
}

template <typename Reader>
void mix_of_codes(const Tile &tile, const Segment &segment) {
    const int last = segment.first_row + segment.rows, dim = tile.value_dim;
    const int panels = (dim + kPanelDims - 1) / kPanelDims, groups = (dim + Reader::group - 1) / Reader::group;
    const int64_t stride = panels * kPanelDims;
    const Range all = seen(tile, segment, segment.first_row, segment.rows);
    if (all.begin >= all.end) return;
    if constexpr (Reader::unit == 1)
        if (scales_weights<Reader>(dim)) return mix_with_scaled_weights<Reader>(tile, segment, all);
    Source source, scale;
    locate<Reader>(tile, segment, false, source);
    locate_scales(tile, segment, false, scale);
    const float *const weights = tile.scratch.scores;
    float *const mixed = tile.scratch.mixed, *const decoded = tile.scratch.decoded;
    if (segment.rows <= kDirect && dim >= kPanelDims && kChunk * groups <= kScaleRoom) {
        for (int t = all.begin; t < all.end; t = (t / kChunk + 1) * kChunk) {
            const int stop = (t / kChunk + 1) * kChunk, end = stop < all.end ? stop : all.end;
            for (int g = t / kGroup, at = 0; g * kGroup < end; ++g, at += kGroup * groups)
                decode_scales<Reader>(scale, g, groups, decoded + at);
            by_rows(segment.first_row, last, [&]<int R>(int row) {
                constexpr int N = kPairs<R>;
                for (int p = 0, n; p < panels; p += n) {
                    const Panel places[2] = {place_panel<Reader>(p, dim), place_panel<Reader>(p + 1, dim)};
                    const float *w = weights + row * kPartition;
                    float *to = mixed + row * stride + p * kPanelDims;
                    n = p + N <= panels ? N : 1;
                    if (n == N)
                        mix_codes<Reader, R, N>(source, places, decoded, groups, t, end, all.end, w, to, stride);
                    else
                        mix_codes<Reader, R, 1>(source, places, decoded, groups, t, end, all.end, w, to, stride);
                }
            });
        }
        return;
    }
    Source whole;
    const int64_t none[1] = {0};
    for (int p = 0; p < panels; ++p) {
        decode_panel<Reader>(source, scale, dim, groups, p, all, decoded, whole);
        by_rows(segment.first_row, last, [&]<int R>(int row) {
            const Range range = seen(tile, segment, row, R);
            mix<Decoded, R, 1>(whole, none, range.begin, range.end, range.end, weights + row * kPartition,
                            mixed + row * stride + p * kPanelDims, stride);
        });
    }
}

}  // namespace
}  // namespace ANAPHORA_TARGET
