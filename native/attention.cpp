#include "attention.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "attention_plan.h"
#include "scratch.h"
#include "targets.h"

namespace anaphora {
namespace {

constexpr float kLog2e = 1.44269504f;
constexpr int kRun = 64;  // new tokens that are written at a time
constexpr int kQueryRun = 16;  // tokens whose queries are turned at a time
constexpr int kExpected = 64;  // tokens whose keys are asked for before their piece begins

[[noreturn]] void refuse(const std::string &why) { throw std::invalid_argument(why); }

int64_t rounded(int64_t floats) { return (floats + 15) / 16 * 16; }

}  // namespace

// One thread's memory: a tile's queries, scores and mixed values, two records per row for items by query, and decoded
// keys or values. 240 KiB with head_dim 64, 530 KiB with 256.
struct ThreadScratch {
    Scratch memory;
    TileScratch tile;
    float *states, *parts;  // [kTileRows] records
    float *turned_keys, *turned_values;  // [kRun]
    int begin[kTileRows], end[kTileRows], position[kTileRows];
    float *record[kTileRows];
    const float *query[kTileRows];
    float slope[kTileRows];
    Segment segments[kTileRows + 1];
    const uint8_t *pieces[kTileRows + 1][kPartition / 16];

    void resize(const Storage &storage) {
        const int64_t sizes[] = {rounded(int64_t{kTileRows} * (storage.key_dim + 1)),
                                 int64_t{kTileRows} * kPartition,
                                 rounded(decoded_floats(storage.key_dim)),
                                 rounded(int64_t{kTileRows} * mixed_floats(storage.value_dim)),
                                 int64_t{kTileRows} * record_floats(storage.value_dim),
                                 int64_t{kTileRows} * record_floats(storage.value_dim),
                                 rounded(int64_t{kRun} * storage.key_dim), rounded(int64_t{kRun} * storage.value_dim)};
        float **const to[] = {&tile.query, &tile.scores, &tile.decoded, &tile.mixed,
                              &states,     &parts,       &turned_keys,  &turned_values};
        int64_t total = 0;
        for (int64_t size : sizes) total += size;
        float *at = memory.floats(total);
        for (size_t i = 0; i < std::size(sizes); at += sizes[i++]) *to[i] = at;
    }
};

// Beside the threads' scratch: the records of a wave (at most 8 MiB, or those of one partition if that is more) and
// one record for each query head of every query that is done by partition, and a layer's queries when they are turned.
struct Workspace {
    std::vector<std::unique_ptr<ThreadScratch>> threads;
    Scratch records, states, queries;
};

Step::Step(std::shared_ptr<Storage> storage, Rows rows, Strategy strategy)
    : storage_(std::move(storage)), rows_(std::move(rows)), strategy_(strategy) {
    const size_t n = rows_.start.size(), groups = rows_.window.size();
    if (rows_.count.size() != n) refuse("starts and counts differ in length");
    if (rows_.offsets.size() != groups * n + 1 || rows_.offsets.front() != 0 ||
        rows_.offsets.back() != static_cast<int64_t>(rows_.blocks.size()))
        refuse("offsets must be [groups * rows + 1], from 0 to the number of blocks");
    for (const LayerKV &layer : storage_->layers)
        if (layer.group < 0 || layer.group >= static_cast<int>(groups)) refuse("a layer's group has no window");
    for (size_t row = 0; row < n; ++row) {
        if (rows_.start[row] < 0 || rows_.count[row] < 1) refuse("row " + std::to_string(row) + " has no tokens");
        tokens_ += rows_.count[row];
        const int last = (rows_.start[row] + rows_.count[row] - 1) / storage_->block_size;
        for (size_t group = 0; group < groups; ++group) {
            const int64_t begin = rows_.offsets[group * n + row], end = rows_.offsets[group * n + row + 1];
            if (end - begin <= last) refuse("row " + std::to_string(row) + " has a block table that is too short");
            const int window = rows_.window[group];
            const int first = window && rows_.start[row] >= window ? rows_.start[row] - window + 1 : 0;
            for (int64_t i = begin + first / storage_->block_size; i <= begin + last; ++i)
                if (rows_.blocks[i] < 0 || rows_.blocks[i] >= storage_->num_blocks)
                    refuse("row " + std::to_string(row) + " sees block " + std::to_string(rows_.blocks[i]) +
                           ", which does not exist");
        }
    }
    token_row_.reserve(tokens_), first_token_.reserve(n);
    for (size_t row = 0; row < n; ++row) {
        first_token_.push_back(static_cast<int>(token_row_.size()));
        token_row_.insert(token_row_.end(), rows_.count[row], static_cast<int>(row));
    }
    if (!storage_->workspace) storage_->workspace = std::make_shared<Workspace>();
}

Step::~Step() = default;

void Step::reserve(int threads) {
    auto &each = storage_->workspace->threads;
    while (static_cast<int>(each.size()) < threads) {
        each.push_back(std::make_unique<ThreadScratch>());
        each.back()->resize(*storage_);
    }
}

void Step::prepare(int query_heads, int threads) {
    Workspace &space = *storage_->workspace;
    reserve(threads);
    if (query_heads_ == query_heads && threads_ == threads) return;
    if (query_heads % storage_->kv_heads != 0 || query_heads / storage_->kv_heads > kTileRows)
        refuse("query heads must be a multiple of the KV heads, at most " + std::to_string(kTileRows) + " times");
    query_heads_ = query_heads, threads_ = threads;
    plans_.clear();
    int64_t records = 0, folded = 0;
    for (int group = 0; group < static_cast<int>(rows_.window.size()); ++group) {
        plans_.push_back(make_plan(*storage_, rows_, group, query_heads, threads, strategy_));
        records = std::max(records, plans_.back().records);
        folded = std::max(folded, static_cast<int64_t>(plans_.back().folded.size()));
    }
    space.records.floats(records * record_floats(storage_->value_dim));
    space.states.floats(folded * query_heads * record_floats(storage_->value_dim));
    space.queries.floats(int64_t{tokens_} * query_heads * storage_->key_dim);
}

int64_t Step::tokens_read(int group) const { return plans_[group].tokens_read; }

void Step::write_kv(Worker &worker, int layer_number, Heads key, Heads value) const {
    const LayerKV &layer = storage_->layers[layer_number];
    const AttentionKernels &kernels = *target().attention;
    const Turns &turns = layer.turns;
    const int size = storage_->block_size, heads = storage_->kv_heads, runs = (tokens_ + kRun - 1) / kRun;
    const int key_dim = storage_->key_dim, value_dim = storage_->value_dim;
    bool keys_fine = true, values_fine = true;
    for (int piece; (piece = worker.claim(runs * heads)) >= 0;) {
        const int head = piece % heads, begin = piece / heads * kRun, end = std::min(tokens_, begin + kRun);
        Heads from_keys{key.data + begin * key.row_stride + head * key_dim, key.row_stride};
        Heads from_values{value.data + begin * value.row_stride + head * value_dim, value.row_stride};
        const auto turn = [&](const Turn &turn, Heads &from, float *to) {
            kernels.turn(turn, from.data, from.row_stride, end - begin, to, turn.dim);
            from = {to, turn.dim};
        };
        ThreadScratch &own = *storage_->workspace->threads[worker.index];
        if (!turns.keys.empty())
            turn({&turns.key_mean[head * key_dim], &turns.keys[int64_t{head} * key_dim * key_dim], 1, key_dim},
                 from_keys, own.turned_keys);
        if (!turns.spread.empty())
            turn({nullptr, turns.spread.data(), 1 / turns.value_rms[head], value_dim}, from_values, own.turned_values);
        for (int t = begin, n; t < end; t += n) {
            const int row = token_row_[t], position = rows_.start[row] + t - first_token_[row], place = position % size;
            n = std::min({end - t, size - place, first_token_[row] + rows_.count[row] - t});
            uint8_t *at = storage_->key_piece(layer, rows_.table(layer.group, row)[position / size], head);
            const auto tokens = [&](const Heads &from) { return from.data + (t - begin) * from.row_stride; };
            keys_fine &= kernels.write_keys(
                {tokens(from_keys), from_keys.row_stride, n, key_dim, at, size, place, layer.key});
            values_fine &= kernels.write_values({tokens(from_values), from_values.row_stride, n, value_dim,
                                                 at + layer.key_bytes, size, place, layer.value});
        }
    }
    if (!keys_fine) blame(layer_number, false);
    if (!values_fine) blame(layer_number, true);
}

void Step::blame(int layer, bool values) const {
    const int mine = 2 * layer + values;
    for (int first = blamed_; mine < first && !blamed_.compare_exchange_weak(first, mine);) {
    }
}

int Step::not_finite(const char *&what) const {
    const int first = blamed_;
    what = first % 2 ? "values" : "keys";
    return first == INT32_MAX ? -1 : first / 2;
}

// The layer's queries as they ask stored keys; all threads meet before it returns.
Heads Step::turned(Worker &worker, const LayerKV &layer, int query_heads, Heads query) const {
    const int dim = storage_->key_dim, heads = storage_->kv_heads, per = query_heads / heads;
    const int run = tokens_ <= kQueryRun ? 1 : kQueryRun, runs = (tokens_ + run - 1) / run;
    const Heads to{storage_->workspace->queries.floats(0), int64_t{query_heads} * dim};
    for (int piece; (piece = worker.claim(runs * heads)) >= 0;) {
        const int head = piece % heads, begin = piece / heads * run, end = std::min(tokens_, begin + run);
        const Turn turn{nullptr, &layer.turns.queries[int64_t{head} * dim * dim], 1, dim};
        for (int t = begin; t < end; ++t) {
            const int64_t at = int64_t{head} * per * dim;
            target().attention->turn(turn, query.data + t * query.row_stride + at, dim, per,
                                     to.data + t * to.row_stride + at, dim);
        }
    }
    worker.barrier();
    return to;
}

namespace {

// One attend() call, as the threads see it.
struct Call {
    const Storage &storage;
    const Rows &rows;
    const Plan &plan;
    const std::vector<int> &first_token;
    const LayerKV &layer;
    const AttentionKernels &kernels;
    const Scoring &scoring;
    Heads query, out;
    int query_heads;
    float *records, *states;

