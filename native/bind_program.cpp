// Weights and Program for Python. Everything that Python gives is checked here; what is beneath trusts it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attention.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace anaphora {
namespace {

template <typename T, int Dimensions>
using In = nb::ndarray<const T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
using AnyMatrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = In<float, 1>;
using OptionalVector = std::optional<Vector>;

[[noreturn]] void refuse(const std::string &message) { throw nb::value_error(message.c_str()); }

void check(bool fine, const std::string &message) {
    if (!fine) refuse(message);
}

Floats floats(const OptionalVector &from, int64_t width, const char *what) {
    if (!from) return {};
    check(static_cast<int64_t>(from->size()) == width,
          std::string(what) + " has " + std::to_string(from->size()) + " values, not " + std::to_string(width));
    return Floats(from->data(), from->data() + from->size());
}

std::shared_ptr<Packed> pack(const AnyMatrix &weight, const OptionalVector &bias, bool gated) {
    const bool half = weight.dtype().bits == 16 && weight.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat);
    check(half || weight.dtype() == nb::dtype<float>(), "weights are bfloat16 or float32");
    const auto outputs = static_cast<int64_t>(weight.shape(0)), inputs = static_cast<int64_t>(weight.shape(1));
    check(outputs > 0 && inputs > 0, "weights must not be empty");
    check(!gated || outputs % 2 == 0, "gated weights have two halves of one size");
    check(outputs < (int64_t{1} << 31) && inputs < (int64_t{1} << 24), "weights are too large");
    const Floats given = floats(bias, outputs, "the bias");
    nb::gil_scoped_release release;
    return std::make_shared<Packed>(weight.data(), half ? WeightType::bfloat16 : WeightType::float32, outputs, inputs,
                                    gated, bias ? given.data() : nullptr);
}

Activation activation(const std::optional<std::string> &name) {
    static const std::pair<const char *, Activation> known[] = {{"silu", Activation::silu},
                                                                {"gelu", Activation::gelu},
                                                                {"gelu_tanh", Activation::gelu_tanh},
                                                                {"relu", Activation::relu}};
    if (!name) return Activation::none;
    for (const auto &[word, value] : known)
        if (*name == word) return value;
    refuse("no activation " + *name);
}

void check_buffer(const Program &program, Buffer buffer, int64_t width, const char *what) {
    check(program.has(buffer), std::string(what) + ": no such buffer");
    check(program.width(buffer) == width, std::string(what) + " is a buffer of width " +
                                              std::to_string(program.width(buffer)) + ", not " + std::to_string(width));
}

ProductOp product(const Program &program, Buffer out, Buffer x, std::shared_ptr<Packed> weights,
                  const OptionalVector &norm, float norm_eps, float scale) {
    check_buffer(program, x, weights->weights().inputs, "x");
    ProductOp op{out, x, weights, floats(norm, weights->weights().inputs, "the norm"), {}};
    if (norm) op.linear.norm = op.norm.data();  // the vector's memory stays where it is when the op is moved
    op.linear.norm_eps = norm_eps;
    op.linear.scale = scale;
    return op;
}

void linear(Program &program, Buffer out, Buffer x, std::shared_ptr<Packed> weights, const OptionalVector &norm,
            float norm_eps, float scale, const std::optional<std::string> &name, bool add) {
    check_buffer(program, out, weights->weights().outputs, "out");
    check(out != x, "out and x must be two buffers");
    ProductOp op = product(program, out, x, weights, norm, norm_eps, scale);
    op.linear.activation = activation(name);
    op.linear.adds = add;
    program.add(std::move(op));
}

void logits(Program &program, Buffer x, std::shared_ptr<Packed> weights, const OptionalVector &norm, float norm_eps,
            float scale, std::optional<float> softcap) {
    check(!weights->weights().gated, "the weights of logits are not gated");
    ProductOp op = product(program, -1, x, weights, norm, norm_eps, scale);
    op.linear.softcap = softcap.value_or(0);
    program.set_logits(std::move(op));
}

void norm(Program &program, Buffer out, Buffer x, const Vector &weight, float eps, float scale, bool add) {
    check(program.has(x), "x: no such buffer");
    check_buffer(program, out, program.width(x), "out");
    program.add(NormOp{out, x, floats(weight, program.width(x), "the norm"), eps, scale, add});
}

void embed(Program &program, Buffer out, std::shared_ptr<Packed> table, float scale) {
    check(!table->weights().gated, "an embedding is not gated");
    check_buffer(program, out, table->weights().inputs, "out");
    program.add(EmbedOp{out, table, scale});
}

int rope(Program &program, const Vector &inverse_frequencies, float magnitude) {
    check(inverse_frequencies.size() > 0 && static_cast<int64_t>(inverse_frequencies.size()) * 2 <= program.head_dim(),
          "a rope turns at least two and at most head_dim elements");
    return program.rope({floats(inverse_frequencies, inverse_frequencies.size(), ""), magnitude});
}

