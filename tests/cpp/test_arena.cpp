#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "check.h"
#include "device_host.h"
#include "harness.h"
#include "world.h"

using namespace offload;

namespace {

constexpr std::size_t kStep = Arena::kStepBytes;

/// Mappings of this process that begin inside a range.
std::size_t mapped_regions(const unsigned char* begin, std::size_t bytes) {
    const auto first = reinterpret_cast<std::uintptr_t>(begin);
    std::ifstream maps("/proc/self/maps");
    std::size_t count = 0;
    for (std::string line; std::getline(maps, line);) {
        const std::uintptr_t at = std::stoull(line, nullptr, 16);
        count += at >= first && at < first + bytes;
    }
    return count;
}

}  // namespace

TEST(arena_commits_nothing_before_it_is_asked) {
    Arena arena(std::size_t{1} << 40, 2 * kStep);
    CHECK(arena.statistics().committed_bytes == 0);
    CHECK(arena.statistics().cap_bytes == 2 * kStep);
}

TEST(arena_slot_is_writable_and_has_the_size_asked_for) {
    Arena arena(4 * kStep, 4 * kStep);
    const auto slot = arena.allocate(kStep + 1000);
    CHECK(slot->bytes() == kStep + 1000);
    std::memset(slot->data(), 3, slot->bytes());
    CHECK(slot->data()[kStep + 999] == 3);
    const ArenaStatistics statistics = arena.statistics();
    CHECK(statistics.committed_bytes == 2 * kStep);
    CHECK(statistics.live_slots == 1);
    CHECK(statistics.live_bytes == kStep + 4096);
    CHECK(statistics.peak_live_bytes == kStep + 4096);
    CHECK(statistics.peak_committed_bytes == 2 * kStep);
}

