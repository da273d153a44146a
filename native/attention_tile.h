// A tile of queries against one partition of the context: the interface between the targets' kernels and the rest.
#pragma once
#include <cstdint>

namespace anaphora {

constexpr int kPartition = 256;  // tokens; a multiple of every block size
constexpr int kMostDims = 1024;  // of keys, of values
constexpr int kTileRows = 96;    // query rows of a tile: its scores (96 KiB) stay in the second cache

enum class Format : uint8_t { fp32, bf16, fp16, int8, fp8, int4_keys, int4_values };

constexpr int kWideShare = 8;  // of int4_keys' dims the first eighth has a byte each

// Bytes of a token's codes, and of its scales (geometry/kv_dtype.py).
constexpr int code_bytes(Format format, int dim) {
    switch (format) {
        case Format::fp32: return 4 * dim;
        case Format::bf16:
        case Format::fp16: return (dim + 1) / 2 * 4;
        case Format::int8:
        case Format::fp8: return dim;
        case Format::int4_keys: return dim / kWideShare + (dim - dim / kWideShare + 1) / 2;
        case Format::int4_values: return dim / 2;
    }
    return 0;
}
constexpr int scale_bytes(Format format, int dim) {
    switch (format) {
        case Format::int8: return (dim + 31) / 32 * 2;
        case Format::fp8: return (dim + 63) / 64 * 2;
        case Format::int4_keys: return 2;
        case Format::int4_values: return dim / 8;
        default: return 0;
    }
}

// What a partition gives a query row, and what the fold of several keeps: value_dim mixed values, not yet divided by
// the sum, then the largest score and the sum of the weights 2^(score - largest). Scores are in units of ln 2.
constexpr int record_floats(int value_dim) { return (value_dim + 2 + 15) / 16 * 16; }

// The scratch memory of one thread; floats, all aligned to 64 bytes.
struct TileScratch {
    float *query;    // [kTileRows * (key_dim + 1)]; the room of one more is for what int4_keys' codes are off by
    float *scores;   // [kTileRows][kPartition], then the weights
    float *decoded;  // [decoded_floats(key_dim)] keys, or values, or scales of them, in float32
    float *mixed;    // [kTileRows][mixed_floats(value_dim)]
};
constexpr int decoded_floats(int key_dim) { return 36 * (key_dim + 1) > 8448 ? 36 * (key_dim + 1) : 8448; }
constexpr int mixed_floats(int value_dim) { return (value_dim + 31) / 32 * 32; }

// Rows of the tile that read the same blocks for some of the partition's tokens.
struct Segment {
    int first_row, rows;
    int first_token, end_token;    // in the partition
    const uint8_t *const *pieces;  // [kPartition / block_size] key pieces; a value piece lies key_bytes behind
};

struct Tile {
    int block_size, key_dim, value_dim;
    int64_t key_bytes;
    Format key, value;
    int rows;                // query rows (tokens x query heads of the KV head)
    const int *begin, *end;  // [rows] the partition's tokens that a row sees; begin >= end: none, and no record
    float *const *record;    // [rows] -> record_floats(value_dim)
    int segments;            // in the order of their tokens, for every row
    const Segment *segment;
    float softcap;       // in units of ln 2; 0: none
    const float *slope;  // [rows] ALiBi slopes in units of ln 2, or null
    const int *position; // [rows] the query's position, counted from the partition's begin
    TileScratch scratch;
};

// Consecutive tokens' keys or values, and the stored pieces they go to.
struct NewTokens {
    const float *from;  // the first token's vector; the next one's lies row_stride floats on
    int64_t row_stride;
    int tokens, dim;
    uint8_t *piece;
    int block_size, first;  // the first token's place in the block
    Format format;
};

// y = (x - mean) matrix * scale, of vectors of `dim` elements, a multiple of 16. One chain per element, in order.
struct Turn {
    const float *mean;    // [dim] or null
    const float *matrix;  // [dim][dim]
    float scale;
    int dim;
};

struct AttentionKernels {
    // Query rows, times `factor`, into scratch.query in the order in which the tiles read them.
    void (*load_queries)(const Tile &tile, const float *const *query, float factor);
    // Every row's record from the partition. The queries are loaded.
    void (*partition)(const Tile &tile);
    // State and part are records; the part's tokens come after those of the state.
    void (*fold)(float *state, const float *part, int value_dim);
    // False when a format with scales was given NaN or infinity: what is stored then means nothing.
    bool (*write_keys)(const NewTokens &tokens);
    bool (*write_values)(const NewTokens &tokens);
    // Vectors `from`, from_stride floats apart -> `to`; not in place.
    void (*turn)(const Turn &turn, const float *from, int64_t from_stride, int rows, float *to, int64_t to_stride);
};

}  // namespace anaphora
