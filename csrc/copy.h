/// One asynchronous copy between a device tensor and host memory.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arena.h"
#include "device.h"
#include "marker.h"
#include "process.h"

namespace offload {

/// A copy that the engine queued, or will queue once its bytes have come from the disk. Owns its
/// slot until the engine has seen it finish. Thread-safe.
class Copy {
   public:
    Copy(Device& device, std::size_t bytes);

    /// True when the copy has run, well or not. Never blocks.
    bool done() const;

    /// Blocks until the copy has run. Throws `CopyFailed` when it failed.
    void synchronize() const;

    /// Work queued on `stream` after this call runs after the copy. Blocks until the copy is
    /// queued, which takes time only where it is read from the disk; on the host's `kCallerStream`
    /// until it has run. Throws `CopyFailed` when it is known to have failed. Counts the time it
    /// holds the stream or the caller up as stall.
    void wait(StreamHandle stream);

    /// Whether `wait(stream)` would block the calling thread: bindings keep the interpreter lock
    /// otherwise.
    bool would_block(StreamHandle stream) const;

    /// Why it failed; empty while it runs and when it went well.
    std::string error() const;

    std::size_t bytes() const { return bytes_; }

    /// True when `copy_ms` and `stall_ms` will not change any more. Never blocks.
    bool settled() const;

    double copy_ms() const;   ///< time on the queue's engine; 0 until done
    double stall_ms() const;  ///< time `wait` held streams up, as far as known now

   private:
    friend class CopyEngine;

    void add_caller_stall(double milliseconds);

    Device& device_;
    const std::size_t bytes_;
    const OwnerProcess owner_;
    std::shared_ptr<Slot> slot_;  // guarded by the engine's mutex; dropped when the copy is retired
    std::unique_ptr<Event> begin_;
    std::unique_ptr<Event> end_;
    Marker queued_;                   // everything above is on its stream, or never will be
    std::shared_ptr<Copy> upstream_;  // the offload whose bytes a reload reads
    std::string queue_error_;         // why not all of it was queued; written before `queued_`
    mutable std::mutex stall_mutex_;
    std::vector<std::pair<std::unique_ptr<Event>, std::unique_ptr<Event>>> stalls_;
    double caller_stall_ms_ = 0;
};

}  // namespace offload
