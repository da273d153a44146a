// The weights of a linear layer in the order in which the kernels read them (see Weights).
#pragma once
#include <memory>
#include <vector>

#include "linear.h"
#include "scratch.h"

namespace anaphora {

class Packed {
  public:
    // weight [outputs, inputs], rows one after the other, in `type`; bias [outputs] or null. Gated: the first half of
    // the outputs is the gate of the second.
    Packed(const void *weight, WeightType type, int64_t outputs, int64_t inputs, bool gated, const float *bias);

    const Weights &weights() const { return weights_; }
    size_t bytes() const { return static_cast<size_t>(weights_.panel_count * weights_.panel_bytes()); }

  private:
    Weights weights_;
    std::shared_ptr<std::byte[]> memory_;
    std::vector<float> bias_;
};

}  // namespace anaphora
