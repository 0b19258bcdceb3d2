/// The host memory that offloaded tensors live in: one reserved range, committed and page-locked in
/// steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "process.h"
#include "slot_allocator.h"

namespace offload {

class Arena;

/// A piece of the arena. The last owner gives it back; copies in flight are owners (rule 4 of
/// copy_engine.h).
class Slot {
   public:
    Slot(Arena* arena, std::size_t offset, std::size_t bytes, unsigned char* data)
        : arena_(arena), offset_(offset), bytes_(bytes), data_(data) {}
    ~Slot();
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;

    unsigned char* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }    ///< as asked, not rounded
    std::size_t offset() const { return offset_; }  ///< from the start of the arena

   private:
    Arena* arena_;
    std::size_t offset_;
    std::size_t bytes_;
    unsigned char* data_;
};

struct ArenaStatistics {
    std::size_t cap_bytes;
    std::size_t committed_bytes;  ///< backed by memory now
    std::size_t pinned_bytes;
    std::size_t live_bytes;  ///< in live slots, rounded to 4 KiB
    std::size_t live_slots;
    std::size_t peak_live_bytes;
    std::size_t peak_committed_bytes;
    std::string pin_refusal;     ///< why page-locking was refused; empty when it was not
    std::size_t pinnable_bytes;  ///< page-locked before the refusal; meaningless without one
    int numa_node;  ///< that steps prefer; -1 when unknown, the only one, or refused by the system
};

/// Address space of `reserve_bytes` is reserved once. Memory is committed, pre-faulted, excluded
/// from forked children (`MADV_DONTFORK`: a child that reads a slot gets SIGSEGV) and, when pinning
/// is on, page-locked, all in steps of `kStepBytes`. Thread-safe.
///
/// Once pinning is refused the steps beyond stay pageable and the reason is kept; those before stay
/// page-locked, also when they are trimmed and committed again.
///
/// An arena must outlive its slots; the process arena is leaked on purpose (rule 13). In a forked
/// child every call throws `EngineUnusable` and releasing a slot does nothing.
class Arena {
   public:
    static constexpr std::size_t kStepBytes = std::size_t{64} << 20;
    static constexpr unsigned char kPoison = 0xff;  ///< NaN in every float type

    /// `reserve_bytes` bounds every later cap. No memory is committed yet. A cap counts in whole
    /// steps and must hold at least one, else `Error`.
    Arena(std::size_t reserve_bytes, std::size_t cap_bytes);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    /// Throws `ArenaFull`. `bytes` must be > 0. Commits steps as needed (about 10 ms each, once).
    std::shared_ptr<Slot> allocate(std::size_t bytes);

    /// As `allocate`, but null where that would throw `ArenaFull`.
    std::shared_ptr<Slot> try_allocate(std::size_t bytes);

    /// Page-locks what is committed and what will be, for `device`; what will be also prefers the
    /// NUMA node of `device`. Later calls do nothing.
    void enable_pinning(Device& device);

    /// Trims. Throws `Error` when more is in use or reserved less; the cap is then unchanged.
    void set_cap(std::size_t cap_bytes);

    /// Gives memory behind the last live slot back to the system.
    void trim();

    /// For debugging: overwrites slots as they are handed out and as they go free with `kPoison`,
    /// so that bytes read before their copy arrived, or after their slot was given back, show.
    void set_poisoning(bool on);

    std::size_t cap_bytes();
    std::size_t live_bytes();  ///< in live slots, rounded

    ArenaStatistics statistics();

   private:
    friend class Slot;

    /// Called by ~Slot on any thread, also from finalizers: notes the offset and returns (rule 9).
    void mark_released(std::size_t offset) noexcept;

    void drain_released();  // this and the next four require mutex_
    void commit(std::size_t committed_bytes);
    void decommit(std::size_t committed_bytes);
    void pin_steps();
    void check_cap(const char* function, std::size_t cap_bytes) const;

    const OwnerProcess owner_;
    const std::size_t reserve_bytes_;
    void* mapping_ = nullptr;
    std::size_t mapping_bytes_ = 0;
    unsigned char* base_ = nullptr;

    std::mutex mutex_;  // guards everything below but released_
    SlotAllocator allocator_;
    bool poisoning_ = false;
    std::size_t backed_bytes_ = 0;
    std::size_t pinned_bytes_ = 0;  // of the first steps
    std::size_t peak_live_bytes_ = 0;
    std::size_t peak_committed_bytes_ = 0;
    Device* pinning_device_ = nullptr;
    std::string pin_refusal_;
    std::size_t pinnable_bytes_ = std::numeric_limits<std::size_t>::max();  // were not refused
    int numa_node_ = -1;

    std::mutex released_mutex_;          // never held while taking another lock
    std::vector<std::size_t> released_;  // has capacity for every live slot
};

}  // namespace offload
