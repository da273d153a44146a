// A tile of queries against one partition. Every number is made by one chain of operations whose order does not depend
// on the tile: a score is a chain of fma over the dims, a mixed value one over the tokens. Rows only decide which
// chains run side by side, and whether stored keys and values are decoded in registers or once for all rows.
#include "kv_formats.h"
#include "math.h"

#define NOINLINE __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 16")

namespace ANAPHORA_TARGET {
namespace {

using anaphora::kPartition;
using anaphora::NewTokens;
using anaphora::Segment;
using anaphora::Tile;

constexpr int kGroup = 16;  // tokens whose keys surely lie together: every block size is a multiple
constexpr int kGroups = kPartition / kGroup;
constexpr int kPanelDims = 2 * kLanes;
constexpr int kMost = kLanes == 16 ? 12 : 6;  // rows that the registers hold at a time, with two vectors each
constexpr int kDirect = kMost;                // up to so many rows decode in registers, each on its own
constexpr int kChunk = 64;                    // tokens whose values stay in the first cache between panels
constexpr float kNone = -__builtin_inff();

static_assert(kGroup % kLanes == 0);

// 2^x for x <= 0, within 1 ulp; below -126 it is 2^-126, NaN stays NaN.
INLINE vf exp2(vf x) {
    const vf low = splat(-126.0f), magic = splat(12582912.0f);  // see exp() in math.h
    x = low > x ? low : x;
    const vf shifted = x + magic;
    const vf r = x - (shifted - magic);
    vf p = splat(0x1.41fb54p-13f);  // (2^r - 1) / r, |r| <= 1/2: minimax, error below 2e-9 of 2^r
    p = fma(p, r, splat(0x1.5f3e1ep-10f));
    p = fma(p, r, splat(0x1.3b2d4ep-7f));
    p = fma(p, r, splat(0x1.c6aeeap-5f));
    p = fma(p, r, splat(0x1.ebfbdcp-3f));
    p = fma(p, r, splat(0x1.62e430p-1f));
    const vf power = as_float((vu)(((vi)shifted + 127) << 23));
    return fma(p * r, power, power);
}

INLINE vi iota() {
    vi v;
    for (int i = 0; i < kLanes; ++i) v[i] = i;
    return v;
}

// Where the tokens of a partition lie: each group's first unit, and how to go on.
struct Source {
    const uint8_t *group[kGroups];
    int64_t step;  // keys: bytes from unit to unit; values: from token to token
};

// Stored keys (or values, `skip` bytes behind them) of the groups that [first, end) touches.
template <typename Reader>
void locate(const Tile &tile, const Segment &segment, bool keys, Source &source) {
    const int64_t row = (tile.value_dim + Reader::unit - 1) / Reader::unit * Reader::unit_bytes;
    source.step = keys ? tile.block_size * Reader::unit_bytes : row;
    const int64_t token = keys ? Reader::unit_bytes : row;
    for (int g = segment.first_token / kGroup; g * kGroup < segment.end_token; ++g) {
        const int at = g * kGroup;
        source.group[g] = segment.pieces[at / tile.block_size] + (keys ? 0 : tile.key_bytes) + at % tile.block_size * token;
    }
}

// The compiler would keep what it has read through the pointer in registers; there are none left.
template <typename T>
INLINE void forget(T *&pointer) {
    asm("" : "+r"(pointer));
}

// Tiles of R rows are 2 * kPairs<R> vectors wide.
template <int R>
constexpr int kPairs = R * 4 <= 2 * kMost ? 2 : 1;
// So few rows wait for memory: ask for it early.
template <int R>
constexpr bool kAhead = R <= 3;
constexpr int kTilesAhead = 2;

// Calls fn<0>() ... fn<N - 1>().
template <int N, typename Fn>
INLINE void each(Fn &&fn) {
    if constexpr (N > 0) {
        each<N - 1>(fn);
        fn.template operator()<N - 1>();
    }
}

// Scores of R rows and the tokens of groups first .. end - 1.
template <typename Reader, int R>
NOINLINE void score(const Source &source, int units, const float *query, int64_t stride, int first, int end, float *scores) {
    constexpr int P = kPairs<R>, V = 2 * P, per = kGroup / kLanes;
    const int vectors = end * per;
    for (int x = first * per; x < vectors; x += V) {
        const uint8_t *base[V], *ahead[V];
        UNROLL for (int v = 0; v < V; ++v) {
            const unsigned own = x + v < vectors ? x + v : vectors - 1, next = x + v + kTilesAhead * V < vectors ? x + v + kTilesAhead * V : vectors - 1;
            base[v] = source.group[own / per] + own % per * kLanes * Reader::unit_bytes;
            ahead[v] = source.group[next / per] + next % per * kLanes * Reader::unit_bytes;
        }
        vf sums[R][V] = {};
        const float *q = query;
        _Pragma("GCC unroll 4") for (int64_t u = 0, at = 0; u < units; ++u, at += source.step, q += Reader::unit) {
            UNROLL for (int p = 0; p < V; p += 2) {
                if (kAhead<R>)
                    UNROLL for (int v = p; v < p + 2; v += per) __builtin_prefetch(ahead[v] + at);
                each<Reader::unit>([&]<int e>() {
                    const vf left = Reader::template element<e>(base[p] + at);
                    const vf right = Reader::template element<e>(base[p + 1] + at);
                    UNROLL for (int r = 0; r < R; ++r) {
                        const vf factor = splat(q[r * stride + e]);
                        sums[r][p] = fma(factor, left, sums[r][p]);
                        sums[r][p + 1] = fma(factor, right, sums[r][p + 1]);
                    }
                });
                if (P > 1) forget(q);
            }
        }
        UNROLL for (int v = 0; v < V; ++v)
            if (x + v < vectors)
                UNROLL for (int r = 0; r < R; ++r) store(scores + r * kPartition + (x + v) * kLanes, sums[r][v]);
    }
}

// Adds the values of tokens first .. end - 1 to N panels of R rows.
template <typename Reader, int R, int N>
NOINLINE void mix(const Source &source, const int64_t *offset, int first, int end, int last, const float *weights, float *mixed, int64_t stride) {
    vf sums[R][2 * N];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < 2 * N; ++v) sums[r][v] = load<vf>(mixed + r * stride + v * kLanes);
    for (int g = first / kGroup; g * kGroup < end; ++g) {
        const int from = first > g * kGroup ? first : g * kGroup, to = end < (g + 1) * kGroup ? end : (g + 1) * kGroup;
        const uint8_t *token = source.group[g] + (from - g * kGroup) * source.step;
        const int64_t ahead = (g + kChunk / kGroup) * kGroup < last ? source.group[g + kChunk / kGroup] - source.group[g] : 0;
        const float *weight = weights + from;
        for (int t = from; t < to; ++t, token += source.step, ++weight)
            UNROLL for (int n = 0; n < N; ++n) {
                const uint8_t *panel = token + offset[n];
                if (kAhead<R>) __builtin_prefetch(panel + ahead);
                const vf left = Reader::template half<0>(panel), right = Reader::template half<1>(panel);
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

// Calls fn<R>(row) so that rows first .. end - 1 are covered.
template <typename Fn>
INLINE void by_rows(int first, int end, Fn &&fn) {
    while (first < end) {
        const int left = end - first;
        switch (left < kMost ? left : kMost) {
#define CASE(n)                         \
    case n:                             \
        fn.template operator()<n>(first); \
        first += n;                     \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(6)
#if ANAPHORA_LANES == 16
            CASE(8) CASE(12)
            case 5: fn.template operator()<4>(first); first += 4; break;
            case 7: fn.template operator()<4>(first); first += 4; break;
            default: fn.template operator()<8>(first); first += 8;
#else
            CASE(5)
#endif
#undef CASE
        }
    }
}

struct Range {
    int begin, end;
};

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

template <typename Reader>
constexpr int padded(int dim) {
    return (dim + Reader::unit - 1) / Reader::unit * Reader::unit;
}

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
            score<Fp32, R>(decoded, dims, query + row * dims, dims, from > g ? from : g, to < stop ? to : stop,
                           scores + row * kPartition);
        });
    }
}

