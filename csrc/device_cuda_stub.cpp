#include "check.h"
#include "device.h"

namespace offload {

Device& cuda_device(int index) {
    throw Error(
        detail::concat("cuda_device: expected a build with CUDA for device ", index,
                       ", got one without. Install nvcc and build again with OFFLOAD_CUDA=ON."));
}

bool built_with_cuda() { return false; }

}  // namespace offload
