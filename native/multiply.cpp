// How a product is cut into pieces for threads.
#include <algorithm>

#include "program.h"
#include "targets.h"

namespace anaphora {
namespace {

constexpr int64_t kStream = 64 << 10;  // bytes of weights in a piece with few rows: some microseconds of reading
constexpr int64_t kChunk = 16;         // panels in a piece with many rows: its sums stay in the second cache
constexpr int kFewRows = 16;

int divide_up(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

int panels_per_piece(const Weights &weights, int count, int blocks, int threads) {
    int64_t panels = count <= kFewRows ? kStream / weights.panel_bytes() : kChunk;
    panels = std::min(panels, weights.panel_count * blocks / (4 * threads));  // several pieces each, to even out
    return static_cast<int>(std::max<int64_t>(2, panels / 2 * 2));            // gate and other half stay together
}

}  // namespace

void multiply(const Target &target, const LinearOp &op, const LinearRows &rows, int count, Worker &worker,
              Scratch &packed, Scratch &sums) {
    const int blocks = divide_up(count, kBlockRows);
    if (blocks == 0) return;
    const int panels = static_cast<int>(op.weights.panel_count);
    const int chunk = panels_per_piece(op.weights, count, blocks, worker.size), chunks = divide_up(panels, chunk);
    const int most = divide_up(count, blocks);
    float *const prepared = packed.floats(static_cast<size_t>(op.weights.slabs()) * most * kSlabStride);
    float *const room = sums.floats(static_cast<size_t>(most) * chunk * kPanel);
    int block = -1;
    for (int piece; (piece = worker.claim(blocks * chunks)) >= 0;) {
        const int begin = static_cast<int>(static_cast<int64_t>(count) * (piece / chunks) / blocks);
        const int end = static_cast<int>(static_cast<int64_t>(count) * (piece / chunks + 1) / blocks);
        if (piece / chunks != block) {
            block = piece / chunks;
            target.linear->prepare(op, rows, begin, end, prepared);
        }
        const int first = piece % chunks * chunk;
        target.linear->multiply(op, rows, begin, end, first, std::min(panels, first + chunk), prepared, room);
    }
}

}  // namespace anaphora
