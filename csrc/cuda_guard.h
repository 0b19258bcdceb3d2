/// What every call into the CUDA runtime is wrapped in.
#pragma once

#include <cuda_runtime_api.h>

#include "check.h"
#include "device.h"

namespace offload {

inline cudaStream_t to_cuda(StreamHandle stream) { return reinterpret_cast<cudaStream_t>(stream); }

/// Makes a device current and gives the previous one back. Also lets event queries and stream
/// creation through while another stream of the process records a graph: they do not touch what is
/// recorded.
class CallGuard {
   public:
    explicit CallGuard(int index) {
        OFFLOAD_CUDA_CHECK(cudaGetDevice(&previous_));
        changed_ = previous_ != index;
        if (changed_) {
            OFFLOAD_CUDA_CHECK(cudaSetDevice(index));
        }
        cudaThreadExchangeStreamCaptureMode(&mode_);
    }

    ~CallGuard() {
        cudaThreadExchangeStreamCaptureMode(&mode_);
        if (changed_) {
            cudaSetDevice(previous_);
        }
    }

    CallGuard(const CallGuard&) = delete;
    CallGuard& operator=(const CallGuard&) = delete;

   private:
    int previous_ = 0;
    bool changed_ = false;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace offload