// A panel's first dim: the last one ends with the last dim, and may overlap the one before (the same chains again).
template <typename Reader>
INLINE int panel_dim(int panel, int dim) {
    const int last = padded<Reader>(dim) - kPanelDims, at = panel * kPanelDims;
    return at < last ? at : last > 0 ? last : 0;
}

template <typename Reader>
void decode_values(const Source &source, int dim, int first_dim, int first, int end, float *decoded, Source &into) {
    into.step = kPanelDims * sizeof(float);
    const bool whole = padded<Reader>(dim) >= kPanelDims;
    for (int t = first; t < end; ++t) {
        const uint8_t *token = source.group[t / kGroup] + t % kGroup * source.step;
        float *to = decoded + t * kPanelDims;
        if (t % kGroup == 0 || t == first) into.group[t / kGroup] = reinterpret_cast<const uint8_t *>(decoded + t / kGroup * kGroup * kPanelDims);
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
                const int end = (t / kChunk + 1) * kChunk < all.end ? (t / kChunk + 1) * kChunk : all.end;
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
            mix<Fp32, R, 1>(decoded, none, range.begin, range.end, range.end, weights + row * kPartition,
                            mixed + row * stride + p * kPanelDims, stride);
        });
    }
}

// Asks for the values of all tokens, so that they come while the weights are made.
template <typename Reader>
void expect_values(const Tile &tile, const Segment &segment) {
    const Range all = seen(tile, segment, segment.first_row, segment.rows);
    if (all.begin >= all.end) return;
    Source source;
    locate<Reader>(tile, segment, false, source);
    const int end = segment.rows > 3 || all.begin + kChunk > all.end ? all.end : all.begin + kChunk;
    for (int t = all.begin; t < end; ++t) {
        const uint8_t *token = source.group[t / kGroup] + t % kGroup * source.step;
        for (int64_t at = 0; at < source.step; at += 64) __builtin_prefetch(token + at);
    }
}

