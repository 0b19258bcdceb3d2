/// Offsets of slots in one address range: best fit, coalescing, growth in steps. Touches no memory.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <utility>

namespace offload {

/// Where a new slot lies and how much of the range must be committed for it.
struct Placement {
    std::size_t offset;
    std::size_t committed_bytes;  ///< of the whole range, a multiple of the step
};

/// Best-fit allocator over `[0, committed)`, which grows by whole steps up to a cap; what the cap
/// leaves of a last, partial step is not used.
///
/// Sizes are rounded up to `kAlignment` and to nothing else, so a slot wastes less than 4 KiB. A
/// free piece at the end of the committed range is extended rather than left behind. Not
/// thread-safe.
class SlotAllocator {
   public:
    static constexpr std::size_t kAlignment = 4096;

    SlotAllocator(std::size_t cap_bytes, std::size_t step_bytes);

    /// Plans a slot of `bytes` (> 0). Throws `ArenaFull`; the allocator is then unchanged.
    Placement allocate(std::size_t bytes);

    /// Gives the slot at `offset` back and returns its rounded size. `offset` must come from
    /// `allocate` and be live.
    std::size_t release(std::size_t offset);

    /// Forgets the committed steps behind the last live slot; returns the new committed size.
    std::size_t trim();

    /// Lowers or raises the cap; throws `Error` when more than `cap_bytes` is committed after a
    /// trim.
    void set_cap(std::size_t cap_bytes);

    std::size_t cap_bytes() const { return cap_bytes_; }
    std::size_t committed_bytes() const { return committed_bytes_; }
    std::size_t live_bytes() const { return live_bytes_; }  ///< rounded sizes of live slots
    std::size_t live_slots() const { return live_.size(); }

   private:
    void insert_free(std::size_t offset, std::size_t bytes);
    void erase_free(std::size_t offset, std::size_t bytes);

    std::size_t cap_bytes_;
    std::size_t step_bytes_;
    std::size_t committed_bytes_ = 0;
    std::size_t live_bytes_ = 0;
    std::map<std::size_t, std::size_t> live_;                     // offset -> bytes
    std::map<std::size_t, std::size_t> free_by_offset_;           // offset -> bytes
    std::set<std::pair<std::size_t, std::size_t>> free_by_size_;  // (bytes, offset)
};

}  // namespace offload
