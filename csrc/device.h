/// The device seam: streams, events, asynchronous copies and page-locking, behind one interface.
///
/// Two implementations. `CudaDevice` forwards to the CUDA runtime. `HostDevice` is real code as
/// well: a stream is a queue on a worker thread, so copies are asynchronous and ordering matters on
/// a CPU too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace offload {

/// A stream as an integer, so that no header needs CUDA's. On CUDA: a `cudaStream_t`.
/// On the host: a queue made by `create_stream`, or `kCallerStream`.
using StreamHandle = std::uintptr_t;

/// On the host device: the calling thread itself. What it did is done, and waiting blocks it.
/// On CUDA the same value is the legacy default stream.
constexpr StreamHandle kCallerStream = 0;

enum class CopyKind { kDeviceToHost, kHostToDevice };

/// A handle on the latest marker that `record` put into a stream (rule 12 of copy_engine.h).
///
/// `record` makes a new one-shot marker; `wait`, `query` and `synchronize` act on the marker that
/// is current when they are called, so a later `record` does not change an earlier `wait`. An event
/// that was never recorded is done. All members may be called from any thread. In a forked child
/// calls throw `EngineUnusable` and the destructor does nothing.
class Event {
   public:
    virtual ~Event() = default;

    virtual void record(StreamHandle stream) = 0;

    /// Work queued on `stream` after this call runs after the marker. Blocks only for the host
    /// device's `kCallerStream`.
    virtual void wait(StreamHandle stream) = 0;

    /// True when the marker was reached. Never blocks.
    virtual bool query() const = 0;

    /// Blocks the calling thread until the marker was reached.
    virtual void synchronize() const = 0;

    /// Milliseconds from `start`'s marker to this one; both must have been reached.
    virtual double elapsed_ms(const Event& start) const = 0;

    /// Why the work queued since the stream's previous marker failed; empty when it did not.
    virtual std::string error() const = 0;
};

/// One device. Every call acts on this device whatever the thread's current device is (rule 8).
class Device {
   public:
    virtual ~Device() = default;

    virtual StreamHandle create_stream() = 0;

    /// Runs what is queued, then frees the stream.
    virtual void destroy_stream(StreamHandle stream) = 0;

    virtual std::unique_ptr<Event> create_event() = 0;

    /// Queues a copy of `bytes` on `stream` and returns. Both ranges must stay valid until it has
    /// run.
    virtual void copy_async(void* dst, const void* src, std::size_t bytes, CopyKind kind,
                            StreamHandle stream) = 0;

    /// True when waiting on `stream` blocks the calling thread: the host's `kCallerStream` only.
    virtual bool is_caller(StreamHandle stream) const = 0;

    /// True while `stream` records a CUDA graph; always false on the host.
    virtual bool is_capturing(StreamHandle stream) const = 0;

    /// Page-locks a range of the arena for this device. Empty on success, else the reason it was
    /// refused.
    virtual std::string pin(void* address, std::size_t bytes) = 0;

    virtual void unpin(void* address) = 0;

    /// The NUMA node whose memory lies nearest; -1 when unknown or when there is one node only.
    virtual int numa_node() const = 0;
};

/// The process's CUDA device `index`, created on first use and never destroyed.
/// Throws `Error` when the build has no CUDA, or the driver or device is missing.
Device& cuda_device(int index);

/// True when this build contains the CUDA device. Says nothing about a driver.
bool built_with_cuda();

/// The process's host device `index`, created on first use and never destroyed. Several indices
/// exist so that tests can tell devices apart; CPU models use 0.
class HostDevice;
HostDevice& host_device(int index);

/// Runs what is queued on all host devices, then joins their workers. For `atexit`; calls that need
/// a worker then throw. Every `Gate` must be open, or this waits for it forever.
void shut_down_host_devices();

}  // namespace offload
