#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "pool.h"
#include "targets.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace anaphora {
void bind_program(nb::module_ &m);
}

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
    anaphora::bind_program(m);
}
