// The loops that attention spends its time in. Included once per target.
//
// Every number is made by one chain of operations whose order does not depend on the tile: a score is a chain of fma
// over the dims, a mixed value one over the tokens. Rows only decide which chains run side by side.
#pragma once
#include "kv_formats.h"
#include "math.h"

#define NOINLINE __attribute__((noinline))
#define INLINE_CALL __attribute__((always_inline))  // of a lambda
#define UNROLL _Pragma("GCC unroll 16")

namespace ANAPHORA_TARGET {
namespace {

using anaphora::kPartition;

constexpr int kGroup = 16;  // tokens whose keys surely lie together: every block size is a multiple
constexpr int kGroups = kPartition / kGroup;
constexpr int kPanelDims = 2 * kLanes;
constexpr int kMost = kLanes == 16 ? 12 : 6;  // rows that the registers hold at a time, with two vectors each
constexpr int kDirect = 24;                   // up to so many rows decode in registers, each tile on its own
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

// Tiles of R rows are 2 * kPairs<R> vectors wide.
template <int R>
constexpr int kPairs = R * 4 <= 2 * kMost ? 2 : 1;
// What was decoded is in the first cache; what is stored is waited for, and better asked for early.
struct Decoded : Fp32 {};
template <typename Reader>
constexpr bool kAhead = true;
template <>
constexpr bool kAhead<Decoded> = false;
constexpr int kTilesAhead = 2;

// Calls fn<0>() ... fn<N - 1>().
template <int N, typename Fn>
INLINE void each(Fn &&fn) {
    if constexpr (N > 0) {
        each<N - 1>(fn);
        fn.template operator()<N - 1>();
    }
}

// The compiler would keep what it has read through the pointer in registers; there are none left.
template <typename T>
INLINE void forget(T *&pointer) {
    asm("" : "+r"(pointer));
}

// Whether an element is made without a constant: the tiles of four vectors leave one register beside the factors.
template <typename Reader>
constexpr bool kBare = false;

// sums[r][p] and [p + 1] += factor(r) times left and right.
template <int R, int V, typename Factor>
INLINE void add_two(vf (&sums)[R][V], int p, vf left, vf right, Factor &&factor) {
    UNROLL for (int r = 0; r < R; ++r) {
        const vf x = factor(r);
        sums[r][p] = fma(x, left, sums[r][p]);
        sums[r][p + 1] = fma(x, right, sums[r][p + 1]);
    }
}

// sums[r][v] += factor(r) * operand(v), the factors in registers: 12 sums, 3 factors, one operand.
template <int R, int V, typename Factor, typename Operand>
INLINE void add_each(vf (&sums)[R][V], Factor &&factor, Operand &&operand) {
    vf factors[R];
    UNROLL for (int r = 0; r < R; ++r) factors[r] = factor(r);
    UNROLL for (int v = 0; v < V; ++v) {
        const vf x = operand(v);
        UNROLL for (int r = 0; r < R; ++r) sums[r][v] = fma(factors[r], x, sums[r][v]);
    }
}

// Scores of R rows and the tokens of groups first .. end - 1.
template <typename Reader, int R>
NOINLINE void score(const Source &source, int units, const float *query, int64_t stride, int first, int end,
                    float *scores) {
    constexpr int P = kPairs<R>, V = 2 * P, per = kGroup / kLanes;
    const int vectors = end * per;
    for (int x = first * per; x < vectors; x += V) {
        const uint8_t *base[V], *ahead[V];
        UNROLL for (int v = 0; v < V; ++v) {
            const int later = x + v + kTilesAhead * V;
            const unsigned own = x + v < vectors ? x + v : vectors - 1, next = later < vectors ? later : vectors - 1;
            base[v] = source.group[own / per] + own % per * kLanes * Reader::unit_bytes;
            ahead[v] = source.group[next / per] + next % per * kLanes * Reader::unit_bytes;
        }
        vf sums[R][V] = {};
        const float *q = query;
        _Pragma("GCC unroll 4")
        for (int64_t u = 0, at = 0; u < units; ++u, at += source.step, q += Reader::unit) {
            if (kAhead<Reader>)
                UNROLL for (int v = 0; v < V; v += per) __builtin_prefetch(ahead[v] + at);
            UNROLL for (int p = 0; p < V; p += 2) {
                each<Reader::unit>([&]<int e>() {
                    add_two(sums, p, Reader::template element<e>(base[p] + at),
                            Reader::template element<e>(base[p + 1] + at),
                            [&](int r) { return splat(q[r * stride + e]); });
                });
                if (P > 1) forget(q);
            }
        }
        UNROLL for (int v = 0; v < V; ++v)
            if (x + v < vectors)
                UNROLL for (int r = 0; r < R; ++r) store(scores + r * kPartition + (x + v) * kLanes, sums[r][v]);
    }
}

// Goes through tokens first .. end - 1 with the sums of N panels of R rows: add(sums, token, t, ahead, weight) for each,
// where `ahead` leads from a token to one that will be wanted later, if it is before `last`.
template <int R, int N, typename Add>
INLINE void over_tokens(const Source &source, int first, int end, int last, const float *weights, float *mixed,
                        int64_t stride, Add &&add) {
    vf sums[R][2 * N];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < 2 * N; ++v) sums[r][v] = load<vf>(mixed + r * stride + v * kLanes);
    for (int g = first / kGroup; g * kGroup < end; ++g) {
        const int from = first > g * kGroup ? first : g * kGroup;
        const int to = end < (g + 1) * kGroup ? end : (g + 1) * kGroup;
        const uint8_t *token = source.group[g] + (from - g * kGroup) * source.step;
        const int later = g + kChunk / kGroup;
        const int64_t ahead = later * kGroup < last ? source.group[later] - source.group[g] : 0;
        const float *weight = weights + from;
        for (int t = from; t < to; ++t, token += source.step, ++weight) add(sums, token, t, ahead, weight);
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < 2 * N; ++v) store(mixed + r * stride + v * kLanes, sums[r][v]);
}

// Adds the values of tokens first .. end - 1 to N panels of R rows; tokens up to `last` will be wanted later.
template <typename Reader, int R, int N>
NOINLINE void mix(const Source &source, const int64_t *offset, int first, int end, int last, const float *weights,
                  float *mixed, int64_t stride) {
    const auto add = [&](vf (&sums)[R][2 * N], const uint8_t *token, int, int64_t ahead, const float *weight) INLINE_CALL {
        const auto factor = [&](int r) { return splat(weight[r * kPartition]); };
        if (kAhead<Reader>)
            UNROLL for (int n = 0; n < N; ++n) __builtin_prefetch(token + offset[n] + ahead);
        if constexpr (N > 1 && kBare<Reader>) {
            add_each(sums, factor, [&](int v) {
                const uint8_t *panel = token + offset[v / 2];
                return v % 2 ? Reader::template half<1>(panel) : Reader::template half<0>(panel);
            });
        } else {
            UNROLL for (int n = 0; n < N; ++n) {
                const uint8_t *panel = token + offset[n];
                add_two(sums, 2 * n, Reader::template half<0>(panel), Reader::template half<1>(panel), factor);
                if (N > 1) forget(weight);
            }
        }
    };
    over_tokens<R, N>(source, first, end, last, weights, mixed, stride, add);
}

// Calls fn<R>(row) so that rows first .. end - 1 are covered.
template <typename Fn>
INLINE void by_rows(int first, int end, Fn &&fn) {
    while (first < end) {
        const int left = end - first;
        switch (left == kMost + 1 || left == kMost + 2 ? 4 : left < kMost ? left : kMost) {
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
    const int from = seen.begin / step * step, rest = seen.end / step * step;
    const int whole = (seen.begin + step - 1) / step * step;
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

}  // namespace
}  // namespace ANAPHORA_TARGET
