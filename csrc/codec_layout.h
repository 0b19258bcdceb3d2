/// What host and card check and compute alike before they encode or decode.
#pragma once

#include <cstdint>

#include "codec.h"
#include "codec_index.h"

namespace offload::codec {

/// Where codes and scales lie in the encoded bytes.
template <typename Byte, typename Scale>
struct EncodedParts {
    Byte* codes;
    Scale* scales;
};

constexpr std::size_t kEncodedAlignment = 16;

/// Bytes from the codes' start to the scales'.
std::size_t scales_offset(const StridedMap& map);

/// Throws `Error` for anything that the codec cannot take, else how the tensor is walked.
StridedMap source_map(const char* function, Codec codec, const TensorLayout& layout);

/// The same for a tensor that is written: it may not overlap itself.
StridedMap destination_map(const char* function, Codec codec, const TensorLayout& layout);

void check_encoded_address(const char* function, const void* encoded);
void check_seed(const char* function, Codec codec, const std::optional<std::uint64_t>& seed);

}  // namespace offload::codec
