#include <algorithm>

#include "check.h"
#include "codec.h"
#include "codec_lane.h"
#include "codec_layout.h"
#include "cuda_guard.h"

namespace offload {
namespace {

using namespace codec;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
constexpr int kResidentBlocks = 16;  // per multiprocessor: twice what fits, to even out the tail

__device__ std::int32_t largest_of_warp(std::int32_t value) {
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        value = larger(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

/// A warp takes a block of 128 values at a time.
template <typename Code, typename Type>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(const __grid_constant__ StridedMap map,
                  const typename Type::Word* __restrict__ source, std::uint8_t* __restrict__ codes,
                  float* __restrict__ scales, bool random, std::uint64_t seed) {
    const int lane = threadIdx.x % kLanes;
    const std::int64_t first =
        static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
    const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kWarps;
    const std::int64_t blocks = map.blocks();
    for (std::int64_t index = first; index < blocks; index += stride) {
        const Block block = block_at(map, index);
        const int begin = lane * kLaneValues;
        const int count = block.count(map) - begin;
        const auto words =
            load_lane(source + block.source(map) + begin * map.step, map.step, count);
        const BlockScale scale =
            scale_of<Code, Type>(largest_of_warp(largest_of_lane<Type>(words)));
        const auto lane_codes =
            random
                ? encode_lane<Code, Type, true>(words, lane, scale.inverse, random_key(seed, index))
                : encode_lane<Code, Type, false>(words, lane, scale.inverse, 0);
        store_lane(lane_codes, codes + block.codes(map) + begin, 1, count);
        if (lane == 0) {
            scales[index] = scale.scale;
        }
    }
}

template <typename Code, typename Type>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const __grid_constant__ StridedMap map, const std::uint8_t* __restrict__ codes,
                  const float* __restrict__ scales, typename Type::Word* __restrict__ destination) {
    const int lane = threadIdx.x % kLanes;
    const std::int64_t first =
        static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
    const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kWarps;
    const std::int64_t blocks = map.blocks();
    for (std::int64_t index = first; index < blocks; index += stride) {
        const Block block = block_at(map, index);
        const int begin = lane * kLaneValues;
        const int count = block.count(map) - begin;
        const auto lane_codes = load_lane(codes + block.codes(map) + begin, 1, count);
        const auto words = decode_lane<Code, Type>(lane_codes, scales[index]);
        store_lane(words, destination + block.source(map) + begin * map.step, map.step, count);
    }
}

/// A thread takes a byte of eight bits at a time.
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const __grid_constant__ StridedMap map, const std::uint8_t* __restrict__ source,
                std::uint8_t* __restrict__ bits, std::int64_t bytes) {
    const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
    for (std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
         index < bytes; index += stride) {
        bits[index] = pack_bits(load_bools(map, source, index));
    }
}

__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ StridedMap map, const std::uint8_t* __restrict__ bits,
                  std::uint8_t* __restrict__ destination, std::int64_t bytes) {
    const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
    for (std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
         index < bytes; index += stride) {
        store_bools(map, unpack_bits(bits[index]), destination, index);
    }
}

/// Thread blocks for `items` of which one takes `each` at a time.
int grid_for(int device, std::int64_t items, int each) {
    int processors = 0;
    OFFLOAD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    return static_cast<int>(std::min<std::int64_t>(
        (items + each - 1) / each, static_cast<std::int64_t>(processors) * kResidentBlocks));
}

/// Calls `visit` with the tags of the codec and of the element type.
template <typename Visit>
void with_types(Codec codec, DType dtype, const Visit& visit) {
    const auto with_code = [&](auto code) {
        switch (dtype) {
            case DType::kBFloat16:
                return visit(code, BFloat16{});
            case DType::kFloat16:
                return visit(code, Float16{});
            default:
                return visit(code, Float32{});
        }
    };
    codec == Codec::kFp8 ? with_code(Fp8{}) : with_code(Int8{});
}

}  // namespace

void encode_cuda(int device, Codec codec, const TensorLayout& layout, const void* source,
                 void* encoded, StreamHandle stream, std::optional<std::uint64_t> seed) {
    const StridedMap map = source_map("encode", codec, layout);
    check_encoded_address("encode", encoded);
    check_seed("encode", codec, seed);
    cuda_device(device);  // throws where there is none
    if (map.elements() == 0) {
        return;
    }
    CallGuard guard(device);
    auto* const codes = static_cast<std::uint8_t*>(encoded);
    if (codec == Codec::kBits) {
        const std::int64_t bytes = (map.elements() + 7) / 8;
        pack_kernel<<<grid_for(device, bytes, kThreads), kThreads, 0, to_cuda(stream)>>>(
            map, static_cast<const std::uint8_t*>(source), codes, bytes);
    } else {
        auto* const scales = reinterpret_cast<float*>(codes + scales_offset(map));
        const int grid = grid_for(device, map.blocks(), kWarps);
        with_types(codec, layout.dtype, [&](auto code, auto type) {
            using Word = typename decltype(type)::Word;
            encode_kernel<decltype(code), decltype(type)><<<grid, kThreads, 0, to_cuda(stream)>>>(
                map, static_cast<const Word*>(source), codes, scales, seed.has_value(),
                seed.value_or(0));
        });
    }
    OFFLOAD_CUDA_CHECK(cudaGetLastError());
}

void decode_cuda(int device, Codec codec, const TensorLayout& layout, const void* encoded,
                 void* destination, StreamHandle stream) {
    const StridedMap map = destination_map("decode", codec, layout);
    check_encoded_address("decode", encoded);
    cuda_device(device);  // throws where there is none
    if (map.elements() == 0) {
        return;
    }
    CallGuard guard(device);
    const auto* const codes = static_cast<const std::uint8_t*>(encoded);
    if (codec == Codec::kBits) {
        const std::int64_t bytes = (map.elements() + 7) / 8;
        unpack_kernel<<<grid_for(device, bytes, kThreads), kThreads, 0, to_cuda(stream)>>>(
            map, codes, static_cast<std::uint8_t*>(destination), bytes);
    } else {
        const auto* const scales = reinterpret_cast<const float*>(codes + scales_offset(map));
        const int grid = grid_for(device, map.blocks(), kWarps);
        with_types(codec, layout.dtype, [&](auto code, auto type) {
            using Word = typename decltype(type)::Word;
            decode_kernel<decltype(code), decltype(type)><<<grid, kThreads, 0, to_cuda(stream)>>>(
                map, codes, scales, static_cast<Word*>(destination));
        });
    }
    OFFLOAD_CUDA_CHECK(cudaGetLastError());
}

}  // namespace offload
