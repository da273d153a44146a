#include "attention_plan.h"

#include <algorithm>

namespace anaphora {
namespace {

// What one thread does, roughly (two cores of an AVX2 server, SmolLM2-135M's heads). Only ratios matter: they decide
// what is claimed first, and which strategy a row takes.
constexpr double kFlops = 60e9;
constexpr double kBytes = 12e9;
constexpr double kRecordBytes = 10e9;  // records are written and read again
constexpr double kItem = 1e-6;         // claim, gather, pack

constexpr int kManyQueries = 16;                  // a row with fewer is always done by partition
constexpr int64_t kRecordBudget = int64_t{8} << 20;  // bytes of records in a wave, but at least one partition's

struct Planner {
    const Storage &storage;
    const Rows &rows;
    const int group, query_heads, threads;
    const int window = rows.window[group];
    const int per_head = query_heads / storage.kv_heads;  // query heads of a KV head
    const int tile = kTileRows / per_head;                // queries of a tile
    Plan plan{};

    int count() const { return static_cast<int>(rows.start.size()); }
    const int32_t *table(int row) const { return rows.table(group, row); }

    double seconds(int64_t queries, int64_t tokens) const {
        const double flops = 2.0 * queries * per_head * tokens * (storage.key_dim + storage.value_dim);
        double bytes = 0;  // of a token, for one KV head
        for (const LayerKV &layer : storage.layers)
            if (layer.group == group)
                bytes = std::max(bytes, static_cast<double>(layer.key_bytes + layer.value_bytes) / storage.block_size);
        return std::max(flops / kFlops, tokens * bytes / kBytes) + kItem;
    }

    // Tokens that a member's queries see, all partitions together.
    int64_t context(const Member &m) const {
        const int last = rows.start[m.row] + m.end - 1, first = rows.start[m.row] + m.first;
        return last + 1 - (window && first >= window ? first - window + 1 : 0);
    }

    // A row's queries in tiles of equal size.
    template <typename Fn>
    void cut(int row, Fn &&fn) const {
        const int n = rows.count[row], tiles = (n + tile - 1) / tile;
        for (int i = 0; i < tiles; ++i)
            fn(Member{row, static_cast<int>(int64_t{n} * i / tiles), static_cast<int>(int64_t{n} * (i + 1) / tiles)});
    }

    // By query, long rows need no records, but a row gives only tiles x KV heads pieces of work, and the last thread
    // may begin one when the others end. By partition the pieces are many, and there is a record per query of each.
    bool long_rows_by_query() const {
        double all = 0, longest = 0, records = 0;
        for (int row = 0; row < count(); ++row)
            cut(row, [&](const Member &m) {
                const int64_t tokens = context(m), queries = m.end - m.first;
                const double cost = seconds(queries, tokens);
                all += cost;
                if (rows.count[row] < kManyQueries) return;
                longest = std::max(longest, cost);
                records += static_cast<double>(queries * per_head * ((tokens - 1) / kPartition + 1)) *
                           record_floats(storage.value_dim) * 2 * sizeof(float) / kRecordBytes;
            });
        all *= storage.kv_heads, records *= storage.kv_heads;
        return all / threads + longest * (threads - 1) / threads <= (all + records) / threads + longest / 8;
    }

    void by_query(int row) {
        cut(row, [&](const Member &m) {
            plan.items.push_back({static_cast<int>(plan.members.size()), 1, -1, 0,
                                  static_cast<float>(seconds(m.end - m.first, context(m)))});
            plan.members.push_back(m);
            plan.tokens_read += context(m);
        });
    }

    struct Reader {  // of a partition
        Member member;
        Visible seen;
        const int32_t *blocks;  // the partition's
        int first, end;         // of them
    };

    static int same_blocks(const Reader &a, const Reader &b) {
        const int end = std::min(a.end, b.end);
        int i = a.first;
        while (i < end && a.blocks[i] == b.blocks[i]) ++i;
        return i;
    }

    // Readers of the same first block share it, and what follows as far as it is the same.
    void by_partition(int partition, std::vector<Reader> &readers) {
        const auto before = [](const Reader &a, const Reader &b) {
            if (a.first != b.first) return a.first < b.first;
            return std::lexicographical_compare(a.blocks + a.first, a.blocks + a.end,  //
                                                b.blocks + b.first, b.blocks + b.end);
        };
        std::stable_sort(readers.begin(), readers.end(), before);
        for (size_t i = 0; i < readers.size();) {
            const Reader &head = readers[i];
            int common = head.end, queries = head.member.end - head.member.first;
            size_t n = 1;
            for (; i + n < readers.size() && readers[i + n].first == head.first; ++n) {
                const Reader &next = readers[i + n];
                const int same = std::min(common, same_blocks(head, next)), more = next.member.end - next.member.first;
                // Joining saves `same` blocks, and splits off the rest of what the others had in common.
                if (queries + more > tile || same == head.first ||
                    static_cast<int>(n) * (common - same) >= common - head.first) break;
                common = same, queries += more;
            }
            add(partition, &readers[i], static_cast<int>(n), common * storage.block_size, queries);
            i += n;
        }
    }

