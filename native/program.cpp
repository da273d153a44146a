#include "program.h"

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "targets.h"

namespace anaphora {
namespace {

constexpr int kRowsPerPiece = 8;  // for what is done row by row

template <typename DoRow>
void each_row(Worker &worker, int rows, DoRow &&do_row) {
    const int size = rows <= kRowsPerPiece * worker.size ? 1 : kRowsPerPiece;
    for (int piece; (piece = worker.claim((rows + size - 1) / size)) >= 0;)
        for (int row = piece * size; row < std::min(rows, (piece + 1) * size); ++row) do_row(row);
}

}  // namespace

struct Program::Context {
    const Inputs &inputs;
    const Target &target;
};

Buffer Program::buffer(int64_t width) {
    widths_.push_back(width);
    buffers_.emplace_back();
    return static_cast<Buffer>(widths_.size()) - 1;
}

int Program::rope(Rope rope) {
    ropes_.push_back(std::move(rope));
    cosines_.emplace_back();
    sines_.emplace_back();
    return static_cast<int>(ropes_.size()) - 1;
}

void Program::add(ProductOp op) {
    op.linear.weights = op.packed->weights();
    ops_.emplace_back(std::move(op));
}

void Program::add(AttentionOp op) {
    op.rotary.half = op.rope < 0 ? 0 : static_cast<int>(ropes_.at(op.rope).inverse_frequencies.size());
    layers_ = std::max(layers_, op.layer + 1);
    ops_.emplace_back(std::move(op));
}

void Program::set_logits(ProductOp op) {
    op.linear.weights = op.packed->weights();
    logits_ = std::make_unique<ProductOp>(std::move(op));
}

int64_t Program::embeddings() const {
    int64_t least = INT64_MAX;
    for (const Op &op : ops_)
        if (const auto *embed = std::get_if<EmbedOp>(&op)) least = std::min(least, embed->table->weights().outputs);
    return least;
}

const float *Program::values(Buffer buffer, int &rows) {
    rows = rows_;
    return row(buffer, 0);
}

void Program::run(const Inputs &inputs) {
    const std::shared_ptr<Pool> threads = pool();
    rows_ = inputs.rows;
    for (size_t i = 0; i < widths_.size(); ++i) buffers_[i].floats(static_cast<size_t>(widths_[i]) * inputs.rows);
    for (size_t i = 0; i < ropes_.size(); ++i)
        for (Scratch *table : {&cosines_[i], &sines_[i]})
            table->floats(ropes_[i].inverse_frequencies.size() * inputs.rows);
    threads_.resize(std::max<size_t>(threads_.size(), threads->size()));
    if (inputs.step) inputs.step->prepare(query_heads_, threads->size());
    const Context context{inputs, target()};
    threads->run([&](Worker &worker) { job(context, worker); });
}

void Program::job(const Context &context, Worker &worker) {
    turns(context, worker);
    for (const Op &op : ops_) {
        std::visit([&](const auto &op) { run(op, context, worker); }, op);
        worker.barrier();
    }
    const Inputs &inputs = context.inputs;
    if (!logits_ || inputs.logit_rows == 0) return;
    Thread &own = threads_[worker.index];
    const LinearRows rows{row(logits_->x, 0), width(logits_->x), inputs.logits, vocabulary(), inputs.wanted};
    multiply(context.target, logits_->linear, rows, inputs.logit_rows, worker, own.packed, own.sums);
    if (!inputs.best) return;
    worker.barrier();
    each_row(worker, inputs.logit_rows, [&](int at) {
        inputs.best[at] = context.target.elementwise->argmax(inputs.logits + at * vocabulary(), vocabulary());
    });
}

// cos and sin of the step's positions. In float32 and in the order of engine/models/rope.py.
void Program::turns(const Context &context, Worker &worker) {
    const int64_t rows = context.inputs.rows;
    for (size_t i = 0; i < ropes_.size(); ++i) {
        const Floats &frequencies = ropes_[i].inverse_frequencies;
        float *cosines = cosines_[i].floats(0), *sines = sines_[i].floats(0);
        for (int64_t at = rows * worker.index / worker.size; at < rows * (worker.index + 1) / worker.size; ++at) {
            const float position = static_cast<float>(context.inputs.positions[at]);
            for (size_t k = 0; k < frequencies.size(); ++k) {
                const float angle = position * frequencies[k];
                cosines[at * frequencies.size() + k] = std::cos(angle) * ropes_[i].magnitude;
                sines[at * frequencies.size() + k] = std::sin(angle) * ropes_[i].magnitude;
            }
        }
    }
}

void Program::run(const EmbedOp &op, const Context &context, Worker &worker) {
    each_row(worker, context.inputs.rows, [&](int at) {
        context.target.elementwise->embed(op.table->weights(), context.inputs.tokens[at], op.scale, row(op.out, at));
    });
}

void Program::run(const NormOp &op, const Context &context, Worker &worker) {
    each_row(worker, context.inputs.rows, [&](int at) {
        context.target.elementwise->norm(row(op.x, at), op.weight.data(), width(op.x), op.eps, op.scale, op.adds,
                                         row(op.out, at));
    });
}

void Program::run(const ProductOp &op, const Context &context, Worker &worker) {
    Thread &own = threads_[worker.index];
    const LinearRows rows{row(op.x, 0), width(op.x), row(op.out, 0), width(op.out)};
    multiply(context.target, op.linear, rows, context.inputs.rows, worker, own.packed, own.sums);
}

void Program::run(const AttentionOp &op, const Context &context, Worker &worker) {
    const size_t half = static_cast<size_t>(op.rotary.half);
    const float *cosines = op.rope < 0 ? nullptr : cosines_[op.rope].floats(0);
    const float *sines = op.rope < 0 ? nullptr : sines_[op.rope].floats(0);
    each_row(worker, context.inputs.rows, [&](int at) {
        context.target.elementwise->rotate(op.rotary, row(op.qkv, at), cosines + at * half, sines + at * half);
    });
    worker.barrier();
    const int64_t stride = width(op.qkv);
    float *query = row(op.qkv, 0), *key = query + query_heads_ * head_dim_, *value = key + kv_heads_ * head_dim_;
    const Step &step = *context.inputs.step;
    step.write_kv(worker, op.layer, {key, stride}, {value, stride});
    worker.barrier();
    step.attend(worker, op.layer, query_heads_, {query, stride}, {row(op.out, 0), width(op.out)},
                {op.scale, op.softcap});
}

}  // namespace anaphora