    int per_head() const { return query_heads / storage.kv_heads; }
    int window() const { return rows.window[layer.group]; }
    int floats() const { return record_floats(storage.value_dim); }

    // Number of the record, in the wave, of a query's first query head.
    int64_t record(const Wave &wave, int row, int query, int partition) const {
        const int first = std::max(wave.first, first_partition(rows.start[row], window()));
        return wave.records[row] + (int64_t{partition - first} * rows.count[row] + query) * query_heads;
    }

    // A state that has seen nothing but the head's sink.
    void begin(float *state, int head) const {
        std::fill(state, state + storage.value_dim, 0.0f);
        state[storage.value_dim] = scoring.sinks ? scoring.sinks[head] * kLog2e : -INFINITY;
        state[storage.value_dim + 1] = scoring.sinks ? 1.0f : 0.0f;
    }

    void end(const float *state, int token, int head) const {
        float *to = out.data + token * out.row_stride + int64_t{head} * storage.value_dim;
        if (layer.turns.gather.empty()) {
            for (int d = 0; d < storage.value_dim; ++d) to[d] = state[d] / state[storage.value_dim + 1];
            return;
        }
        const float rms = layer.turns.value_rms[head / per_head()];
        const Turn turn{nullptr, layer.turns.gather.data(), rms / state[storage.value_dim + 1], storage.value_dim};
        kernels.turn(turn, state, 0, 1, to, 0);
    }

