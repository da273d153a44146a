// The processors that the kernels are compiled for, and the choice among them at run time.
#pragma once
#include <string>
#include <vector>

// In order of preference, the best last.
#if defined(__x86_64__)
#if defined(ANAPHORA_TEST_TARGETS)
#define ANAPHORA_EACH_TARGET(X) X(baseline) X(wide) X(avx2) X(avx512)
#else
#define ANAPHORA_EACH_TARGET(X) X(baseline) X(avx2) X(avx512)
#endif
#else
#define ANAPHORA_EACH_TARGET(X) X(baseline)
#endif

namespace anaphora {

struct LinearKernels;
struct ElementwiseKernels;
struct AttentionKernels;

struct Target {
    const char *name;
    int lanes;
    bool (*runs_here)();
    const LinearKernels *linear;
    const ElementwiseKernels *elementwise;
    const AttentionKernels *attention;
};

// Those that this processor can run, the best last.
std::vector<const Target *> targets();

// The best, or the one of the environment variable ANAPHORA_TARGET, or what set_target() chose.
const Target &target();

// False, with nothing changed, when no target of that name runs here.
bool set_target(const std::string &name);

}  // namespace anaphora