TEST(arena_poisons_slots_as_they_are_handed_out_and_as_they_go_free) {
    Arena arena(4 * kStep, 4 * kStep);
    const auto all_are = [](const unsigned char* data, std::size_t bytes, unsigned char value) {
        return std::all_of(data, data + bytes, [=](unsigned char byte) { return byte == value; });
    };
    const auto neighbour = arena.allocate(5000);
    CHECK(all_are(neighbour->data(), 5000, 0));
    arena.set_poisoning(true);
    auto slot = arena.allocate(10'000);
    unsigned char* const data = slot->data();
    CHECK(all_are(data, 10'000, Arena::kPoison));
    std::memset(data, 7, 10'000);
    slot.reset();
    arena.statistics();  // takes note of what went free
    CHECK(all_are(data, 10'000, Arena::kPoison));
    CHECK(all_are(neighbour->data(), 5000, 0));
    arena.set_poisoning(false);
    std::memset(data, 7, 10'000);
    slot = arena.allocate(10'000);
    CHECK(slot->data() == data);
    CHECK(all_are(data, 10'000, 7));
}

TEST(arena_refuses_a_cap_below_one_step_or_above_its_reservation) {
    CHECK_THROWS(Error, Arena(4 * kStep, kStep - 1));
    CHECK_THROWS(Error, Arena(4 * kStep, 5 * kStep));
    Arena arena(4 * kStep, kStep);
    CHECK_THROWS(Error, arena.set_cap(5 * kStep));
    arena.set_cap(4 * kStep);
    CHECK(arena.statistics().cap_bytes == 4 * kStep);
}

TEST(arena_cap_holds_under_threads) {
    constexpr std::size_t kCap = 2 * kStep;
    Arena arena(4 * kStep, kCap);
    std::atomic<std::size_t> live{0};
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
        threads.emplace_back([&arena, &live, seed] {
            std::vector<std::shared_ptr<Slot>> mine;
            for (unsigned i = 0; i < 200; ++i) {
                const std::size_t bytes = (1 + (i * 7 + seed * 3) % 13) * kMiB;
                try {
                    mine.push_back(arena.allocate(bytes));
                    CHECK(live.fetch_add(bytes) + bytes <= kCap);
                } catch (const ArenaFull&) {
                }
                if (mine.size() > 4 || (i % 5 == 0 && !mine.empty())) {
                    live.fetch_sub(mine.front()->bytes());
                    mine.erase(mine.begin());
                }
                CHECK(arena.statistics().committed_bytes <= kCap);
            }
            for (const auto& slot : mine) {
                live.fetch_sub(slot->bytes());
            }
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    CHECK(arena.statistics().live_slots == 0);
    CHECK(arena.statistics().live_bytes == 0);
    CHECK(arena.statistics().peak_committed_bytes <= kCap);
}

TEST(arena_pins_what_is_committed_and_what_will_be) {
    HostDevice device(0);
    Arena arena(4 * kStep, 4 * kStep);
    const auto before = arena.allocate(kStep);
    CHECK(arena.statistics().pinned_bytes == 0);
    arena.enable_pinning(device);
    CHECK(arena.statistics().pinned_bytes == kStep);
    const auto after = arena.allocate(kStep);
    CHECK(arena.statistics().pinned_bytes == 2 * kStep);
}

TEST(arena_goes_on_pageable_and_keeps_the_reason_when_pinning_is_refused) {
    HostDevice device(0);
    Arena arena(4 * kStep, 4 * kStep);
    arena.enable_pinning(device);
    const auto pinned = arena.allocate(kStep);
    device.refuse_pinning("the limit on locked memory");
    const auto pageable = arena.allocate(2 * kStep);
    std::memset(pageable->data(), 1, pageable->bytes());
    device.refuse_pinning("");
    const auto later = arena.allocate(kStep);
    const ArenaStatistics statistics = arena.statistics();
    CHECK(statistics.pin_refusal == "the limit on locked memory");
    CHECK(statistics.pinned_bytes == kStep);
    CHECK(statistics.committed_bytes == 4 * kStep);
}

TEST(arena_keeps_its_first_steps_pinned_when_later_ones_are_refused) {
    HostDevice device(0);
    device.refuse_pinning("out of memory", 2 * kStep + kStep / 2);
    Arena arena(4 * kStep, 4 * kStep);
    arena.enable_pinning(device);
    const auto slot = arena.allocate(3 * kStep);
    CHECK(arena.statistics().pin_refusal == "out of memory");
    CHECK(arena.statistics().pinned_bytes == 2 * kStep);
    const auto later = arena.allocate(kStep);
    CHECK(arena.statistics().pinned_bytes == 2 * kStep);
    CHECK(arena.statistics().committed_bytes == 4 * kStep);
}

TEST(arena_pins_its_first_steps_again_after_a_trim_and_asks_for_no_more) {
    HostDevice device(0);
    device.refuse_pinning("out of memory", kStep);
    Arena arena(4 * kStep, 4 * kStep);
    arena.enable_pinning(device);
    arena.allocate(3 * kStep).reset();
    arena.trim();
    CHECK(arena.statistics().pinned_bytes == 0);
    arena.allocate(3 * kStep).reset();
    CHECK(arena.statistics().pinned_bytes == kStep);
    arena.trim();
    device.refuse_pinning("");
    const auto slot = arena.allocate(3 * kStep);
    CHECK(arena.statistics().pinned_bytes == kStep);
    CHECK(arena.statistics().pin_refusal == "out of memory");
}

TEST(arena_in_steady_state_commits_and_maps_nothing) {
    HostDevice device(0);
    Arena arena(8 * kStep, 8 * kStep);
    arena.enable_pinning(device);
    const auto first = arena.allocate(1);
    unsigned char* const begin = first->data() - first->offset();
    const auto round = [&arena] {
        std::vector<std::shared_ptr<Slot>> slots;
        for (std::size_t i = 0; i < 16; ++i) {
            slots.push_back(arena.allocate((3 + i * 7 % 11) * kMiB + 1000 * i));
            if (i % 5 == 4) {
                slots.erase(slots.begin());
            }
        }
        while (!slots.empty()) {
            slots.pop_back();
        }
    };
    round();
    const ArenaStatistics before = arena.statistics();
    const std::size_t regions = mapped_regions(begin, 8 * kStep);
    CHECK(before.committed_bytes >= 2 * kStep && regions >= 2);
    for (int i = 0; i < 20; ++i) {
        round();
        const ArenaStatistics now = arena.statistics();
        CHECK(now.committed_bytes == before.committed_bytes);
        CHECK(now.pinned_bytes == before.pinned_bytes);
        CHECK(now.peak_committed_bytes == before.peak_committed_bytes);
        CHECK(now.peak_live_bytes == before.peak_live_bytes);
        CHECK(mapped_regions(begin, 8 * kStep) == regions);
    }
}

TEST(trim_returns_memory_and_a_later_slot_is_usable) {
    HostDevice device(0);
    Arena arena(4 * kStep, 4 * kStep);
    arena.enable_pinning(device);
    auto low = arena.allocate(1000);
    auto high = arena.allocate(2 * kStep);
    std::memset(high->data(), 5, high->bytes());
    high.reset();
    arena.trim();
    CHECK(arena.statistics().committed_bytes == kStep);
    CHECK(arena.statistics().pinned_bytes == kStep);
    CHECK(arena.statistics().peak_committed_bytes == 3 * kStep);
    high = arena.allocate(2 * kStep);
    CHECK(high->data()[2 * kStep - 1] == 0);
    std::memset(high->data(), 6, high->bytes());
}

TEST(lowering_the_cap_gives_free_memory_back) {
    Arena arena(4 * kStep, 4 * kStep);
    const auto kept = arena.allocate(kStep);
    arena.allocate(2 * kStep).reset();
    arena.set_cap(kStep);
    CHECK(arena.statistics().committed_bytes == kStep);
    CHECK_THROWS(ArenaFull, arena.allocate(1));
    const auto more = [&] { arena.set_cap(2 * kStep), arena.allocate(kStep); };
    more();
    CHECK(arena.statistics().committed_bytes == 2 * kStep);
}

TEST(rule_10_forked_child_that_reads_a_slot_gets_sigsegv) {
    if (harness::kSanitized) {
        harness::skip("a sanitizer catches the signal itself");
        return;
    }
    Arena arena(kStep, kStep);
    const auto slot = arena.allocate(1000);
    slot->data()[0] = 1;
    const int status = harness::run_in_child([&slot] {
        volatile unsigned char* const data = slot->data();
        static_cast<void>(data[0]);
    });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    CHECK(slot->data()[0] == 1);
}

TEST(rule_11_slot_is_not_reused_under_a_living_view) {
    Arena arena(kStep, kStep);
    auto slot = arena.allocate(1000);
    unsigned char* const address = slot->data();
    const std::shared_ptr<Slot> view = slot;
    slot.reset();
    CHECK(arena.allocate(1000)->data() != address);
    CHECK(arena.statistics().live_slots == 1);
}

TEST(rule_13_arena_throws_in_a_forked_child_and_its_destructors_do_nothing) {
    HostDevice device(0);
    auto arena = std::make_unique<Arena>(kStep, kStep);
    auto slot = arena->allocate(1000);
    const int status = harness::run_in_child([&] {
        CHECK_THROWS(EngineUnusable, arena->allocate(1));
        CHECK_THROWS(EngineUnusable, arena->enable_pinning(device));
        CHECK_THROWS(EngineUnusable, arena->set_cap(kStep));
        CHECK_THROWS(EngineUnusable, arena->trim());
        CHECK_THROWS(EngineUnusable, arena->statistics());
        slot.reset();
        arena.reset();
    });
    CHECK(harness::child_passed(status));
    CHECK(arena->statistics().live_slots == 1);
}
