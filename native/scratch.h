// Memory that kernels read and write: aligned to cache lines, large pieces to (and on) huge pages.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace anaphora {

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};
using Bytes = std::unique_ptr<std::byte[], Free>;

// Uninitialised. Throws std::bad_alloc.
inline Bytes allocate(size_t bytes) {
    constexpr size_t kHuge = size_t{2} << 20;
    const size_t alignment = bytes >= kHuge ? kHuge : 64;
    const size_t whole = (bytes + alignment - 1) / alignment * alignment;
    void *memory = std::aligned_alloc(alignment, whole ? whole : alignment);
    if (!memory) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (alignment == kHuge) madvise(memory, whole, MADV_HUGEPAGE);
#endif
    return Bytes(static_cast<std::byte *>(memory));
}

// Grows, never shrinks; growing forgets the content.
class Scratch {
  public:
    float *floats(size_t count) {
        if (count > count_) {
            memory_ = allocate(count * sizeof(float));
            count_ = count;
        }
        return reinterpret_cast<float *>(memory_.get());
    }

  private:
    Bytes memory_;
    size_t count_ = 0;
};

}  // namespace anaphora
