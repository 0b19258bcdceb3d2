#include <algorithm>
#include <iterator>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "harness.h"
#include "slot_allocator.h"

using offload::ArenaFull;
using offload::Error;
using offload::SlotAllocator;

namespace {

constexpr std::size_t kPage = SlotAllocator::kAlignment;
constexpr std::size_t kStep = 16 * kPage;

}  // namespace

TEST(allocator_takes_the_smallest_piece_that_fits) {
    SlotAllocator allocator(4 * kStep, kStep);
    const auto large = allocator.allocate(8 * kPage).offset;
    allocator.allocate(kPage);
    const auto small = allocator.allocate(3 * kPage).offset;
    allocator.allocate(4 * kPage);
    allocator.release(large);
    allocator.release(small);
    CHECK(allocator.allocate(2 * kPage).offset == small);
    CHECK(allocator.allocate(2 * kPage).offset == large);
}

TEST(allocator_rounds_to_pages_and_to_nothing_else) {
    SlotAllocator allocator(4 * kStep, kStep);
    allocator.allocate(1);
    allocator.allocate(kPage + 1);
    allocator.allocate(3 * kPage);
    CHECK(allocator.live_bytes() == 6 * kPage);
    CHECK(allocator.live_slots() == 3);
}

TEST(allocator_coalesces_with_both_neighbours) {
    SlotAllocator allocator(kStep, kStep);
    const auto a = allocator.allocate(5 * kPage).offset;
    const auto b = allocator.allocate(5 * kPage).offset;
    const auto c = allocator.allocate(6 * kPage).offset;
    allocator.release(a);
    allocator.release(c);
    allocator.release(b);
    CHECK(allocator.allocate(16 * kPage).offset == 0);
}

TEST(allocator_extends_the_last_free_piece_instead_of_leaving_it_behind) {
    SlotAllocator allocator(4 * kStep, kStep);
    const auto kept = allocator.allocate(10 * kPage);
    CHECK(kept.committed_bytes == kStep);
    const auto extended = allocator.allocate(20 * kPage);
    CHECK(extended.offset == 10 * kPage);
    CHECK(extended.committed_bytes == 2 * kStep);
}

TEST(allocator_never_commits_more_than_its_cap) {
    SlotAllocator allocator(2 * kStep + kPage, kStep);
    allocator.allocate(2 * kStep);
    CHECK_THROWS(ArenaFull, allocator.allocate(kPage));
    CHECK(allocator.committed_bytes() == 2 * kStep);
}

TEST(arena_full_tells_the_numbers_and_changes_nothing) {
    SlotAllocator allocator(2 * kStep, kStep);
    const auto first = allocator.allocate(20 * kPage).offset;
    try {
        allocator.allocate(13 * kPage);
        CHECK(false);
    } catch (const ArenaFull& full) {
        CHECK(full.asked_bytes == 13 * kPage);
        CHECK(full.free_bytes == 12 * kPage);
        CHECK(full.cap_bytes == 2 * kStep);
    }
    CHECK(allocator.committed_bytes() == 2 * kStep);
    CHECK(allocator.live_bytes() == 20 * kPage);
    CHECK(allocator.allocate(12 * kPage).offset == 20 * kPage);
    allocator.release(first);
    CHECK(allocator.allocate(20 * kPage).offset == first);
    CHECK_THROWS(ArenaFull, allocator.allocate(~std::size_t{0}));
}

TEST(allocator_refuses_wrong_arguments) {
    SlotAllocator allocator(2 * kStep, kStep);
    const auto offset = allocator.allocate(kPage).offset;
    CHECK_THROWS(Error, allocator.allocate(0));
    CHECK_THROWS(Error, allocator.release(offset + kPage));
    allocator.release(offset);
    CHECK_THROWS(Error, allocator.release(offset));
    CHECK_THROWS(Error, SlotAllocator(kStep, kPage + 1));
}

TEST(trim_gives_up_steps_behind_the_last_live_slot_only) {
    SlotAllocator allocator(8 * kStep, kStep);
    const auto low = allocator.allocate(3 * kStep).offset;
    const auto middle = allocator.allocate(kPage).offset;
    const auto high = allocator.allocate(3 * kStep).offset;
    allocator.release(low);
    CHECK(allocator.trim() == 7 * kStep);
    allocator.release(high);
    CHECK(allocator.trim() == 4 * kStep);
    CHECK(allocator.allocate(2 * kStep).offset == low);
    allocator.release(low);
    allocator.release(middle);
    CHECK(allocator.trim() == 0);
    CHECK(allocator.trim() == 0);
    CHECK(allocator.allocate(kPage).offset == 0);
}

TEST(cap_can_be_lowered_to_what_is_in_use_and_raised_again) {
    SlotAllocator allocator(4 * kStep, kStep);
    const auto first = allocator.allocate(kStep).offset;
    const auto second = allocator.allocate(2 * kStep).offset;
    CHECK_THROWS(Error, allocator.set_cap(2 * kStep));
    CHECK(allocator.cap_bytes() == 4 * kStep);
    allocator.release(second);
    allocator.set_cap(kStep);
    CHECK_THROWS(ArenaFull, allocator.allocate(kPage));
    allocator.set_cap(4 * kStep);
    CHECK(allocator.allocate(kPage).offset == kStep);
    allocator.release(first);
}

TEST(thousand_random_sizes_overlap_nowhere_and_leak_nothing) {
    SlotAllocator allocator(1000 * kStep, kStep);
    std::mt19937 random(1000);
    std::uniform_int_distribution<std::size_t> sizes(1, 3 * kStep);
    std::map<std::size_t, std::size_t> live;  // offset -> bytes
    for (int i = 0; i < 1000; ++i) {
        const std::size_t bytes = sizes(random);
        const auto placement = allocator.allocate(bytes);
        CHECK(placement.offset % kPage == 0);
        CHECK(placement.offset + bytes <= placement.committed_bytes);
        const auto next = live.lower_bound(placement.offset);
        CHECK(next == live.end() || placement.offset + bytes <= next->first);
        CHECK(next == live.begin() ||
              std::prev(next)->first + std::prev(next)->second <= placement.offset);
        live.emplace(placement.offset, bytes);
        if (i % 3 != 0) {
            auto victim = live.begin();
            std::advance(victim, random() % live.size());
            allocator.release(victim->first);
            live.erase(victim);
        }
    }
    for (const auto& [offset, bytes] : live) {
        allocator.release(offset);
    }
    CHECK(allocator.live_bytes() == 0);
    CHECK(allocator.live_slots() == 0);
    CHECK(allocator.trim() == 0);
}

TEST(five_sequence_lengths_reserve_little_more_than_they_use) {
    constexpr std::size_t kArenaStep = std::size_t{64} << 20;
    SlotAllocator allocator(std::size_t{100} << 30, kArenaStep);
    std::size_t peak_live = 0;
    for (int round = 0; round < 4; ++round) {
        for (const std::size_t tokens : {70000, 71111, 65536, 30000, 72000}) {
            std::vector<std::size_t> offsets;
            for (int layer = 0; layer < 16; ++layer) {
                offsets.push_back(allocator.allocate(tokens * 3072 * 2).offset);
                peak_live = std::max(peak_live, allocator.live_bytes());
            }
            while (!offsets.empty()) {
                allocator.release(offsets.back());
                offsets.pop_back();
            }
        }
    }
    CHECK(allocator.live_bytes() == 0);
    CHECK(static_cast<double>(allocator.committed_bytes()) <=
          1.05 * static_cast<double>(peak_live) + static_cast<double>(kArenaStep));
}
