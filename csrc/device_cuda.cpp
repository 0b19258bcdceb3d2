#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "check.h"
#include "cuda_guard.h"
#include "device.h"
#include "numa.h"
#include "process.h"

namespace offload {
namespace {

class CudaEvent final : public Event {
   public:
    CudaEvent(int index, OwnerProcess owner) : index_(index), owner_(owner) {
        CallGuard guard(index_);
        OFFLOAD_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDefault));
    }

    ~CudaEvent() override {
        if (owner_.is_current()) {
            // Fails harmlessly once the driver is unloading, which is when finalizers run at exit.
            // No guard: it may throw, and destroying an event does not depend on the current
            // device.
            cudaEventDestroy(event_);
            cudaGetLastError();
        }
    }

    void record(StreamHandle stream) override {
        owner_.check("Event::record");
        CallGuard guard(index_);
        OFFLOAD_CUDA_CHECK(cudaEventRecord(event_, to_cuda(stream)));
    }

    void wait(StreamHandle stream) override {
        owner_.check("Event::wait");
        CallGuard guard(index_);
        OFFLOAD_CUDA_CHECK(cudaStreamWaitEvent(to_cuda(stream), event_, 0));
    }

    bool query() const override { return status("Event::query") != cudaErrorNotReady; }

    void synchronize() const override {
        owner_.check("Event::synchronize");
        CallGuard guard(index_);
        cudaEventSynchronize(event_);  // a failure is told by `error`
        cudaGetLastError();
    }

    double elapsed_ms(const Event& start) const override {
        owner_.check("Event::elapsed_ms");
        CallGuard guard(index_);
        float elapsed = 0;
        OFFLOAD_CUDA_CHECK(
            cudaEventElapsedTime(&elapsed, static_cast<const CudaEvent&>(start).event_, event_));
        return elapsed;
    }

    std::string error() const override {
        const cudaError_t found = status("Event::error");
        const bool failed = found != cudaSuccess && found != cudaErrorNotReady;
        return failed ? cudaGetErrorString(found) : "";
    }

   private:
    cudaError_t status(const char* function) const {
        owner_.check(function);
        CallGuard guard(index_);
        const cudaError_t found = cudaEventQuery(event_);
        cudaGetLastError();  // "not ready" must not be left for the next check
        return found;
    }

    const int index_;
    const OwnerProcess owner_;
    cudaEvent_t event_ = nullptr;
};

class CudaDevice final : public Device {
   public:
    explicit CudaDevice(int index) : index_(index) {}

    StreamHandle create_stream() override {
        owner_.check("create_stream");
        CallGuard guard(index_);
        cudaStream_t stream = nullptr;
        OFFLOAD_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        return reinterpret_cast<StreamHandle>(stream);
    }

    void destroy_stream(StreamHandle stream) override {
        owner_.check("destroy_stream");
        CallGuard guard(index_);
        OFFLOAD_CUDA_CHECK(cudaStreamSynchronize(to_cuda(stream)));
        OFFLOAD_CUDA_CHECK(cudaStreamDestroy(to_cuda(stream)));
    }

    std::unique_ptr<Event> create_event() override {
        owner_.check("create_event");
        return std::make_unique<CudaEvent>(index_, owner_);
    }

    void copy_async(void* dst, const void* src, std::size_t bytes, CopyKind kind,
                    StreamHandle stream) override {
        owner_.check("copy_async");
        CallGuard guard(index_);
        const auto direction =
            kind == CopyKind::kDeviceToHost ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
        OFFLOAD_CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, direction, to_cuda(stream)));
    }

    bool is_caller(StreamHandle) const override { return false; }

    bool is_capturing(StreamHandle stream) const override {
        owner_.check("is_capturing");
        CallGuard guard(index_);
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        const cudaError_t result = cudaStreamIsCapturing(to_cuda(stream), &status);
        if (result == cudaErrorStreamCaptureImplicit) {
            // The legacy default stream, while a stream that would wait for it records.
            cudaGetLastError();
            return true;
        }
        OFFLOAD_CUDA_CHECK(result);
        return status != cudaStreamCaptureStatusNone;
    }

    std::string pin(void* address, std::size_t bytes) override {
        owner_.check("pin");
        CallGuard guard(index_);
        const cudaError_t result = cudaHostRegister(address, bytes, cudaHostRegisterPortable);
        if (result == cudaSuccess) {
            return "";
        }
        cudaGetLastError();
        return cudaGetErrorString(result);
    }

    void unpin(void* address) override {
        owner_.check("unpin");
        CallGuard guard(index_);
        OFFLOAD_CUDA_CHECK(cudaHostUnregister(address));
    }

    int numa_node() const override {
        owner_.check("numa_node");
        char bus_id[32] = {};
        if (cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), index_) != cudaSuccess) {
            cudaGetLastError();
            return -1;
        }
        return numa_node_of_pci(bus_id);
    }

   private:
    const int index_;
    const OwnerProcess owner_;
};

struct CudaDeviceTable {
    std::mutex mutex;
    std::map<int, std::unique_ptr<Device>> devices;
};

CudaDeviceTable& cuda_device_table() {
    static CudaDeviceTable* const table = new CudaDeviceTable;
    return *table;
}

}  // namespace

Device& cuda_device(int index) {
    CudaDeviceTable& table = cuda_device_table();
    std::lock_guard<std::mutex> lock(table.mutex);
    auto& device = table.devices[index];
    if (device == nullptr) {
        int count = 0;
        const cudaError_t result = cudaGetDeviceCount(&count);
        OFFLOAD_CHECK(result == cudaSuccess, "cuda_device: expected a CUDA driver for device ",
                      index, ", got: ", cudaGetErrorString(result),
                      ". This build needs a driver for CUDA ", CUDART_VERSION / 1000, " or newer.");
        OFFLOAD_CHECK(index >= 0 && index < count, "cuda_device: expected an index below ", count,
                      ", got ", index);
        device = std::make_unique<CudaDevice>(index);
    }
    return *device;
}

bool built_with_cuda() { return true; }

}  // namespace offload