// softcap * tanh(score) and the slope times the distance, for the vectors that [begin, end) touches.
NOINLINE void bend(float *scores, int begin, int end, float softcap, float slope, int position) {
    for (int t = begin / kLanes * kLanes; t < end; t += kLanes) {
        vf s = load<vf>(scores + t);
        if (softcap > 0) s = tanh(s) * softcap;
        if (slope != 0) s = fma(splat(slope), __builtin_convertvector(iota() + (t - position), vf), s);
        store(scores + t, s);
    }
}

// Scores of `seen` -> weights; 0 for the rest of `all`. The largest score and the sum: two vectors side by side,
// lane by lane, in order.
NOINLINE void weigh(float *scores, Range seen, Range all, float &largest_score, float &total) {
    constexpr int step = 2 * kLanes;
    const int from = seen.begin / step * step, whole = (seen.begin + step - 1) / step * step, rest = seen.end / step * step;
    const auto inside = [&](int t) {
        const vi at = iota() + t;
        return (at >= vi{} + seen.begin) & (at < vi{} + seen.end);
    };
    // Calls fn(token, whether all of its step is seen).
    const auto steps = [&](auto &&fn) {
        int t = from;
        if (t < whole) fn(t, false), t += step;
        for (; t < rest; t += step) fn(t, true);
        if (t < seen.end) fn(t, false);
    };
    vf most[2] = {splat(kNone), splat(kNone)}, sums[2] = {};
    steps([&](int t, bool full) {
        UNROLL for (int v = 0; v < 2; ++v) {
            const vf s = load<vf>(scores + t + v * kLanes);
            most[v] = max(full ? s : select(inside(t + v * kLanes), s, splat(kNone)), most[v]);
        }
    });
    largest_score = largest(max(most[0], most[1]));
    const vf top = splat(largest_score);
    steps([&](int t, bool full) {
        UNROLL for (int v = 0; v < 2; ++v) {
            float *at = scores + t + v * kLanes;
            vf p = exp2(load<vf>(at) - top);
            if (!full) p = select(inside(t + v * kLanes), p, vf{});
            store(at, p);
            sums[v] += p;
        }
    });
    total = sum(sums[0] + sums[1]);
    for (int t = all.begin / step * step; t < from; t += kLanes) store(scores + t, vf{});
    for (int t = (seen.end + step - 1) / step * step; t < all.end; t += kLanes) store(scores + t, vf{});
}