    // Asks for the keys that a piece begins with, while the one before is computed.
    void expect(Piece piece) const {
        const Item &item = plan.items[piece.item];
        const Member &m = plan.members[item.first_member];
        const int first = rows.start[m.row] + m.first, last = rows.start[m.row] + m.end - 1, size = storage.block_size;
        const int partition = item.partition < 0 ? first_partition(first, window()) : item.partition;
        const int begin = partition * kPartition + visible(first, window(), partition).begin;
        const int end = size > kExpected ? 0 : std::min({last + 1, begin + kExpected, (partition + 1) * kPartition});
        const int32_t *table = rows.table(layer.group, m.row);
        for (int t = begin / size * size; t < end; t += size) {
            const uint8_t *keys = storage.key_piece(layer, table[t / size], piece.head);
            for (int64_t at = 0; at < layer.key_bytes; at += 64) __builtin_prefetch(keys + at);
        }
    }

    Tile tile(const Item &item, int kv_head, ThreadScratch &scratch) const {
        Tile tile{storage.block_size, storage.key_dim, storage.value_dim, layer.key_bytes, layer.key, layer.value, 0,
                  scratch.begin, scratch.end, scratch.record, 0, scratch.segments, 0,
                  scoring.alibi ? scratch.slope : nullptr, scratch.position, scratch.tile};
        for (int i = 0; i < item.members; ++i) {
            const Member &m = plan.members[item.first_member + i];
            for (int query = m.first; query < m.end; ++query)
                for (int g = 0; g < per_head(); ++g, ++tile.rows) {
                    const int head = kv_head * per_head() + g;
                    const int64_t token = (first_token[m.row] + query) * this->query.row_stride;
                    scratch.query[tile.rows] = this->query.data + token + int64_t{head} * storage.key_dim;
                    if (scoring.alibi) scratch.slope[tile.rows] = scoring.alibi[head] * kLog2e;
                }
        }
        float factor = scoring.scale * kLog2e;
        if (scoring.softcap > 0) {
            tile.softcap = scoring.softcap * kLog2e;
            factor = scoring.scale / scoring.softcap;
        }
        kernels.load_queries(tile, scratch.query, factor);
        return tile;
    }

