// Encodes new keys and values into their blocks.
#include "kv_formats.h"

namespace ANAPHORA_TARGET {
namespace {

using anaphora::NewTokens;

template <typename Reader>
void write_keys_as(const NewTokens &tokens) {
    const int units = padded<Reader>(tokens.dim) / Reader::unit;
    for (int u = 0; u < units; ++u) {
        uint8_t *to = tokens.piece + (static_cast<int64_t>(u) * tokens.block_size + tokens.first) * Reader::unit_bytes;
        const float *from = tokens.from + u * Reader::unit;
        for (int t = 0; t < tokens.tokens; ++t, to += Reader::unit_bytes, from += tokens.row_stride)
            for (int e = 0; e < Reader::unit; ++e)
                Reader::encode(u * Reader::unit + e < tokens.dim ? from[e] : 0.0f, to, e);
    }
}

template <typename Reader>
void write_values_as(const NewTokens &tokens) {
    const int units = padded<Reader>(tokens.dim) / Reader::unit;
    uint8_t *to = tokens.piece + static_cast<int64_t>(tokens.first) * units * Reader::unit_bytes;
    const float *from = tokens.from;
    for (int t = 0; t < tokens.tokens; ++t, from += tokens.row_stride)
        for (int u = 0; u < units; ++u, to += Reader::unit_bytes)
            for (int e = 0; e < Reader::unit; ++e) {
                const int d = u * Reader::unit + e;
                Reader::encode(d < tokens.dim ? from[d] : 0.0f, to, e);
            }
}

}  // namespace

void write_keys(const NewTokens &tokens) {
    with_reader(tokens.format, [&](auto reader) { write_keys_as<decltype(reader)>(tokens); });
}

void write_values(const NewTokens &tokens) {
    with_reader(tokens.format, [&](auto reader) { write_values_as<decltype(reader)>(tokens); });
}

}  // namespace ANAPHORA_TARGET
