// Codes and scales of one token, the same bytes as storage/formats makes. Included once per target.
#pragma once
#include <cstdint>

namespace ANAPHORA_TARGET {

// x [dim] -> codes, then scales, as the format orders those of one token. False for NaN or infinity: then
// what codes and scales hold means nothing.
bool encode_int8(const float *x, int dim, uint8_t *codes, uint8_t *scales);
bool encode_fp8(const float *x, int dim, uint8_t *codes, uint8_t *scales);
bool encode_int4_keys(const float *x, int dim, uint8_t *codes, uint8_t *scales);
bool encode_int4_values(const float *x, int dim, uint8_t *codes, uint8_t *scales);

}  // namespace ANAPHORA_TARGET