void attention(Program &program, Buffer out, Buffer qkv, int layer, std::optional<int> rope, float scale,
               std::optional<float> softcap, const std::optional<In<float, 2>> &norm, const std::string &norm_over,
               float norm_eps) {
    const int queries = program.query_heads(), keys = program.kv_heads(), dim = program.head_dim();
    check_buffer(program, qkv, (queries + 2 * keys) * dim, "qkv");
    check_buffer(program, out, queries * dim, "out");
    check(!rope || (*rope >= 0 && *rope < program.ropes()), "no such rope");
    check(layer >= 0, "no such layer");
    check(norm_over == "head" || norm_over == "projection", "norm_over is head or projection");
    AttentionOp op{out, qkv, layer, rope.value_or(-1), {}, {queries, keys, dim}, scale, softcap.value_or(0)};
    if (norm) {
        check(static_cast<int>(norm->shape(0)) == queries + keys && static_cast<int>(norm->shape(1)) == dim,
              "the norm is [query_heads + kv_heads, head_dim]");
        op.norm.assign(norm->data(), norm->data() + norm->size());
        op.rotary.norm = norm_over == "head" ? QkNorm::head : QkNorm::projection;
        op.rotary.norm_weight = op.norm.data();
        op.rotary.norm_eps = norm_eps;
    }
    program.add(std::move(op));
}

void check_step(const Program &program, const Step *step, int64_t rows) {
    check(step != nullptr, "this program attends: it needs a step");
    const Storage &storage = step->storage();
    check(step->tokens() == rows, "the step has another number of tokens");
    check(storage.kv_heads == program.kv_heads() && storage.key_dim == program.head_dim() &&
              storage.value_dim == program.head_dim(),
          "the step's storage has other heads than the program");
    check(static_cast<int64_t>(storage.layers.size()) >= program.attention_layers(), "the step's storage has too few layers");
}

void run(Program &program, std::shared_ptr<Step> step, const In<int64_t, 1> &token_ids, const In<int64_t, 1> &positions,
         const In<int32_t, 1> &wanted, const nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> &logits,
         const std::optional<nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>> &best) {
    const auto rows = static_cast<int64_t>(token_ids.size());
    check(rows < (int64_t{1} << 24), "too many tokens in one step");
    check(static_cast<int64_t>(positions.size()) == rows, "one position per token");
    check(logits.shape(0) == wanted.size(), "one row of logits per wanted row");
    check(!best || best->size() == wanted.size(), "one best token per wanted row");
    check(static_cast<int64_t>(logits.shape(1)) == program.vocabulary(), "a row of logits has one value per token of the vocabulary");
    for (int64_t i = 0; i < rows; ++i)
        check(token_ids.data()[i] >= 0 && token_ids.data()[i] < program.embeddings(), "a token id outside of the embedding");
    for (size_t i = 0; i < wanted.size(); ++i)
        check(wanted.data()[i] >= 0 && wanted.data()[i] < rows, "a wanted row outside of the step");
    if (program.attention_layers() > 0) check_step(program, step.get(), rows);
    nb::gil_scoped_release release;
    program.run({step.get(), static_cast<int>(rows), token_ids.data(), positions.data(),
                 static_cast<int>(wanted.size()), wanted.data(), logits.data(),
                 best ? best->data() : nullptr});
}

nb::object values(Program &program, Buffer buffer) {
    check(program.has(buffer), "no such buffer");
    int rows;
    const float *from = program.values(buffer, rows);
    const size_t width = static_cast<size_t>(program.width(buffer)), count = width * rows;
    float *copy = new float[count];
    std::copy(from, from + count, copy);
    nb::capsule owner(copy, [](void *memory) noexcept { delete[] static_cast<float *>(memory); });
    return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(copy, {static_cast<size_t>(rows), width}, owner));
}

}  // namespace

void bind_program(nb::module_ &m) {
    nb::class_<Packed>(m, "Weights")
        .def(nb::new_(&pack), "weight"_a, "bias"_a = nb::none(), nb::kw_only(), "gated"_a = false)
        .def_prop_ro("inputs", [](const Packed &packed) { return packed.weights().inputs; })
        .def_prop_ro("outputs", [](const Packed &packed) { return packed.weights().outputs; })
        .def_prop_ro("nbytes", &Packed::bytes);
    nb::class_<Program>(m, "Program")
        .def(nb::init<int, int, int>(), "query_heads"_a = 0, "kv_heads"_a = 0, "head_dim"_a = 0)
        .def("buffer", [](Program &program, int64_t width) {
            check(width > 0, "a buffer has a width");
            return program.buffer(width);
        }, "width"_a)
        .def("rope", rope, "inverse_frequencies"_a, "magnitude"_a = 1.0f)
        .def("embed", embed, "out"_a, "table"_a, "scale"_a = 1.0f)
        .def("norm", norm, "out"_a, "x"_a, "weight"_a, "eps"_a, nb::kw_only(), "scale"_a = 1.0f, "add"_a = false)
        .def("linear", linear, "out"_a, "x"_a, "weights"_a, nb::kw_only(), "norm"_a = nb::none(), "norm_eps"_a = 0.0f,
             "scale"_a = 1.0f, "activation"_a = nb::none(), "add"_a = false)
        .def("attention", attention, "out"_a, "qkv"_a, "layer"_a, nb::kw_only(), "rope"_a = nb::none(), "scale"_a,
             "softcap"_a = nb::none(), "norm"_a = nb::none(), "norm_over"_a = "head", "norm_eps"_a = 0.0f)
        .def("logits", logits, "x"_a, "weights"_a, nb::kw_only(), "norm"_a = nb::none(), "norm_eps"_a = 0.0f,
             "scale"_a = 1.0f, "softcap"_a = nb::none())
        .def("run", run, "step"_a.none(), "token_ids"_a, "positions"_a, "wanted"_a, "logits"_a,
             "best"_a = nb::none())
        .def("values", values, "buffer"_a);
}

}  // namespace anaphora