void load_queries(const Tile &tile, const float *const *query, float factor) {
    const int unit = tile.key == anaphora::Format::fp32 ? 1 : 2, dims = (tile.key_dim + unit - 1) / unit * unit;
    float *to = tile.scratch.query;
    for (int r = 0; r < tile.rows; ++r, to += dims) {
        for (int d = 0; d < tile.key_dim; ++d) to[d] = query[r][d] * factor;
        if (dims > tile.key_dim) to[dims - 1] = 0;
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
    with_reader(tile.key, [&](auto reader) {
        for (int i = 0; i < tile.segments; ++i) scores_of<decltype(reader)>(tile, tile.segment[i]);
    });
    with_reader(tile.value, [&](auto reader) {
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
    with_reader(tile.value, [&](auto reader) {
        for (int i = 0; i < tile.segments; ++i) mix_of<decltype(reader)>(tile, tile.segment[i]);
        for (int r = 0; r < tile.rows; ++r)
            if (tile.begin[r] < tile.end[r]) write_record<decltype(reader)>(tile, r, panels);
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

template <typename Reader>
void write_keys_as(const NewTokens &tokens) {
    const int units = padded<Reader>(tokens.dim) / Reader::unit;
    for (int u = 0; u < units; ++u) {
        uint8_t *to = tokens.piece + (static_cast<int64_t>(u) * tokens.block_size + tokens.first) * Reader::unit_bytes;
        const float *from = tokens.from + u * Reader::unit;
        for (int t = 0; t < tokens.tokens; ++t, to += Reader::unit_bytes, from += tokens.row_stride)
            for (int e = 0; e < Reader::unit; ++e)
                Reader::encode(u * Reader::unit + e < tokens.dim ? from[e] : 0.0f, to, e);
    }
}

template <typename Reader>
void write_values_as(const NewTokens &tokens) {
    const int units = padded<Reader>(tokens.dim) / Reader::unit;
    uint8_t *to = tokens.piece + static_cast<int64_t>(tokens.first) * units * Reader::unit_bytes;
    const float *from = tokens.from;
    for (int t = 0; t < tokens.tokens; ++t, from += tokens.row_stride)
        for (int u = 0; u < units; ++u, to += Reader::unit_bytes)
            for (int e = 0; e < Reader::unit; ++e) {
                const int d = u * Reader::unit + e;
                Reader::encode(d < tokens.dim ? from[d] : 0.0f, to, e);
            }
}

void write_keys(const NewTokens &tokens) {
    with_reader(tokens.format, [&](auto reader) { write_keys_as<decltype(reader)>(tokens); });
}

void write_values(const NewTokens &tokens) {
    with_reader(tokens.format, [&](auto reader) { write_values_as<decltype(reader)>(tokens); });
}

}  // namespace

extern const anaphora::AttentionKernels attention_kernels;
const anaphora::AttentionKernels attention_kernels{load_queries, partition, fold, write_keys, write_values};

}  // namespace ANAPHORA_TARGET
