// Scores of keys that are kept with scales. Included once per target.
//
// A score is, for each group of dims that shares a scale, a chain of fma over the codes; the chains times their scales
// are chained in turn.
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
};

template <>
constexpr bool kBare<Int8> = true;

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
            const auto chain = [&]<typename Units>(int until) INLINE_CALL {
                _Pragma("GCC unroll 4")
                for (; d < until; d += Units::unit, at += source.step, q += Units::unit) {
                    if (kAheadOfCodes<Reader> && at % 64 == 0)  // a line holds several dims
                        UNROLL for (int v = 0; v < V; v += per) __builtin_prefetch(ahead[v] + at);
                    if constexpr (P > 1 && kBare<Units>) {
                        add_each(sums, [&](int r) { return splat(q[r * stride]); },
                                 [&](int v) { return Units::template element<0>(base[v] + at); });
                    } else {
                        UNROLL for (int p = 0; p < V; p += 2) {
                            each<Units::unit>([&]<int e>() {
                                add_two(sums, p, Units::template element<e>(base[p] + at),
                                        Units::template element<e>(base[p + 1] + at),
                                        [&](int r) { return splat(q[r * stride + e]); });
                            });
                            if (P > 1) forget(q);
                        }
                    }
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

}  // namespace
}  // namespace ANAPHORA_TARGET