    // What the rows of the members see of a partition.
    void look(const Member *members, int n, int partition, ThreadScratch &scratch) const {
        for (int i = 0, row = 0; i < n; ++i)
            for (int query = members[i].first; query < members[i].end; ++query) {
                const int position = rows.start[members[i].row] + query;
                const Visible seen = visible(position, window(), partition);
                for (int g = 0; g < per_head(); ++g, ++row) {
                    scratch.begin[row] = seen.begin, scratch.end[row] = seen.end;
                    scratch.position[row] = position - partition * kPartition;
                }
            }
    }

    void segment(Tile &tile, const Member &m, int partition, int head, int row, int rows_of, int from, int to,
                 ThreadScratch &scratch) const {
        const Visible low = visible(rows.start[m.row] + m.first, window(), partition);
        const Visible high = visible(rows.start[m.row] + m.end - 1, window(), partition);
        from = std::max(from, low.begin / storage.block_size * storage.block_size), to = std::min(to, high.end);
        if (from >= to) return;
        const int32_t *table = rows.table(layer.group, m.row) + int64_t{partition} * (kPartition / storage.block_size);
        const uint8_t **pieces = scratch.pieces[tile.segments];
        for (int i = from / storage.block_size; i * storage.block_size < to; ++i)
            pieces[i] = storage.key_piece(layer, table[i], head);
        scratch.segments[tile.segments++] = {row, rows_of, from, to, pieces};
    }

    void by_partition(const Item &item, const Wave &wave, int head, ThreadScratch &scratch) const {
        Tile tile = this->tile(item, head, scratch);
        const Member *members = &plan.members[item.first_member];
        look(members, item.members, item.partition, scratch);
        const Member *widest = members;  // whoever sees most of what is common
        for (int i = 0, row = 0; i < item.members; ++i) {
            const Member &m = members[i];
            const auto last = [&](const Member &each) { return rows.start[each.row] + each.end; };
            if (last(m) > last(*widest)) widest = &m;
            for (int query = m.first; query < m.end; ++query)
                for (int g = 0; g < per_head(); ++g, ++row)
                    scratch.record[row] =
                        records + (record(wave, m.row, query, item.partition) + head * per_head() + g) * floats();
        }
        segment(tile, *widest, item.partition, head, 0, tile.rows, 0, item.common, scratch);
        for (int i = 0, row = 0; i < item.members; ++i) {
            const int own = (members[i].end - members[i].first) * per_head();
            segment(tile, members[i], item.partition, head, row, own, item.common, kPartition, scratch);
            row += own;
        }
        kernels.partition(tile);
    }

