/// Asynchronous copies between device tensors and arena slots, ordered so that no byte is read
/// early.
///
/// NOTE [ordering]: the rules of the copy engine. Each has a test of the same number.
///   1. A D2H copy starts after an event recorded on the compute stream at the moment of the call.
///   2. The source must stay referenced until its copy is done: the caller keeps it, and asks
///      `Copy::done`. Bytes in flight are bounded: `offload` waits for the oldest copies beyond it.
///   3. A reload waits for an event recorded on the compute stream after its buffer was allocated,
///      AND for its ticket's own D2H event, on every path; the consumer waits for the H2D event.
///   4. A slot is reused only after the last copy that reads or writes it: copies own their slot.
///   5. A buffer of ours may be overwritten by work queued after `offload_copy->wait(stream)`.
///   6. A reload buffer dropped unused must stay referenced until its copy is done (as rule 2).
///   7. A buffer is handed to the stream it was allocated for; the store reloads anew for another
///   one.
///   8. Queues and events belong to the tensor's device, never to the current one.
///   9. Dropping a ticket, copy or slot only marks; nothing waits, no Python lock is taken.
///      Offload and reload refuse while the compute stream is captured.
///  10. Arena memory is MADV_DONTFORK.
///  11. A view of a slot owns the slot. A failed copy poisons its ticket, not the engine.
///  12. An event is a handle on its latest marker (device.h); no exception leaves a worker.
///  13. Engine and arena are process singletons, closed at exit, unusable in a forked child.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "arena.h"
#include "copy.h"
#include "device.h"
#include "process.h"
#include "residency.h"

namespace offload {

/// The bytes of one offloaded tensor, in the arena or on the disk. Owns them until destroyed;
/// destroying only marks.
class Ticket {
   public:
    Ticket(Device& device, std::shared_ptr<Resident> resident)
        : device_(device), resident_(std::move(resident)) {}

    const std::shared_ptr<Copy>& offload_copy() const { return resident_->offload_copy(); }
    std::size_t bytes() const { return resident_->bytes(); }

   private:
    friend class CopyEngine;

    Device& device_;
    const std::shared_ptr<Resident> resident_;
};

struct EngineStatistics {
    std::uint64_t offloads = 0;
    std::uint64_t reloads = 0;
    std::uint64_t offloaded_bytes = 0;
    std::uint64_t reloaded_bytes = 0;
    std::uint64_t failed_copies = 0;
    std::size_t in_flight_bytes = 0;       ///< D2H and H2D not yet retired
    std::size_t peak_in_flight_bytes = 0;  ///< D2H only
    double back_pressure_ms = 0;           ///< time `offload` blocked on the bound
};

/// Queues copies of every device. One D2H and one H2D queue a device, created once. Thread-safe.
class CopyEngine {
   public:
    explicit CopyEngine(Arena& arena);
    ~CopyEngine();
    CopyEngine(const CopyEngine&) = delete;
    CopyEngine& operator=(const CopyEngine&) = delete;

    /// Copies `bytes` (> 0) at `src` on `device` into a new slot, after the work queued on
    /// `compute_stream` so far. Blocks only for the bound on bytes in flight. Before it throws
    /// `ArenaFull` it waits for all copies in flight and tries once more, since they own slots. A
    /// copy that cannot be queued is a failed copy: the ticket is poisoned, the call returns.
    ///
    /// With a disk tier the arena's oldest residents are written there to make room, in time if the
    /// disk keeps up; one that `leaves` goes there as soon as it can.
    std::shared_ptr<Ticket> offload(Device& device, const void* src, std::size_t bytes,
                                    StreamHandle compute_stream, bool leaves = false);

    /// Copies the ticket's bytes to `dst`, which was allocated on `compute_stream`. Blocks only
    /// where they are on the disk and the arena has no room for them. Throws `CopyFailed` when the
    /// ticket's own copy is known to have failed; when it fails later, the error shows on the
    /// returned copy.
    std::shared_ptr<Copy> reload(const Ticket& ticket, void* dst, StreamHandle compute_stream);

