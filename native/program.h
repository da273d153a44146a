// A decoder as a list of operations, recorded once and run once per step on all threads, without Python in between.
#pragma once
#include <memory>
#include <variant>
#include <vector>

#include "elementwise.h"
#include "packed.h"
#include "pool.h"
#include "scratch.h"

namespace anaphora {

class Step;
struct Target;

using Floats = std::vector<float>;
using Buffer = int;  // number of a buffer: float32 [rows of the step][its width]

struct EmbedOp {
    Buffer out;
    std::shared_ptr<Packed> table;
    float scale;
};

struct NormOp {  // out = scale * norm(x) * weight, or out += that
    Buffer out, x;
    Floats weight;
    float eps, scale;
    bool adds;
};

struct ProductOp {
    Buffer out, x;
    std::shared_ptr<Packed> packed;
    Floats norm;
    LinearOp linear;
};

struct AttentionOp {  // qkv: [query heads | key heads | value heads][head_dim], normed and turned in place
    Buffer out, qkv;
    int layer, rope;  // rope: number of a Rope, or -1
    Floats norm;
    RotaryOp rotary;
    float scale, softcap;
};

struct Rope {
    Floats inverse_frequencies;
    float magnitude;
};

// One step's inputs and where its logits go. Tokens [rows]; wanted [logit_rows] numbers of rows.
struct Inputs {
    Step *step;  // may be null for a program without attention
    int rows;
    const int64_t *tokens;
    const int64_t *positions;
    int logit_rows;
    const int32_t *wanted;
    float *logits;  // [logit_rows][outputs of the program's logits]
    int64_t *best = nullptr;  // [logit_rows]: the token of each row's largest logit, if wanted
};

// Not safe for several threads at once.
class Program {
  public:
    Program(int query_heads, int kv_heads, int head_dim)
        : query_heads_(query_heads), kv_heads_(kv_heads), head_dim_(head_dim) {}

    Buffer buffer(int64_t width);
    int rope(Rope rope);
    void add(EmbedOp op) { ops_.emplace_back(std::move(op)); }
    void add(NormOp op) { ops_.emplace_back(std::move(op)); }
    void add(ProductOp op);
    void add(AttentionOp op);
    void set_logits(ProductOp op);  // its out is the caller's memory

    int64_t width(Buffer buffer) const { return widths_.at(buffer); }
    bool has(Buffer buffer) const { return buffer >= 0 && buffer < static_cast<int>(widths_.size()); }
    int64_t ropes() const { return static_cast<int64_t>(ropes_.size()); }
    int64_t vocabulary() const { return logits_ ? logits_->packed->weights().outputs : 0; }
    int64_t embeddings() const;  // tokens that every embedding table has
    int attention_layers() const { return layers_; }  // 1 + the highest layer number that attends
    int query_heads() const { return query_heads_; }
    int kv_heads() const { return kv_heads_; }
    int head_dim() const { return head_dim_; }

    void run(const Inputs &inputs);
    // What the last run left in a buffer: [rows][width]
    const float *values(Buffer buffer, int &rows);

  private:
    struct Thread {  // its own scratch
        Scratch packed, sums;
    };
    struct Context;
    using Op = std::variant<EmbedOp, NormOp, ProductOp, AttentionOp>;

    void job(const Context &context, Worker &worker);
    void turns(const Context &context, Worker &worker);
    void run(const EmbedOp &op, const Context &context, Worker &worker);
    void run(const NormOp &op, const Context &context, Worker &worker);
    void run(const ProductOp &op, const Context &context, Worker &worker);
    void run(const AttentionOp &op, const Context &context, Worker &worker);
    float *row(Buffer buffer, int64_t row) { return buffers_[buffer].floats(0) + row * widths_[buffer]; }

    const int query_heads_, kv_heads_, head_dim_;
    std::vector<int64_t> widths_;
    std::vector<Scratch> buffers_;
    std::vector<Rope> ropes_;
    std::vector<Scratch> cosines_, sines_;  // per rope: [rows][half]
    std::vector<Op> ops_;
    std::unique_ptr<ProductOp> logits_;
    std::vector<Thread> threads_;
    int rows_ = 0;
    int layers_ = 0;
};

// rows of x [count][inputs] through one product, on the worker's threads.
void multiply(const Target &target, const LinearOp &op, const LinearRows &rows, int count, Worker &worker,
              Scratch &packed, Scratch &sums);

}  // namespace anaphora
