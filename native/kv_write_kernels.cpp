// Encodes new keys and values into their blocks.
#include "kv_encode.h"
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

using Encode = bool(const float *, int, uint8_t *, uint8_t *);

// Null for formats without scales.
Encode *encoder(anaphora::Format format) {
    switch (format) {
        case anaphora::Format::int8: return encode_int8;
        case anaphora::Format::fp8: return encode_fp8;
        case anaphora::Format::int4_keys: return encode_int4_keys;
        case anaphora::Format::int4_values: return encode_int4_values;
        default: return nullptr;
    }
}

bool write_scaled_keys(const NewTokens &tokens, Encode *encode) {
    const int units = code_bytes(tokens.format, tokens.dim), groups = scale_bytes(tokens.format, tokens.dim) / 2;
    uint8_t codes[anaphora::kMostDims], scales[anaphora::kMostDims];
    bool fine = true;
    for (int t = 0; t < tokens.tokens; ++t) {
        fine &= encode(tokens.from + t * tokens.row_stride, tokens.dim, codes, scales);
        uint8_t *to = tokens.piece + tokens.first + t;
        for (int u = 0; u < units; ++u, to += tokens.block_size) *to = codes[u];
        to += tokens.first + t;  // two bytes per token from here on
        for (int g = 0; g < groups; ++g, to += 2 * tokens.block_size) std::memcpy(to, scales + 2 * g, 2);
    }
    return fine;
}

bool write_scaled_values(const NewTokens &tokens, Encode *encode) {
    const int code = code_bytes(tokens.format, tokens.dim), scale = scale_bytes(tokens.format, tokens.dim);
    uint8_t *const scales = tokens.piece + static_cast<int64_t>(tokens.block_size) * code;
    bool fine = true;
    for (int t = 0, at = tokens.first; t < tokens.tokens; ++t, ++at)
        fine &= encode(tokens.from + t * tokens.row_stride, tokens.dim, tokens.piece + at * code, scales + at * scale);
    return fine;
}

}  // namespace

bool write_keys(const NewTokens &tokens) {
    if (Encode *encode = encoder(tokens.format)) return write_scaled_keys(tokens, encode);
    with_key_reader(tokens.format, [&](auto reader) {
        if constexpr (!kScaled<decltype(reader)>) write_keys_as<decltype(reader)>(tokens);
    });
    return true;
}

bool write_values(const NewTokens &tokens) {
    if (Encode *encode = encoder(tokens.format)) return write_scaled_values(tokens, encode);
    with_value_reader(tokens.format, [&](auto reader) {
        if constexpr (!kScaled<decltype(reader)>) write_values_as<decltype(reader)>(tokens);
    });
    return true;
}

}  // namespace ANAPHORA_TARGET
