#include "codec.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "check.h"
#include "codec_layout.h"

namespace offload {
namespace {

constexpr std::array<const char*, 3> kCodecNames = {"fp8", "int8", "bits"};
constexpr std::array<const char*, 4> kDTypeNames = {"float32", "float16", "bfloat16", "bool"};

std::int64_t checked_elements(const char* function, const TensorLayout& layout) {
    std::int64_t elements = 1;
    bool overflow = false;
    for (int dim = 0; dim < layout.dims; ++dim) {
        const std::int64_t size = layout.shape[dim];
        OFFLOAD_CHECK(size >= 0, function, ": expected sizes of 0 or more, got ", size,
                      " in dimension ", dim, ". Pass the tensor's own shape.");
        // Sizes of 0 do not make a product that overflows before them valid.
        overflow = __builtin_mul_overflow(elements, std::max<std::int64_t>(size, 1), &elements) ||
                   overflow;
    }
    OFFLOAD_CHECK(!overflow && elements <= std::numeric_limits<std::int64_t>::max() / 8, function,
                  ": expected a size that 64 bits can count, got more. Pass the tensor's shape.");
    const bool empty =
        std::any_of(layout.shape, layout.shape + layout.dims, [](auto size) { return size == 0; });
    return empty ? 0 : elements;
}

void check_layout(const char* function, Codec codec, const TensorLayout& layout) {
    OFFLOAD_CHECK(layout.dims >= 0 && layout.dims <= kMaxDims, function, ": expected at most ",
                  kMaxDims, " dimensions, got ", layout.dims, ". Flatten some of them first.");
    const bool is_bool = layout.dtype == DType::kBool;
    OFFLOAD_CHECK((codec == Codec::kBits) == is_bool, function, ": expected ",
                  codec == Codec::kBits ? "bool" : "float32, float16 or bfloat16", " for codec ",
                  kCodecNames[static_cast<std::size_t>(codec)], ", got ",
                  kDTypeNames[static_cast<std::size_t>(layout.dtype)],
                  is_bool ? ". Use codec bits." : ". Use codec fp8 or int8.");
}

/// Appends a dimension inside those that `map` has, or merges it with the innermost of them.
void append_outer(codec::StridedMap& map, std::int64_t size, std::int64_t stride) {
    const int last = map.outer_dims - 1;
    if (size == 1) {
        return;
    }
    if (last >= 0 && map.stride[last] == stride * size) {
        map.shape[last] *= size;
        map.stride[last] = stride;
        return;
    }
    map.shape[map.outer_dims] = size;
    map.stride[map.outer_dims] = stride;
    ++map.outer_dims;
}

/// Rows that follow each other at the row's own step are one long row, where no block would then
/// cross from one row into the next.
void merge_rows(codec::StridedMap& map) {
    const int last = map.outer_dims - 1;
    if (last < 0 || map.stride[last] != map.step * map.row_length) {
        return;
    }
    map.row_length *= map.shape[last];
    map.rows /= map.shape[last];
    --map.outer_dims;
}

}  // namespace

namespace codec {

std::size_t scales_offset(const StridedMap& map) {
    const auto codes = static_cast<std::size_t>(map.elements());
    return (codes + kEncodedAlignment - 1) / kEncodedAlignment * kEncodedAlignment;
}

StridedMap source_map(const char* function, Codec codec, const TensorLayout& layout) {
    check_layout(function, codec, layout);
    StridedMap map;
    if (checked_elements(function, layout) == 0) {
        map.rows = 0;
        return map;
    }
    const int outer = std::max(layout.dims - 1, 0);
    if (layout.dims > 0) {
        map.row_length = layout.shape[outer];
        map.step = map.row_length == 1 ? 1 : layout.stride[outer];
    }
    for (int dim = 0; dim < outer; ++dim) {
        append_outer(map, layout.shape[dim], layout.stride[dim]);
        map.rows *= layout.shape[dim];
    }
    if (codec == Codec::kBits || map.row_length % kBlock == 0) {
        merge_rows(map);
    }
    map.blocks_per_row = (map.row_length + kBlock - 1) / kBlock;
    return map;
}

StridedMap destination_map(const char* function, Codec codec, const TensorLayout& layout) {
    const StridedMap map = source_map(function, codec, layout);
    std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // (step, size)
    for (int dim = 0; dim < layout.dims && map.rows > 0; ++dim) {
        if (layout.shape[dim] > 1) {
            const std::int64_t stride = layout.stride[dim];
            dims.emplace_back(stride < 0 ? -stride : stride, layout.shape[dim]);
        }
    }
    std::sort(dims.begin(), dims.end());
    std::int64_t span = 0;  // from the first to the last element of the dimensions so far
    for (const auto& [step, size] : dims) {
        OFFLOAD_CHECK(step > span, function,
                      ": expected a destination without overlap, got a stride of ", step,
                      " where the dimensions inside it span ", span + 1,
                      ". Decode into a new tensor and expand that.");
        span += step * (size - 1);
    }
    return map;
}

void check_encoded_address(const char* function, const void* encoded) {
    const auto address = reinterpret_cast<std::uintptr_t>(encoded);
    OFFLOAD_CHECK(address % kEncodedAlignment == 0, function,
                  ": expected an encoded buffer aligned to ", kEncodedAlignment,
                  " bytes, got address ", address, ". Start it at an allocation's start.");
}

void check_seed(const char* function, Codec codec, const std::optional<std::uint64_t>& seed) {
    OFFLOAD_CHECK(codec != Codec::kBits || !seed.has_value(), function,
                  ": expected no seed for codec bits, got ", seed.value_or(0),
                  ". It is lossless: leave the seed out.");
}

}  // namespace codec

Codec codec_of(const char* function, const std::string& name) {
    const auto found = std::find(kCodecNames.begin(), kCodecNames.end(), name);
    OFFLOAD_CHECK(found != kCodecNames.end(), function, ": expected codec fp8, int8 or bits, got '",
                  name, "'. Choose one of these.");
    return static_cast<Codec>(found - kCodecNames.begin());
}

DType dtype_of(const char* function, const std::string& name) {
    const auto found = std::find(kDTypeNames.begin(), kDTypeNames.end(), name);
    OFFLOAD_CHECK(found != kDTypeNames.end(), function,
                  ": expected dtype float32, float16, bfloat16 or bool, got '", name,
                  "'. Store such a tensor without a codec.");
    return static_cast<DType>(found - kDTypeNames.begin());
}

std::size_t encoded_bytes(Codec codec, const TensorLayout& layout) {
    const codec::StridedMap map = codec::source_map("encoded_bytes", codec, layout);
    if (codec == Codec::kBits) {
        return static_cast<std::size_t>((map.elements() + 7) / 8);
    }
    return codec::scales_offset(map) + static_cast<std::size_t>(map.blocks()) * sizeof(float);
}

}  // namespace offload
