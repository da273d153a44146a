// Attention for Python. Everything that Python gives is checked here; what is beneath trusts it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "attention.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace anaphora {
namespace {

template <typename T, int Dimensions>
using In = nb::ndarray<const T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
using Rows3 = nb::ndarray<nb::ro, float, nb::ndim<3>, nb::device::cpu>;
using Out3 = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;
using Layer = std::tuple<int, int64_t, int64_t, int64_t, std::string, std::string>;
using KeyTurn = std::tuple<In<float, 2>, In<float, 3>, In<float, 3>>;
using ValueTurn = std::tuple<In<float, 1>, In<float, 2>>;
using LayerTurns = std::tuple<std::optional<KeyTurn>, std::optional<ValueTurn>>;

void check(bool fine, const std::string &message) {
    if (!fine) throw nb::value_error(message.c_str());
}

Format format(const std::string &name, bool keys) {
    const std::pair<const char *, Format> known[] = {
        {"fp32", Format::fp32}, {"bf16", Format::bf16}, {"fp16", Format::fp16},
        {"int8", Format::int8}, {"fp8_e4m3", Format::fp8},
        keys ? std::pair{"int4_keys", Format::int4_keys} : std::pair{"int4_values", Format::int4_values}};
    for (const auto &[word, value] : known)
        if (name == word) return value;
    throw nb::value_error(("no native kernels for keys or values stored as " + name).c_str());
}

// PagedStorage as the kernels see it; keeps its memory alive.
struct KVStorage {
    nb::object data;
    std::shared_ptr<Storage> storage;
};

int64_t token_bytes(Format format, int dim) {
    check(scale_bytes(format, dim) == 0 || dim % 16 == 0, "formats with scales need dims that are multiples of 16");
    return code_bytes(format, dim) + scale_bytes(format, dim);
}

template <typename Array>
std::vector<float> floats(const Array &from, std::initializer_list<int64_t> shape, const std::string &what) {
    size_t i = 0;
    for (int64_t size : shape) check(static_cast<int64_t>(from.shape(i++)) == size, what + " has another shape");
    return std::vector<float>(from.data(), from.data() + from.size());
}

Turns turns(const LayerTurns &given, int heads, int key_dim, int value_dim) {
    const auto &[of_keys, of_values] = given;
    Turns turns;
    if (of_keys) {
        const auto &[mean, keys, queries] = *of_keys;
        check(key_dim % 16 == 0, "keys are turned where key_dim is a multiple of 16");
        turns.key_mean = floats(mean, {heads, key_dim}, "the mean of keys");
        turns.keys = floats(keys, {heads, key_dim, key_dim}, "the turn of keys");
        turns.queries = floats(queries, {heads, key_dim, key_dim}, "the turn of queries");
    }
    if (of_values) {
        const auto &[rms, spread] = *of_values;
        check(value_dim % 16 == 0, "values are turned where value_dim is a multiple of 16");
        turns.value_rms = floats(rms, {heads}, "the rms of values");
        turns.spread = floats(spread, {value_dim, value_dim}, "the turn of values");
        turns.gather.resize(turns.spread.size());
        for (int i = 0; i < value_dim; ++i)
            for (int j = 0; j < value_dim; ++j) turns.gather[j * value_dim + i] = turns.spread[i * value_dim + j];
    }
    return turns;
}

KVStorage make_storage(nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> data, int block_size,
                       int kv_heads, int key_dim, int value_dim, const std::vector<Layer> &layers,
                       const std::vector<LayerTurns> &given) {
    check(block_size >= 16 && kPartition % block_size == 0, "block_size must be 16, 32, 64, 128 or 256");
    check(kv_heads > 0 && key_dim > 0 && value_dim > 0 && key_dim <= kMostDims && value_dim <= kMostDims,
          "kv_heads must be positive, key_dim and value_dim between 1 and 1024");
    check(given.empty() || given.size() == layers.size(), "turns are given of every layer, or of none");
    auto storage = std::make_shared<Storage>();
    *storage = {data.data(), static_cast<int64_t>(data.shape(0)), static_cast<int64_t>(data.shape(1)), block_size,
                kv_heads, key_dim, value_dim, {}, nullptr};
    for (const auto &[group, offset, key_bytes, value_bytes, key, value] : layers) {
        const LayerKV layer{group, offset, key_bytes, value_bytes, format(key, true), format(value, false)};
        check(group >= 0 && offset >= 0 && key_bytes >= token_bytes(layer.key, key_dim) * block_size &&
                  value_bytes >= token_bytes(layer.value, value_dim) * block_size &&
                  offset + kv_heads * (key_bytes + value_bytes) <= storage->block_bytes,
              "a layer's pieces do not fit a block");
        storage->layers.push_back(layer);
        const size_t number = storage->layers.size() - 1;
        if (!given.empty()) storage->layers.back().turns = turns(given[number], kv_heads, key_dim, value_dim);
    }
    return {nb::cast(data), storage};
}

Strategy strategy(const std::string &name) {
    if (name == "chosen") return Strategy::chosen;
    if (name == "by_partition") return Strategy::by_partition;
    if (name == "by_query") return Strategy::by_query;
    throw nb::value_error(("no strategy " + name).c_str());
}

template <typename T>
std::vector<T> copied(const In<T, 1> &from) {
    return std::vector<T>(from.data(), from.data() + from.size());
}

std::shared_ptr<Step> make_step(const KVStorage &kv, const In<int32_t, 1> &starts, const In<int32_t, 1> &counts,
                                const In<int32_t, 1> &blocks, const In<int64_t, 1> &offsets,
                                const std::vector<int> &windows, const std::string &name) {
    for (int window : windows) check(window >= 0, "a window is positive, or 0 for none");
    return std::make_shared<Step>(
        kv.storage, Rows{copied(starts), copied(counts), copied(blocks), copied(offsets), windows}, strategy(name));
}

// [T][heads][dim] with a token's heads side by side.
template <typename Array>
Heads heads(const Step &step, const Array &array, int64_t count, int64_t dim, const std::string &what) {
    check(static_cast<int64_t>(array.shape(0)) == step.tokens() && static_cast<int64_t>(array.shape(1)) == count &&
              static_cast<int64_t>(array.shape(2)) == dim,
          what + " must be [" + std::to_string(step.tokens()) + ", " + std::to_string(count) + ", " +
              std::to_string(dim) + "]");
    check((dim == 1 || array.stride(2) == 1) && (count == 1 || array.stride(1) == dim),
          what + ": the heads of a token must lie side by side");
    return {const_cast<float *>(static_cast<const float *>(array.data())), array.stride(0)};
}

void check_layer(const Step &step, int layer) {
    check(layer >= 0 && layer < static_cast<int>(step.storage().layers.size()), "no layer " + std::to_string(layer));
}

void write_kv(Step &step, int layer, const Rows3 &key, const Rows3 &value) {
    check_layer(step, layer);
    const Storage &storage = step.storage();
    const Heads keys = heads(step, key, storage.kv_heads, storage.key_dim, "key");
    const Heads values = heads(step, value, storage.kv_heads, storage.value_dim, "value");
    nb::gil_scoped_release release;
    const std::shared_ptr<Pool> threads = pool();
    step.reserve(threads->size());
    threads->run([&](Worker &worker) { step.write_kv(worker, layer, keys, values); });
}

void attend(Step &step, int layer, const Rows3 &query, const Out3 &out, float scale, float softcap,
            const std::optional<In<float, 1>> &alibi, const std::optional<In<float, 1>> &sinks) {
    check_layer(step, layer);
    const auto query_heads = static_cast<int64_t>(query.shape(1));
    check(!alibi || static_cast<int64_t>(alibi->size()) == query_heads, "alibi_slopes must be [query_heads]");
    check(!sinks || static_cast<int64_t>(sinks->size()) == query_heads, "sinks must be [query_heads]");
    check(softcap >= 0, "softcap is positive, or 0 for none");
    const Heads from = heads(step, query, query_heads, step.storage().key_dim, "query");
    const Heads to = heads(step, out, query_heads, step.storage().value_dim, "out");
    const Scoring scoring{scale, softcap, alibi ? alibi->data() : nullptr, sinks ? sinks->data() : nullptr};
    nb::gil_scoped_release release;
    const std::shared_ptr<Pool> threads = pool();
    step.prepare(static_cast<int>(query_heads), threads->size());
    threads->run([&](Worker &worker) {
        step.attend(worker, layer, static_cast<int>(query_heads), from, to, scoring);
    });
}

std::optional<std::pair<int, std::string>> not_finite(const Step &step) {
    const char *what;
    const int layer = step.not_finite(what);
    if (layer < 0) return {};
    return std::pair{layer, std::string(what)};
}

int64_t tokens_read(Step &step, int group, int query_heads) {
    check(group >= 0 && group < static_cast<int>(step.rows().window.size()), "no group " + std::to_string(group));
    step.prepare(query_heads, pool()->size());
    return step.tokens_read(group);
}

}  // namespace

void bind_attention(nb::module_ &m) {
    nb::class_<KVStorage>(m, "KVStorage")
        .def(nb::new_(&make_storage), "data"_a, "block_size"_a, "kv_heads"_a, "key_dim"_a, "value_dim"_a, "layers"_a,
             "turns"_a = std::vector<LayerTurns>{});
    nb::class_<Step>(m, "Step")
        .def(nb::new_(&make_step), "storage"_a, "starts"_a, "counts"_a, "blocks"_a, "offsets"_a, "windows"_a,
             "strategy"_a = "chosen", nb::keep_alive<0, 1>())
        .def("write_kv", write_kv, "layer"_a, "key"_a, "value"_a)
        .def("attend", attend, "layer"_a, "query"_a, "out"_a, "scale"_a, "softcap"_a = 0.0f,
             "alibi_slopes"_a = nb::none(), "sinks"_a = nb::none())
        .def_prop_ro("not_finite", not_finite)
        .def("tokens_read", tokens_read, "group"_a, "query_heads"_a);
}

}  // namespace anaphora
