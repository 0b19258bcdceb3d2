/// Where the bytes of tickets are, in the host arena or on the disk, and what makes room for more.
///
/// NOTE [spill order]: residents stand in the order in which backward's last comes first: as they
/// were stored, or as `put_last` says. The first in order is needed last, so it is the first to be
/// written to the disk and the first whose slot is given up; what stands before a resident that is
/// read is read ahead. A written resident keeps its slot until the room is needed: while the arena
/// has room, nothing is read back.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena.h"
#include "copy.h"
#include "disk_tier.h"

namespace offload {

/// The bytes of one ticket. Destroying it only marks, on any thread (rule 9 of copy_engine.h).
class Resident {
   public:
    /// Gets the slot that now holds the bytes, or null and the reason why they are lost.
    using Ready = std::function<void(const std::shared_ptr<Slot>&, const std::string& error)>;

    Resident(std::shared_ptr<Slot> slot, std::shared_ptr<Copy> offload_copy);

    std::size_t bytes() const { return bytes_; }
    const std::shared_ptr<Copy>& offload_copy() const { return offload_copy_; }

   private:
    friend class Residency;

    const std::size_t bytes_;
    const std::shared_ptr<Copy> offload_copy_;

    // Guarded by the residency's mutex.
    std::uint64_t order_ = 0;
    std::shared_ptr<Slot> slot_;      // null: only on the disk
    std::shared_ptr<Slot> incoming_;  // while it is read
    std::shared_ptr<Extent> extent_;  // null: not on the disk
    bool writing_ = false;
    bool leaves_ = false;  // gives its slot up as soon as it is written
    std::vector<Ready> waiting_;
};

struct ResidencyStatistics {
    std::uint64_t spilled_tickets = 0;
    std::uint64_t fetched_tickets = 0;
    std::uint64_t evicted_tickets = 0;  ///< slots given up to make room
    std::string write_refusal;  ///< why the last write failed or could not begin; else empty
};

/// Moves residents between one arena and one disk tier. Without a disk it only hands out slots.
/// Thread-safe; nothing is waited for with a lock held.
class Residency {
   public:
    explicit Residency(Arena& arena);
    ~Residency();
    Residency(const Residency&) = delete;
    Residency& operator=(const Residency&) = delete;

    /// From now on residents may be written to `disk`; null ends that. Throws `Error` while the
    /// present disk holds live bytes.
    void set_disk(std::unique_ptr<DiskTier> disk);
    bool has_disk();

    /// Takes a resident in, last in order. One that `leaves` is written as soon as its copy has
    /// arrived.
    void add(const std::shared_ptr<Resident>& resident, bool leaves);

    /// Makes a resident the last in order.
    void put_last(const std::shared_ptr<Resident>& resident);

    enum class Room {
        kMade,    ///< a slot was given up: ask the arena again
        kComing,  ///< a transfer is under way: `wait_for_room`, then ask again
        kNone,    ///< nothing can be moved now
    };

    /// Gives up slots of residents that are on the disk as well, or begins to write some. Never
    /// blocks.
    Room make_room(std::size_t bytes);

    /// After a write was refused or failed no other begins, lest a broken disk be asked for ever,
    /// until somebody who needs room calls this.
    void retry_writes();

    /// Blocks until a transfer has ended, or none is under way.
    void wait_for_room();

    /// Begins to write what will have to go before the arena is full. Never blocks.
    void write_behind();

    /// The slot of a resident that is in the arena; null for one that is on the disk alone.
    std::shared_ptr<Slot> slot_of(const Resident& resident);

    /// Calls `ready` once the bytes are in the arena, perhaps at once: reads them into `spare`
    /// unless they are there or coming. False, and `ready` is dropped, where `spare` is null and
    /// was needed.
    bool fetch(const std::shared_ptr<Resident>& resident, std::shared_ptr<Slot> spare,
               Resident::Ready ready);

    /// Begins to read residents before this one in order, where the arena has room. Never blocks.
    void read_ahead(const Resident& resident);

    /// `"host"` or `"disk"`: where a reload would have to take the bytes from.
    const char* tier_of(const Resident& resident);

    /// Waits for all transfers, and for what they owned to be gone.
    void drain();

    /// True when no transfer is under way.
    bool idle();

    /// Drains and ends the disk's threads.
    void close();

    ResidencyStatistics statistics();
    DiskStatistics disk_statistics();  ///< of an empty tier where there is none

   private:
    using Order = std::map<std::uint64_t, std::weak_ptr<Resident>>;
    using Lock = std::unique_lock<std::mutex>;

    bool evict_first();  // these require mutex_
    void write_first(std::size_t bytes_ahead);
    bool begin_write(const std::shared_ptr<Resident>& resident);
    void begin_read(const std::shared_ptr<Resident>& resident, std::shared_ptr<Slot> slot);
    void write_leaving();
    void sweep();

    void on_written(const std::shared_ptr<Resident>& resident,
                    const std::shared_ptr<Extent>& extent, const std::string& error);
    void on_read(const std::shared_ptr<Resident>& resident, const std::string& error);
    void end_transfer();

    Arena& arena_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::shared_ptr<DiskTier> disk_;
    std::uint64_t next_order_ = 1;
    Order in_arena_;  // with a slot; may name residents that are gone
    Order on_disk_;   // without one
    std::deque<std::weak_ptr<Resident>> leaving_;
    std::size_t sweep_at_ = 256;
    bool write_refused_ = false;
    std::size_t writing_bytes_ = 0;
    std::size_t reading_bytes_ = 0;
    std::size_t transfers_ = 0;  // under way
    std::uint64_t transfers_ended_ = 0;
    ResidencyStatistics statistics_;
};

}  // namespace offload
