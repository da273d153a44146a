#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "elementwise.h"
#include "pool.h"
#include "targets.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace anaphora {
void bind_attention(nb::module_ &m);
void bind_program(nb::module_ &m);
}

namespace {

using Memory = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void read_all(const Memory &memory) {
    nb::gil_scoped_release release;
    constexpr int64_t kPiece = 64 << 10;
    const auto bytes = static_cast<int64_t>(memory.size());
    std::atomic<uint32_t> seen{0};
    anaphora::pool()->run([&](anaphora::Worker &worker) {
        for (int piece; (piece = worker.claim(static_cast<int>(bytes / kPiece))) >= 0;)
            seen |= anaphora::target().elementwise->read(memory.data() + piece * kPiece, kPiece);
    });
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native kernels; see _native.pyi.";
    m.def("targets", [] {
        std::vector<std::string> names;
        for (const anaphora::Target *target : anaphora::targets()) names.emplace_back(target->name);
        return names;
    });
    m.def("target", [] { return std::string(anaphora::target().name); });
    m.def("lanes", [] { return anaphora::target().lanes; });
    m.def("set_target", [](const std::string &name) {
        if (!anaphora::set_target(name)) throw nb::value_error(("no target of this processor: " + name).c_str());
    }, "name"_a);
    m.def("threads", [] { return anaphora::pool()->size(); });
    m.def("set_threads", [](int threads) {
        if (threads < 1) throw nb::value_error("at least one thread");
        anaphora::set_threads(threads);
    }, "threads"_a);
    anaphora::bind_attention(m);
    m.def("read", read_all, "memory"_a);
    anaphora::bind_program(m);
}