    void by_query(const Item &item, int head, ThreadScratch &scratch) const {
        Tile tile = this->tile(item, head, scratch);
        const Member &m = plan.members[item.first_member];
        for (int row = 0; row < tile.rows; ++row) {
            scratch.record[row] = scratch.parts + row * floats();
            begin(scratch.states + row * floats(), head * per_head() + row % per_head());
        }
        const int last = (rows.start[m.row] + m.end - 1) / kPartition;
        for (int partition = first_partition(rows.start[m.row] + m.first, window()); partition <= last; ++partition) {
            look(&m, 1, partition, scratch);
            tile.segments = 0;
            segment(tile, m, partition, head, 0, tile.rows, 0, kPartition, scratch);
            kernels.partition(tile);
            for (int row = 0; row < tile.rows; ++row)
                if (scratch.begin[row] < scratch.end[row])
                    kernels.fold(scratch.states + row * floats(), scratch.record[row], storage.value_dim);
        }
        for (int row = 0; row < tile.rows; ++row)
            end(scratch.states + row * floats(), first_token[m.row] + m.first + row / per_head(),
                head * per_head() + row % per_head());
    }

    // One query's heads that share a KV head: the wave's records into their states.
    void fold(const Wave &wave, int number, int kv_head, bool first, bool last) const {
        const Member &m = plan.folded[number];
        const int position = rows.start[m.row] + m.first;
        const int from = std::max(wave.first, first_partition(position, window()));
        const int to = std::min(wave.end, position / kPartition + 1);
        for (int head = kv_head * per_head(); head < (kv_head + 1) * per_head(); ++head) {
            float *state = states + (int64_t{number} * query_heads + head) * floats();
            if (first) begin(state, head);
            for (int partition = from; partition < to; ++partition)
                kernels.fold(state, records + (record(wave, m.row, m.first, partition) + head) * floats(),
                             storage.value_dim);
            if (last) end(state, first_token[m.row] + m.first, head);
        }
    }
};

}  // namespace

void Step::attend(Worker &worker, int layer_number, int query_heads, Heads query, Heads out,
                  const Scoring &scoring) const {
    const LayerKV &layer = storage_->layers[layer_number];
    const Plan &plan = plans_[layer.group];
    Workspace &space = *storage_->workspace;
    ThreadScratch &scratch = *space.threads[worker.index];
    if (!layer.turns.queries.empty()) query = turned(worker, layer, query_heads, query);
    const Call call{*storage_, rows_, plan, first_token_, layer, *target().attention, scoring, query, out, query_heads,
                    space.records.floats(0), space.states.floats(0)};
    for (const Wave &wave : plan.waves) {
        const bool first = &wave == &plan.waves.front(), last = &wave == &plan.waves.back();
        for (int i; (i = worker.claim(static_cast<int>(wave.pieces.size()))) >= 0;) {
            const Piece piece = wave.pieces[i];
            const Item &item = plan.items[piece.item];
            if (i + 1 < static_cast<int>(wave.pieces.size())) call.expect(wave.pieces[i + 1]);
            if (item.partition < 0)
                call.by_query(item, piece.head, scratch);
            else
                call.by_partition(item, wave, piece.head, scratch);
        }
        if (plan.folded.empty()) continue;
        worker.barrier();
        const int heads = storage_->kv_heads;
        for (int i; (i = worker.claim(static_cast<int>(plan.folded.size()) * heads)) >= 0;)
            call.fold(wave, i / heads, i % heads, first, last);
        if (!last) worker.barrier();
    }
}

}  // namespace anaphora