    /// As `offload` and `reload`, but return null where those would block. For callers that hold a
    /// lock which they give up only to block.
    std::shared_ptr<Ticket> try_offload(Device& device, const void* src, std::size_t bytes,
                                        StreamHandle compute_stream, bool leaves = false);
    std::shared_ptr<Copy> try_reload(const Ticket& ticket, void* dst, StreamHandle compute_stream);

    /// The ticket's slot in the arena, once its bytes are there; reads them from the disk if need
    /// be. Blocks. Throws `CopyFailed`.
    std::shared_ptr<Slot> host_slot(const Ticket& ticket);

    /// The ticket's slot as it is now, perhaps without its bytes; null for one on the disk.
    std::shared_ptr<Slot> slot_now(const Ticket& ticket) {
        return residency_.slot_of(*ticket.resident_);
    }

    /// Makes the ticket the last in spill order.
    void put_last(const Ticket& ticket) { residency_.put_last(ticket.resident_); }

    /// `"host"` or `"disk"`.
    const char* tier_of(const Ticket& ticket) { return residency_.tier_of(*ticket.resident_); }

    Residency& residency() { return residency_; }

    /// True when no copy is in flight. Retires.
    bool idle();

    /// Forgets finished copies, and with them their hold on slots; begins to write to the disk what
    /// they brought, where that is due. Never blocks.
    void retire();

    /// Waits for every copy and disk transfer in flight, then retires. Failures stay with their
    /// tickets.
    void drain();

    /// True when `drain` would not block.
    bool drained();

    /// Drains and frees the queues; later calls throw `EngineUnusable`, but `close` does nothing
    /// again. Tickets and copies stay readable, destroying them harmless.
    void close();

    /// Of each device's D2H copies. One copy larger than the bound is always allowed when nothing
    /// else is in flight.
    void set_max_in_flight_bytes(std::size_t bytes);

    EngineStatistics statistics();

    /// The (D2H, H2D) streams of `device`.
    std::pair<StreamHandle, StreamHandle> streams(Device& device);

   private:
    struct Queues {
        StreamHandle d2h_stream;
        StreamHandle h2d_stream;
        std::deque<std::shared_ptr<Copy>> d2h_in_flight;
        std::deque<std::shared_ptr<Copy>> h2d_in_flight;
        std::size_t d2h_in_flight_bytes = 0;
    };

    using Lock = std::unique_lock<std::mutex>;

    std::shared_ptr<Ticket> offload_or_null(Device& device, const void* src, std::size_t bytes,
                                            StreamHandle compute_stream, bool leaves,
                                            bool may_block);
    std::shared_ptr<Copy> reload_or_null(const Ticket& ticket, void* dst,
                                         StreamHandle compute_stream, bool may_block);
    std::shared_ptr<Slot> allocate_or_null(std::size_t bytes, bool may_block);
    bool fetch(const Ticket& ticket, const std::shared_ptr<Copy>& copy,
               const Resident::Ready& ready, bool may_block);

    // Events are never waited for with mutex_ held: other threads and finalizers go on meanwhile.
    bool wait_for_room(Lock& lock, Device& device, std::size_t bytes, bool may_block);
    void wait_for_all();

    Queues& queues_of(Device& device);  // these require mutex_
    void retire_locked();
    void retire_queue(std::deque<std::shared_ptr<Copy>>& queue, std::size_t* d2h_bytes);
    void queue_reload(const std::shared_ptr<Copy>& copy, void* dst, Event& allocated,
                      const std::shared_ptr<Slot>& slot, const std::string& error);
    void queue_copy(Copy& copy, void* dst, const void* src, CopyKind kind, StreamHandle stream,
                    std::initializer_list<Event*> after);
    void check_usable(const char* function) const;
    void check_not_capturing(const char* function, Device& device, StreamHandle stream) const;

    Arena& arena_;
    const OwnerProcess owner_;
    std::atomic<bool> closed_{false};
    std::mutex mutex_;
    std::map<Device*, Queues> queues_;
    std::set<std::shared_ptr<Copy>> awaiting_;  // reloads whose bytes come from the disk
    std::size_t d2h_in_flight_bytes_ = 0;       // of all devices
    std::size_t max_in_flight_bytes_ = std::size_t{128} << 20;
    EngineStatistics statistics_;
    Residency residency_;
};

}  // namespace offload
