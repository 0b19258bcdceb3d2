#include "check.h"
#include "codec.h"

namespace offload {
namespace {

[[noreturn]] void refuse(const char* function, int device) {
    throw Error(
        detail::concat(function, ": expected a build with CUDA for device ", device,
                       ", got one without. Install nvcc and build again with OFFLOAD_CUDA=ON."));
}

}  // namespace

void encode_cuda(int device, Codec, const TensorLayout&, const void*, void*, StreamHandle,
                 std::optional<std::uint64_t>) {
    refuse("encode", device);
}

void decode_cuda(int device, Codec, const TensorLayout&, const void*, void*, StreamHandle) {
    refuse("decode", device);
}

}  // namespace offload
