/// Codecs that shrink a tensor while it is stored: two lossy ones with a scale for each block, and
/// lossless packing of bool. The bytes are the same whether host or card wrote them.
///
/// **fp8 and int8** take float32, float16 and bfloat16. With L the last dimension and R the
/// product of the others (a 0-dim tensor is one row of 1), the encoded bytes are
///
///     codes   uint8   [R, L]               row-major whatever the tensor's strides were
///     padding                              to the next multiple of 16 bytes
///     scales  float32 [R, ceil(L / 128)]   one for each 128 values of a row, or what is left
///
/// In each block, with `limit` 448 for fp8 and 127 for int8, all in float32:
///
///     amax   = largest magnitude of the finite values, clamped to [2^-100, FLT_MAX less one step]
///     scale  = amax / limit                                    stored
///     code   = round(x * (limit / amax))                       to nearest, ties to even
///     decode = code * scale, rounded to the dtype              to nearest, ties to even
///
/// - fp8: e4m3 with denormals. Inf becomes the largest code, 448. NaN stays NaN with its sign, zero
///   keeps its sign. A value below amax * 2^-19 becomes zero.
/// - int8: -127 to 127. Inf becomes 127 or -127; -128 stands for NaN, whose sign is lost, as is
///   that of zero.
/// - Blocks whose amax is below 2^-100 lose precision, so that no scale, factor or decoded value
///   is a denormal float32, and flushing those changes nothing. An Inf beside nothing but zeros
///   comes back as 2^-100.
/// - With a seed, rounding is stochastic: up with the probability of the fraction, so that the mean
///   is unbiased. The same seed, shape and values give the same bytes, on every device.
///
/// **bits** takes bool: ceil(N / 8) bytes for N elements in row-major order, the first in the
/// lowest bit; unused bits of the last byte are 0. Any byte but 0 counts as true.
///
/// A codec does not record its dtype: bytes made from float32 can be decoded into bfloat16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "device.h"

namespace offload {

enum class Codec { kFp8, kInt8, kBits };
enum class DType { kFloat32, kFloat16, kBFloat16, kBool };

constexpr int kMaxDims = 8;

/// How a tensor lies in memory; strides count elements and may be anything, also 0 or negative.
struct TensorLayout {
    int dims = 0;
    std::int64_t shape[kMaxDims] = {};
    std::int64_t stride[kMaxDims] = {};
    DType dtype = DType::kFloat32;
};

/// `fp8`, `int8` or `bits`. Throws `Error` for another name, naming `function`.
Codec codec_of(const char* function, const std::string& name);

/// `float32`, `float16`, `bfloat16` or `bool`. Throws `Error` for another name.
DType dtype_of(const char* function, const std::string& name);

/// Bytes that `encode_*` writes; strides do not matter. Throws `Error` where the codec does not
/// take the dtype, or dimensions are negative or more than `kMaxDims`.
std::size_t encoded_bytes(Codec codec, const TensorLayout& layout);

/// Encodes on the calling thread and, where a tensor is large, on helpers that end before the call
/// does. Blocks; takes no lock and may be called from any thread.
///
/// `source` is the element at index 0 in all dimensions. `encoded` holds `encoded_bytes`, aligned
/// to 16, and must not overlap the source. `threads` counts the caller; 0 means one per core, 16 at
/// most. Throws `Error` for what `encoded_bytes` refuses, a misaligned `encoded`, or a seed with
/// `kBits`.
void encode_host(Codec codec, const TensorLayout& layout, const void* source, void* encoded,
                 std::optional<std::uint64_t> seed = std::nullopt, int threads = 0);

/// The way back. Throws `Error` also where two elements of the destination may share memory.
void decode_host(Codec codec, const TensorLayout& layout, const void* encoded, void* destination,
                 int threads = 0);

/// The same on a card: one launch on `stream`, which it neither waits for nor synchronizes. All
/// memory must stay valid until the launch has run. Throws `Error` also in a build without CUDA.
void encode_cuda(int device, Codec codec, const TensorLayout& layout, const void* source,
                 void* encoded, StreamHandle stream,
                 std::optional<std::uint64_t> seed = std::nullopt);
void decode_cuda(int device, Codec codec, const TensorLayout& layout, const void* encoded,
                 void* destination, StreamHandle stream);

}  // namespace offload
