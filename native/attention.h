// Attention over paged keys and values: what a step shares (Step), and a layer's two operations (write_kv, attend).
//
// The context is cut at absolute multiples of kPartition tokens. What a query gets from one partition - the largest
// score, the sum of the weights, the mixed values - depends on the query and on the partition's stored bytes alone,
// and a query's result is the fold of its partitions in order. So a result does not depend on the rows of the batch,
// on how a prompt was cut into chunks, on which blocks are shared, or on the strategy that was chosen.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention_tile.h"
#include "pool.h"

namespace anaphora {

struct Workspace;  // scratch memory of a storage's steps, one after the other; see attention.cpp for its bounds
struct Plan;       // how a cache group's work is cut into items; see attention_plan.h

// What a layer's keys and queries, values and outputs are turned by (storage/transform.py); empty: they are not.
struct Turns {
    std::vector<float> key_mean;  // [kv_heads][key_dim]
    std::vector<float> keys;      // [kv_heads][key_dim][key_dim]: stored = (key - mean) keys
    std::vector<float> queries;   // likewise: asked with = query queries
    std::vector<float> value_rms; // [kv_heads]
    std::vector<float> spread;    // [value_dim][value_dim]: stored = value spread / rms
    std::vector<float> gather;    // its transpose: output = mixed gather rms
};

// Where a layer's keys and values lie in a block, and in which forms (storage/codec.py).
struct LayerKV {
    int group;          // cache group, whose block tables the layer uses
    int64_t offset;     // bytes from the block's begin to head 0's key piece; its value piece follows at once
    int64_t key_bytes;  // of a key piece, of a value piece
    int64_t value_bytes;
    Format key, value;
    Turns turns{};
};

// PagedStorage's memory. Holds no reference to it.
struct Storage {
    uint8_t *data;  // [num_blocks, block_bytes]
    int64_t num_blocks, block_bytes;
    int block_size;  // a multiple of 16 that divides kPartition
    int kv_heads, key_dim, value_dim;
    std::vector<LayerKV> layers;  // by layer number
    std::shared_ptr<Workspace> workspace;

    uint8_t *key_piece(const LayerKV &layer, int64_t block, int head) const {
        return data + block * block_bytes + layer.offset + head * (layer.key_bytes + layer.value_bytes);
    }
    uint8_t *value_piece(const LayerKV &layer, int64_t block, int head) const {
        return key_piece(layer, block, head) + layer.key_bytes;
    }
};

// float32 [T][heads][dim]: a token's heads lie together, tokens are row_stride floats apart.
struct Heads {
    float *data;
    int64_t row_stride;
};

// One call's rules for scores; see engine/attention.py.
struct Scoring {
    float scale;
    float softcap = 0;              // 0: none
    const float *alibi = nullptr;   // [query_heads]
    const float *sinks = nullptr;   // [query_heads]
};

enum class Strategy : uint8_t {
    chosen,         // by a cost estimate
    by_partition,   // an item is a partition: every query of the batch that sees the same blocks reads it together
    by_query,       // an item is a tile of one row's queries: it reads the row's partitions one after the other
};

// The rows of one batch. Row r's tokens lie behind those of row r - 1 along T, at positions
// start[r] .. start[r] + count[r] - 1; its block table of group g is blocks[offsets[g * rows + r] ..
// offsets[g * rows + r + 1]), indexed by position / block_size, and covers the row's last position. Entries before
// the window are never looked at.
struct Rows {
    std::vector<int32_t> start, count;
    std::vector<int32_t> blocks;
    std::vector<int64_t> offsets;
    std::vector<int32_t> window;  // per group: a query at p sees p - window + 1 .. p; 0: everything

    const int32_t *table(int group, int row) const { return blocks.data() + offsets[group * start.size() + row]; }
};

// What all layers of a step share. The storage must outlive it; steps of one storage run one at a time.
class Step {
  public:
    // Throws std::invalid_argument when the rows do not fit the storage.
    Step(std::shared_ptr<Storage> storage, Rows rows, Strategy strategy = Strategy::chosen);
    ~Step();
    Step(const Step &) = delete;
    Step &operator=(const Step &) = delete;

    // Cuts the work for so many query heads and threads, unless that is done. Call it outside of a job.
    void prepare(int query_heads, int threads);

    // Makes room for so many threads' write_kv(); prepare() does it too.
    void reserve(int threads);

    // Stored tokens, of one KV head, that the items of a group read, all together. prepare() has been called.
    int64_t tokens_read(int group) const;

    // The first layer that was to keep NaN or infinity in a format with scales, or -1; then `what` says whether it
    // was keys or values. What is stored for that step means nothing.
    int not_finite(const char *&what) const;

    int tokens() const { return tokens_; }
    const Storage &storage() const { return *storage_; }
    const Rows &rows() const { return rows_; }

    // The two below run inside a job of the pool: every thread calls them with the same arguments. At entry all work
    // is unclaimed; afterwards the caller passes a barrier before it claims or reads anything.

    // Stores the step's new keys [T, kv_heads, key_dim] and values [T, kv_heads, value_dim].
    void write_kv(Worker &worker, int layer, Heads key, Heads value) const;

    // query [T, query_heads, key_dim] -> out [T, query_heads, value_dim]. The keys and values must be stored already.
    void attend(Worker &worker, int layer, int query_heads, Heads query, Heads out, const Scoring &scoring) const;

  private:
    void blame(int layer, bool values) const;
    Heads turned(Worker &worker, const LayerKV &layer, int query_heads, Heads query) const;

    std::shared_ptr<Storage> storage_;
    Rows rows_;
    Strategy strategy_;
    int tokens_ = 0;
    int query_heads_ = 0, threads_ = 0;
    mutable std::atomic<int> blamed_{INT32_MAX};  // 2 * layer + whether it is its values
    std::vector<Plan> plans_;       // per group
    std::vector<int> token_row_;    // [T]
    std::vector<int> first_token_;  // [rows] along T
};

}  // namespace anaphora
