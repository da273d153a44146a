// Scores and mixed values of keys and values that are kept with scales. Included once per target.
//
// A score is, for each group of dims that shares a scale, a chain of fma over the codes; the chains times their scales
// are chained in turn. Values are made whole, which is exact, and chained as values of any format are.
#pragma once
#include <type_traits>

#include "attention_segment.h"

namespace ANAPHORA_TARGET {
namespace {

using anaphora::scale_bytes;

// Keys whose codes and scales are floats already.
template <typename Reader>
struct DecodedCodes {
    static constexpr int unit = 1, unit_bytes = 4, group = Reader::group;
    template <int>
    static INLINE vf element(const uint8_t *from) {
        return load<vf>(from);
    }
    static INLINE vf scale(const uint8_t *from) { return load<vf>(from); }
    static constexpr int scale_size = 4;
};

template <typename Reader>
constexpr bool kOfInt4 = std::is_same_v<Reader, Int4Keys> || std::is_same_v<Reader, DecodedCodes<Int4Keys>>;

// What is stored is waited for, and better asked for early.
template <typename Reader>
constexpr bool kAheadOfCodes = Reader::unit_bytes == 1;

template <typename Reader>
INLINE vf load_scales(const uint8_t *from) {
    if constexpr (Reader::unit_bytes == 4)
        return Reader::scale(from);
    else
        return load_halves(from);
}
template <typename Reader>
constexpr int64_t kScaleSize = Reader::unit_bytes == 4 ? 4 : 2;

// Of every row, the wide dims in steps of an eighth, and at [dims] what the codes' 8 too much comes to.
INLINE void load_query_of_int4(const float *query, int dims, float factor, float *to) {
    const int wide = dims / anaphora::kWideShare;
    for (int d = 0; d < dims; ++d) to[d] = query[d] * factor;
    for (int d = 0; d < wide; ++d) to[d] *= Int4Keys::wide_step;  // exact
    float sum = 0;
    for (int d = wide; d < dims; ++d) sum += to[d];
    to[dims] = -8 * sum;
}

// Scores of R rows and the tokens of groups first .. end - 1.
template <typename Reader, int R>
NOINLINE void score_codes(const Source &source, const Source &scale, int dims, const float *query, int64_t stride,
                          int first, int end, float *scores) {
    constexpr int P = kPairs<R>, V = 2 * P, per = kGroup / kLanes;
    const int vectors = end * per;
    for (int x = first * per; x < vectors; x += V) {
        const uint8_t *base[V], *ahead[V], *factors[V];
        UNROLL for (int v = 0; v < V; ++v) {
            const int later = x + v + kTilesAhead * V;
            const unsigned own = x + v < vectors ? x + v : vectors - 1, next = later < vectors ? later : vectors - 1;
            base[v] = source.group[own / per] + own % per * kLanes * Reader::unit_bytes;
            ahead[v] = source.group[next / per] + next % per * kLanes * Reader::unit_bytes;
            factors[v] = scale.group[own / per] + own % per * kLanes * kScaleSize<Reader>;
        }
        vf totals[R][V] = {};
        const float *q = query;
        for (int d = 0, g = 0; d < dims; ++g) {
            const int stop = d + Reader::group < dims ? d + Reader::group : dims;
            vf sums[R][V] = {};
            if (kOfInt4<Reader>)
                UNROLL for (int r = 0; r < R; ++r)
                    UNROLL for (int v = 0; v < V; ++v) sums[r][v] = splat(query[r * stride + dims]);
            int64_t at = source.step * (d / Reader::unit);
            const auto chain = [&]<typename Units>(int until) __attribute__((always_inline)) {
                _Pragma("GCC unroll 4")
                for (; d < until; d += Units::unit, at += source.step, q += Units::unit)
                    UNROLL for (int p = 0; p < V; p += 2) {
                        if (kAheadOfCodes<Reader>)
                            UNROLL for (int v = p; v < p + 2; v += per) __builtin_prefetch(ahead[v] + at);
                        each<Units::unit>([&]<int e>() {
                            const vf left = Units::template element<e>(base[p] + at);
                            const vf right = Units::template element<e>(base[p + 1] + at);
                            UNROLL for (int r = 0; r < R; ++r) {
                                const vf factor = splat(q[r * stride + e]);
                                sums[r][p] = fma(factor, left, sums[r][p]);
                                sums[r][p + 1] = fma(factor, right, sums[r][p + 1]);
                            }
                        });
                        if (P > 1) forget(q);
                    }
            };
            if constexpr (Reader::unit == 2) chain.template operator()<Int8>(dims / anaphora::kWideShare);
            chain.template operator()<Reader>(stop);
            UNROLL for (int v = 0; v < V; ++v) {
                const vf factor = load_scales<Reader>(factors[v] + g * scale.step);
                UNROLL for (int r = 0; r < R; ++r) totals[r][v] = fma(sums[r][v], factor, totals[r][v]);
            }
        }
        UNROLL for (int v = 0; v < V; ++v)
            if (x + v < vectors)
                UNROLL for (int r = 0; r < R; ++r) store(scores + r * kPartition + (x + v) * kLanes, totals[r][v]);
    }
}

// The scales of the groups of tokens that [first, end) touches.
INLINE void locate_scales(const Tile &tile, const Segment &segment, bool keys, Source &source) {
    const anaphora::Format format = keys ? tile.key : tile.value;
    const int dim = keys ? tile.key_dim : tile.value_dim;
    const int64_t token = keys ? 2 : scale_bytes(format, dim);
    const int64_t codes = int64_t{code_bytes(format, dim)} * tile.block_size;
    source.step = keys ? tile.block_size * 2 : token;
    for (int g = segment.first_token / kGroup; g * kGroup < segment.end_token; ++g) {
        const int at = g * kGroup;
        source.group[g] = segment.pieces[at / tile.block_size] + (keys ? 0 : tile.key_bytes) + codes +
                          at % tile.block_size * token;
    }
}

// Codes of the keys of a group of tokens, and their scales, as floats [dims][kGroup], [groups][kGroup].
template <typename Reader>
void decode_codes(const uint8_t *codes, int64_t step, const uint8_t *ahead, int dims, const uint8_t *scales,
                  int64_t scale_step, int groups, float *to, float *scales_to) {
    int d = 0;
    const auto rows = [&]<typename Units>(int until) {
        for (; d < until; d += Units::unit, codes += step, ahead += step) {
            __builtin_prefetch(ahead);
            UNROLL for (int v = 0; v < kGroup / kLanes; ++v)
                each<Units::unit>([&]<int e>() {
                    store(to + (d + e) * kGroup + v * kLanes, Units::template element<e>(codes + v * kLanes));
                });
        }
    };
    if constexpr (Reader::unit == 2) rows.template operator()<Int8>(dims / anaphora::kWideShare);
    rows.template operator()<Reader>(dims);
    for (int g = 0; g < groups; ++g, scales += scale_step)
        for (int v = 0; v < kGroup / kLanes; ++v)
            store(scales_to + g * kGroup + v * kLanes, load_halves(scales + v * kLanes * 2));
}

template <typename Reader>
void scores_of_codes(const Tile &tile, const Segment &segment) {
    const int dims = tile.key_dim, stride = dims + kOfInt4<Reader>, last = segment.first_row + segment.rows;
    const Range all = seen(tile, segment, segment.first_row, segment.rows);
    if (all.begin >= all.end) return;
    Source source, scale;
    locate<Reader>(tile, segment, true, source);
    locate_scales(tile, segment, true, scale);
    const float *const query = tile.scratch.query;
    float *const scores = tile.scratch.scores;
    const int begin = all.begin / kGroup, end = (all.end - 1) / kGroup + 1;
    if (segment.rows <= kDirect) {
        by_rows(segment.first_row, last, [&]<int R>(int row) {
            score_codes<Reader, R>(source, scale, dims, query + row * stride, stride, begin, end,
                                   scores + row * kPartition);
        });
        return;
    }
    const int fits = 4096 / (kGroup * dims), chunk = fits > 2 ? fits : 2, groups = scale_bytes(tile.key, dims) / 2;
    Source decoded, factors;
    decoded.step = factors.step = kGroup * sizeof(float);
    for (int g = begin; g < end; g += chunk) {
        const int stop = g + chunk < end ? g + chunk : end;
        float *to = tile.scratch.decoded, *scales = to + chunk * dims * kGroup;
        for (int i = g; i < stop; ++i, to += dims * kGroup, scales += groups * kGroup) {
            const int next = i + chunk < end ? i + chunk : i;
            decode_codes<Reader>(source.group[i], source.step, source.group[next], dims, scale.group[i], scale.step,
                                 groups, to, scales);
            decoded.group[i] = reinterpret_cast<const uint8_t *>(to);
            factors.group[i] = reinterpret_cast<const uint8_t *>(scales);
        }
        by_rows(segment.first_row, last, [&]<int R>(int row) {
            const Range range = seen(tile, segment, row, R);
            const int from = range.begin / kGroup, to = (range.end + kGroup - 1) / kGroup;
            score_codes<DecodedCodes<Reader>, R>(decoded, factors, dims, query + row * stride, stride,
                                                 from > g ? from : g, to < stop ? to : stop,
                                                 scores + row * kPartition);
        });
    }
}

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
    vf sums[R][2 * N];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < 2 * N; ++v) sums[r][v] = load<vf>(mixed + r * stride + v * kLanes);
    for (int g = first / kGroup; g * kGroup < end; ++g) {
        const int from = first > g * kGroup ? first : g * kGroup;
        const int to = end < (g + 1) * kGroup ? end : (g + 1) * kGroup;
        const uint8_t *token = source.group[g] + (from - g * kGroup) * source.step;
        const int later = g + kChunk / kGroup;
        const int64_t ahead = later * kGroup < last ? source.group[later] - source.group[g] : 0;
        const float *weight = weights + from, *scale = scales + (from - first / kGroup * kGroup) * groups;
        for (int t = from; t < to; ++t, token += source.step, ++weight, scale += groups)
            UNROLL for (int n = 0; n < N; ++n) {
                const uint8_t *codes = token + panels[n].codes;
                if (kAheadOfCodes<Reader>) __builtin_prefetch(codes + ahead);
                vf left, right;
                panel<Reader>(codes, scale + panels[n].left_scale, scale + panels[n].right_scale, left, right);
                UNROLL for (int r = 0; r < R; ++r) {
                    const vf factor = splat(weight[r * kPartition]);
                    sums[r][2 * n] = fma(factor, left, sums[r][2 * n]);
                    sums[r][2 * n + 1] = fma(factor, right, sums[r][2 * n + 1]);
                }
                if (N > 1) forget(weight);
            }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < 2 * N; ++v) store(mixed + r * stride + v * kLanes, sums[r][v]);
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

template <typename Reader>
void mix_of_codes(const Tile &tile, const Segment &segment) {
    const int last = segment.first_row + segment.rows, dim = tile.value_dim;
    const int panels = (dim + kPanelDims - 1) / kPanelDims, groups = (dim + Reader::group - 1) / Reader::group;
    const int64_t stride = panels * kPanelDims;
    const Range all = seen(tile, segment, segment.first_row, segment.rows);
    if (all.begin >= all.end) return;
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