    void add(int partition, const Reader *readers, int n, int common, int queries) {
        Item item{static_cast<int>(plan.members.size()), n, partition, common, 0};
        int together = 0;
        for (int i = 0; i < n; ++i) {
            plan.members.push_back(readers[i].member);
            together = std::max(together, std::min(common, readers[i].seen.end));
            const int own = readers[i].seen.end - common;
            plan.tokens_read += std::max(own, 0);
            const Member &m = readers[i].member;
            if (own > 0) item.seconds += static_cast<float>(seconds(m.end - m.first, own));
        }
        plan.tokens_read += together - readers[0].seen.begin;
        item.seconds += static_cast<float>(seconds(queries, together - readers[0].seen.begin));
        plan.items.push_back(item);
    }

    // The partitions' items, in waves whose records fit the budget.
    void by_partitions(const std::vector<int> &chosen) {
        std::vector<Member> all;
        int first = INT32_MAX, end = 0;
        for (int row : chosen) {
            cut(row, [&](const Member &m) { all.push_back(m); });
            first = std::min(first, first_partition(rows.start[row], window));
            end = std::max(end, (rows.start[row] + rows.count[row] - 1) / kPartition + 1);
            for (int i = 0; i < rows.count[row]; ++i) plan.folded.push_back({row, i, i + 1});
        }
        const int64_t record_bytes = record_floats(storage.value_dim) * static_cast<int64_t>(sizeof(float));
        const int64_t most = kRecordBudget / record_bytes;
        std::vector<Reader> readers;
        for (int partition = first; partition < end; ++partition) {
            readers.clear();
            int64_t records = 0;
            for (int row : chosen) records += reads(row, partition) ? int64_t{rows.count[row]} * query_heads : 0;
            if (partition == first || records_in(plan.waves.back(), chosen) + records > most)
                plan.waves.push_back({partition, partition, {}, std::vector<int64_t>(count())});
            Wave &wave = plan.waves.back();
            wave.end = partition + 1;
            const size_t begin = plan.items.size();
            for (const Member &m : all) {
                const int position = rows.start[m.row];
                const Visible low = visible(position + m.first, window, partition);
                const Visible high = visible(position + m.end - 1, window, partition);
                if (low.begin >= kPartition || high.end <= 0) continue;
                const int per = kPartition / storage.block_size;
                readers.push_back({m, {low.begin, high.end}, table(m.row) + int64_t{partition} * per,
                                   low.begin / storage.block_size, (high.end - 1) / storage.block_size + 1});
            }
            by_partition(partition, readers);
            for (size_t i = begin; i < plan.items.size(); ++i) put(wave, static_cast<int>(i));
        }
        for (Wave &wave : plan.waves) plan.records = std::max(plan.records, records_in(wave, chosen));
    }

    bool reads(int row, int partition) const {
        return first_partition(rows.start[row], window) <= partition &&
               partition * kPartition < rows.start[row] + rows.count[row];
    }

    // Also sets where each row's begin.
    int64_t records_in(Wave &wave, const std::vector<int> &chosen) const {
        int64_t records = 0;
        for (int row : chosen) {
            wave.records[row] = records;
            const int from = std::max(wave.first, first_partition(rows.start[row], window));
            const int to = std::min(wave.end, (rows.start[row] + rows.count[row] - 1) / kPartition + 1);
            records += int64_t{std::max(0, to - from)} * rows.count[row] * query_heads;
        }
        return records;
    }

    void put(Wave &wave, int item) const {
        for (int head = 0; head < storage.kv_heads; ++head) wave.pieces.push_back({item, head});
    }

    // The costly ones first, dealt to the threads' shares.
    void order(Wave &wave) const {
        std::vector<Piece> &pieces = wave.pieces;
        std::stable_sort(pieces.begin(), pieces.end(), [&](Piece a, Piece b) {
            return plan.items[a.item].seconds > plan.items[b.item].seconds;
        });
        const int64_t n = static_cast<int64_t>(pieces.size());
        std::vector<Piece> dealt(n);
        int64_t next = 0;
        for (int64_t round = 0; next < n; ++round)
            for (int64_t thread = 0; thread < threads; ++thread) {
                const int64_t at = n * thread / threads + round;
                if (at < n * (thread + 1) / threads) dealt[at] = pieces[next++];
            }
        pieces = std::move(dealt);
    }

    Plan make(Strategy strategy) {
        const bool queries = strategy == Strategy::by_query || (strategy == Strategy::chosen && long_rows_by_query());
        std::vector<int> partitioned;
        for (int row = 0; row < count(); ++row)
            if (queries && (strategy == Strategy::by_query || rows.count[row] >= kManyQueries))
                by_query(row);
            else
                partitioned.push_back(row);
        const int whole = static_cast<int>(plan.items.size());
        if (!partitioned.empty()) by_partitions(partitioned);
        if (plan.waves.empty()) plan.waves.push_back({0, 0, {}, std::vector<int64_t>(count())});
        for (int item = 0; item < whole; ++item) put(plan.waves.front(), item);
        for (Wave &wave : plan.waves) order(wave);
        return std::move(plan);
    }
};

}  // namespace

Plan make_plan(const Storage &storage, const Rows &rows, int group, int query_heads, int threads, Strategy strategy) {
    return Planner{storage, rows, group, query_heads, threads}.make(strategy);
}

}  // namespace anaphora
