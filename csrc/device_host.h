/// The host device: streams are queues on worker threads, so that a CPU exercises the same ordering
/// as a card. Faults can be injected: gates, failing copies, refused pinning.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "process.h"

namespace offload {

/// A CPU as a device. Made by `host_device`, or by a test, which must destroy its events first.
class HostDevice final : public Device {
   public:
    explicit HostDevice(int index) : index_(index) {}

    /// As `shut_down`.
    ~HostDevice() override;

    StreamHandle create_stream() override;
    void destroy_stream(StreamHandle stream) override;
    std::unique_ptr<Event> create_event() override;

    /// On `kCallerStream` copies at once.
    void copy_async(void* dst, const void* src, std::size_t bytes, CopyKind kind,
                    StreamHandle stream) override;
    bool is_caller(StreamHandle stream) const override { return stream == kCallerStream; }
    bool is_capturing(StreamHandle) const override { return false; }

    /// Locks nothing: there is no card that could need it. Only counts, for `refuse_pinning`.
    std::string pin(void* address, std::size_t bytes) override;
    void unpin(void* address) override;

    int numa_node() const override { return numa_node_; }

    /// Queues any work on `stream`, as a kernel launch would. What it throws shows on the next
    /// marker.
    void enqueue(StreamHandle stream, std::function<void()> task);

    /// The next `count` copies queued on this device fail when they run.
    void fail_next_copies(int count);

    /// Refuses `pin` from now on, or only what would make more than `above_bytes` pinned; an empty
    /// reason allows it again.
    void refuse_pinning(const std::string& reason, std::size_t above_bytes = 0);

    void set_numa_node(int node) { numa_node_ = node; }

    /// Runs what is queued and joins all workers; streams can then be neither used nor made. A
    /// closed `Gate` is not opened: open it first, or this waits for it forever.
    void shut_down();

    int index() const { return index_; }
    const OwnerProcess& owner() const { return owner_; }

   private:
    const int index_;
    const OwnerProcess owner_;
    std::mutex mutex_;
    std::vector<StreamHandle> streams_;
    bool shut_down_ = false;
    int failing_copies_ = 0;
    std::string pin_refusal_;
    std::size_t refuse_above_bytes_ = 0;
    std::map<void*, std::size_t> pinned_;  // address -> bytes
    std::size_t pinned_bytes_ = 0;
    std::atomic<int> numa_node_{-1};
};

/// A task on a host stream that blocks it until `open`. Destroying the gate opens it.
class Gate {
   public:
    Gate(HostDevice& device, StreamHandle stream);
    ~Gate();
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;

    void open();

    /// True when the stream stands at the gate or has passed it.
    bool reached() const;

    /// Blocks until the stream stands at the gate.
    void wait_reached() const;

   private:
    struct State;
    std::shared_ptr<State> state_;
};

}  // namespace offload
