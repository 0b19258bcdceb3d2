#include "slot_allocator.h"

#include <algorithm>
#include <iterator>

#include "check.h"

namespace offload {
namespace {

std::size_t round_up(std::size_t bytes, std::size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

}  // namespace

SlotAllocator::SlotAllocator(std::size_t cap_bytes, std::size_t step_bytes)
    : cap_bytes_(cap_bytes), step_bytes_(step_bytes) {
    OFFLOAD_CHECK(step_bytes > 0 && step_bytes % kAlignment == 0,
                  "SlotAllocator: expected a step that is a multiple of ", kAlignment, ", got ",
                  step_bytes);
}

Placement SlotAllocator::allocate(std::size_t bytes) {
    OFFLOAD_CHECK(bytes > 0, "allocate: expected bytes > 0, got 0");
    const std::size_t usable_bytes = cap_bytes_ / step_bytes_ * step_bytes_;
    // Compared before rounding, which could overflow.
    if (bytes > usable_bytes) {
        throw ArenaFull(bytes, usable_bytes - live_bytes_, cap_bytes_);
    }
    const std::size_t rounded = round_up(bytes, kAlignment);
    const auto best = free_by_size_.lower_bound({rounded, 0});
    std::size_t offset = committed_bytes_;
    std::size_t piece_bytes = 0;
    if (best != free_by_size_.end()) {
        piece_bytes = best->first;
        offset = best->second;
    } else if (!free_by_offset_.empty()) {
        const auto last = std::prev(free_by_offset_.end());
        if (last->first + last->second == committed_bytes_) {
            offset = last->first;
            piece_bytes = last->second;
        }
    }
    const std::size_t new_committed =
        round_up(std::max(committed_bytes_, offset + rounded), step_bytes_);
    if (new_committed > usable_bytes) {
        throw ArenaFull(bytes, usable_bytes - live_bytes_, cap_bytes_);
    }
    if (piece_bytes > 0) {
        erase_free(offset, piece_bytes);
    }
    piece_bytes += new_committed - committed_bytes_;
    committed_bytes_ = new_committed;
    if (piece_bytes > rounded) {
        insert_free(offset + rounded, piece_bytes - rounded);
    }
    live_.emplace(offset, rounded);
    live_bytes_ += rounded;
    return {offset, committed_bytes_};
}

std::size_t SlotAllocator::release(std::size_t offset) {
    const auto live = live_.find(offset);
    OFFLOAD_CHECK(live != live_.end(), "release: expected the offset of a live slot, got ", offset);
    const std::size_t released_bytes = live->second;
    std::size_t begin = offset;
    std::size_t bytes = released_bytes;
    live_bytes_ -= bytes;
    live_.erase(live);

    const auto next = free_by_offset_.find(begin + bytes);
    if (next != free_by_offset_.end()) {
        const std::size_t next_bytes = next->second;
        erase_free(begin + bytes, next_bytes);
        bytes += next_bytes;
    }
    const auto after = free_by_offset_.lower_bound(begin);
    if (after != free_by_offset_.begin()) {
        const auto [previous_offset, previous_bytes] = *std::prev(after);
        if (previous_offset + previous_bytes == begin) {
            erase_free(previous_offset, previous_bytes);
            begin = previous_offset;
            bytes += previous_bytes;
        }
    }
    insert_free(begin, bytes);
    return released_bytes;
}

std::size_t SlotAllocator::trim() {
    if (free_by_offset_.empty()) {
        return committed_bytes_;
    }
    const auto [offset, bytes] = *std::prev(free_by_offset_.end());
    const std::size_t kept = round_up(offset, step_bytes_);
    if (offset + bytes == committed_bytes_ && kept < committed_bytes_) {
        erase_free(offset, bytes);
        if (kept > offset) {
            insert_free(offset, kept - offset);
        }
        committed_bytes_ = kept;
    }
    return committed_bytes_;
}

void SlotAllocator::set_cap(std::size_t cap_bytes) {
    const std::size_t committed = trim();
    OFFLOAD_CHECK(committed <= cap_bytes, "set_cap: expected at least the ", committed,
                  " bytes in use, got ", cap_bytes, ". Release tickets first.");
    cap_bytes_ = cap_bytes;
}

void SlotAllocator::insert_free(std::size_t offset, std::size_t bytes) {
    free_by_offset_.emplace(offset, bytes);
    free_by_size_.emplace(bytes, offset);
}

void SlotAllocator::erase_free(std::size_t offset, std::size_t bytes) {
    free_by_offset_.erase(offset);
    free_by_size_.erase({bytes, offset});
}

}  // namespace offload
