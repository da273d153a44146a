#include "targets.h"

#include <atomic>
#include <cstdlib>

#define DECLARE(name)                                              \
    namespace name {                                               \
    extern const anaphora::LinearKernels linear_kernels;           \
    extern const anaphora::ElementwiseKernels elementwise_kernels; \
    extern const anaphora::AttentionKernels attention_kernels;     \
    extern const int lanes;                                        \
    }
ANAPHORA_EACH_TARGET(DECLARE)

namespace anaphora {
namespace {

bool runs_baseline() { return true; }
#if defined(__x86_64__)
bool runs_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool runs_avx512() {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
[[maybe_unused]] bool runs_wide() { return runs_avx2(); }
#endif

const Target &table(int index) {
#define ROW(name)                                                                                              \
    {#name, ::name::lanes, runs_##name, &::name::linear_kernels, &::name::elementwise_kernels,                 \
     &::name::attention_kernels},
    static const Target all[] = {ANAPHORA_EACH_TARGET(ROW)};
    return all[index];
}

#define ONE(name) +1
constexpr int kCount = ANAPHORA_EACH_TARGET(ONE);

const Target *named(const std::string &name) {
    for (const Target *target : targets())
        if (name == target->name) return target;
    return nullptr;
}

const Target *initial() {
    const char *wish = std::getenv("ANAPHORA_TARGET");
    const Target *wished = wish ? named(wish) : nullptr;
    return wished ? wished : targets().back();
}

std::atomic<const Target *> &chosen() {
    static std::atomic<const Target *> target{initial()};
    return target;
}

}  // namespace

std::vector<const Target *> targets() {
    std::vector<const Target *> here;
    for (int i = 0; i < kCount; ++i)
        if (table(i).runs_here()) here.push_back(&table(i));
    return here;
}

const Target &target() { return *chosen().load(std::memory_order_relaxed); }

bool set_target(const std::string &name) {
    const Target *wished = named(name);
    if (wished) chosen().store(wished, std::memory_order_relaxed);
    return wished != nullptr;
}

}  // namespace anaphora
