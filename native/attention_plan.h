// How the attention of one cache group is cut into items of work, once per step for all its layers.
#pragma once
#include <cstdint>
#include <vector>

#include "attention.h"

namespace anaphora {

// Queries first .. end - 1 of a row.
struct Member {
    int row, first, end;
};

// One tile of queries, to be done for one KV head.
//     by partition: the members against one partition, of which they read the first `common` tokens together
//     by query:     one member against all its partitions, one after the other
struct Item {
    int first_member, members;
    int partition;  // -1: by query
    int common;
    float seconds;  // estimated
};

struct Piece {
    int item, head;
};

// Pieces of work whose records are in memory at the same time: those of partitions first .. end - 1.
struct Wave {
    int first, end;
    std::vector<Piece> pieces;     // in the order in which threads claim them: the costly ones first
    std::vector<int64_t> records;  // [rows] number of the row's first record: [partition of the wave][query][head]
};

struct Plan {
    std::vector<Member> members;
    std::vector<Item> items;
    std::vector<Wave> waves;
    std::vector<Member> folded;  // single queries whose records are folded after each wave
    int64_t records = 0;         // most that a wave has
    int64_t tokens_read = 0;     // by all items, for one KV head
};

// Tokens of a partition that the query at `position` sees: begin .. end - 1.
struct Visible {
    int begin, end;
};
inline Visible visible(int position, int window, int partition) {
    const int base = partition * kPartition;
    const int from = window ? position - window + 1 - base : 0, to = position + 1 - base;
    return {from > 0 ? from : 0, to < kPartition ? to : kPartition};
}
// First partition of which the query at `position` sees anything.
inline int first_partition(int position, int window) {
    return window && position >= window ? (position - window + 1) / kPartition : 0;
}

Plan make_plan(const Storage &storage, const Rows &rows, int group, int query_heads, int threads, Strategy strategy);

}  // namespace anaphora
