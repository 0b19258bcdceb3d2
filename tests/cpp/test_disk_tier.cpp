// The disk tier's promises when nothing fails: bytes, space, statistics, lifetimes.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "disk_tier.h"
#include "disk_world.h"
#include "harness.h"
#include "injecting_file_system.h"

using namespace offload;

namespace {

constexpr std::size_t kBlock = DiskFile::kAlignment;
constexpr std::size_t kSizes[] = {1, 511, 512, 513, 4095, 4096, 4097, 8 * kMiB + 3, 40 * kMiB};

using Clock = std::chrono::steady_clock;

double to_ms(Clock::duration time) {
    return std::chrono::duration<double, std::milli>(time).count();
}

/// So that time counted wrongly outweighs the time between two readings of a clock.
void pass_time_since(Clock::time_point begin, Clock::duration time) {
    while (Clock::now() - begin < time) {
        std::this_thread::yield();
    }
}

struct Stored {
    Bytes content;
    std::shared_ptr<Extent> extent;
};

/// Stores, reads and drops extents in random order.
void hammer(DiskTier& tier, unsigned seed) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<std::size_t> sizes(1, 300000);
    std::vector<Stored> stored;
    for (unsigned round = 0; round < 60; ++round) {
        const Bytes content = pattern(sizes(random), seed * 1000 + round);
        const auto extent = tier.allocate(content.size());
        const Block source(content);
        CHECK(write_and_wait(tier, extent, source).empty());
        stored.push_back({content, extent});
        std::shuffle(stored.begin(), stored.end(), random);
        Block target(stored.front().content.size());
        CHECK(read_and_wait(tier, stored.front().extent, target).empty());
        CHECK(target.holds(stored.front().content));
        if (stored.size() > 8) {
            stored.pop_back();
        }
        if (round % 7 == 0) {
            tier.trim();
            CHECK(tier.statistics().live_extents >= stored.size());
        }
    }
}

}  // namespace

TEST(disk_tier_gives_every_size_back_past_the_page_cache) {
    const TemporaryDirectory directory;
    DiskTier tier(directory.path(), 64 * kMiB);
    if (!tier.statistics().direct) {
        harness::skip("no direct I/O in " + directory.path());
        return;
    }
    for (const std::size_t bytes : kSizes) {
        CHECK(round_trip(tier, bytes));
    }
    CHECK(tier.statistics().direct);
    CHECK(directory.empty());
}

TEST(disk_tier_gives_every_size_back_through_the_page_cache) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    system.can_be_direct = false;
    DiskTier tier(directory.path(), 64 * kMiB, system);
    for (const std::size_t bytes : kSizes) {
        CHECK(round_trip(tier, bytes));
    }
    CHECK(!tier.statistics().direct);
    CHECK(directory.empty());
}

TEST(disk_tier_gives_every_size_back_through_short_and_interrupted_transfers) {
    const TemporaryDirectory directory;
    for (const bool direct : {true, false}) {
        InjectingFileSystem system;
        system.can_be_direct = direct;
        system.least_bytes = direct ? kBlock : 1;
        DiskTier tier(directory.path(), 64 * kMiB, system, 16 * kBlock);
        for (const std::size_t bytes : {std::size_t{1}, std::size_t{4097}, kMiB + 3}) {
            system.write_fault.set(EINTR, 1, 5);
            system.read_fault.set(EINTR, 1, 5);
            CHECK(round_trip(tier, bytes));
        }
        CHECK(tier.statistics().transfers.failed_transfers == 0);
    }
}

TEST(disk_tier_keeps_many_extents_of_many_threads_apart) {
    const TemporaryDirectory directory;
    DiskTier tier(directory.path(), 64 * kMiB, real_file_system(), 16 * kBlock);
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
        threads.emplace_back([&tier, seed] { hammer(tier, seed); });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    tier.drain();
    const DiskStatistics statistics = tier.statistics();
    CHECK(statistics.live_extents == 0 && statistics.live_bytes == 0);
    CHECK(statistics.transfers.failed_transfers == 0);
}

TEST(disk_tier_splits_a_large_tensor_between_its_threads) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    CallGate gate;
    system.on_write = [&](std::size_t) { gate.pass(); };
    DiskTier tier(directory.path(), 64 * kMiB, system);
    const Block source(pattern(2 * DiskTier::kPieceBytes + 1, 1));
    const Outcome outcome;
    tier.write(tier.allocate(2 * DiskTier::kPieceBytes + 1), source.data(), outcome.callback());
    gate.wait_held(2);
    gate.open();
    CHECK(outcome.wait().empty());
    const auto writes = system.calls('w');
    CHECK(writes.size() == 3);
    for (const auto& write : writes) {
        const bool last = write.offset == 2 * DiskTier::kPieceBytes;
        CHECK(write.bytes == (last ? kBlock : DiskTier::kPieceBytes));
    }
}

TEST(disk_tier_uses_no_space_before_it_is_asked_and_grows_in_steps) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    DiskTier tier(directory.path(), 16 * kMiB, system);
    CHECK(tier.statistics().file_bytes == 0 && tier.statistics().cap_bytes == 16 * kMiB);
    const auto small = tier.allocate(1);
    CHECK(tier.statistics().file_bytes == kMiB && system.file_bytes == kMiB);
    const auto large = tier.allocate(kMiB);
    CHECK(tier.statistics().file_bytes == 2 * kMiB && system.file_bytes == 2 * kMiB);
    CHECK(small->bytes() == 1 && large->offset() == kBlock);
    CHECK_THROWS(Error, tier.allocate(0));
    CHECK_THROWS(Error, DiskTier(directory.path(), kBlock - 1));
    DiskTier smallest(directory.path(), kBlock);
    CHECK(round_trip(smallest, kBlock));
}

TEST(disk_tier_full_tells_the_numbers_and_changes_nothing) {
    const TemporaryDirectory directory;
    DiskTier tier(directory.path(), 16 * kMiB);
    auto first = tier.allocate(10 * kMiB);
    try {
        tier.allocate(7 * kMiB);
        CHECK(false);
    } catch (const DiskFull& full) {
        CHECK(full.directory == directory.path());
        CHECK(full.asked_bytes == 7 * kMiB && full.free_bytes == 6 * kMiB);
        CHECK(full.cap_bytes == 16 * kMiB);
        CHECK(contains(full.what(), directory.path()) && contains(full.what(), "disk cap"));
    }
    CHECK(tier.statistics().file_bytes == 10 * kMiB);
    CHECK(round_trip(tier, 6 * kMiB));
    first.reset();
    CHECK(round_trip(tier, 16 * kMiB));
}

TEST(disk_tier_trim_gives_space_behind_the_last_live_extent_back) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    DiskTier tier(directory.path(), 16 * kMiB, system);
    auto low = tier.allocate(kMiB);
    const Bytes content = pattern(kMiB, 1);
    auto middle = tier.allocate(kMiB);
    CHECK(write_and_wait(tier, middle, Block(content)).empty());
    auto high = tier.allocate(8 * kMiB);
    low.reset();
    tier.trim();
    CHECK(system.file_bytes == 10 * kMiB);
    high.reset();
    tier.trim();
    CHECK(system.file_bytes == 2 * kMiB && tier.statistics().file_bytes == 2 * kMiB);
    Block target(kMiB);
    CHECK(read_and_wait(tier, middle, target).empty() && target.holds(content));
    CHECK(round_trip(tier, 8 * kMiB));
    middle.reset();
    tier.trim();
    CHECK(system.file_bytes == 0);
    system.truncation_fault.set(EIO);
    CHECK(round_trip(tier, kMiB));
    CHECK(contains(error_of([&] { tier.trim(); }), "trim: expected to shorten the file in"));
    CHECK(round_trip(tier, 2 * kMiB));
    tier.trim();
    CHECK(system.file_bytes == 0);
}

TEST(disk_tier_statistics_count_blocks_time_and_peaks) {
    const TemporaryDirectory directory;
    DiskTier tier(directory.path(), 16 * kMiB);
    {
        const auto extent = tier.allocate(kBlock + 1);
        const Block source(kBlock + 1);
        CHECK(write_and_wait(tier, extent, source).empty());
        Block target(kBlock + 1);
        CHECK(read_and_wait(tier, extent, target).empty());
        CHECK(read_and_wait(tier, extent, target).empty());
        tier.drain();
        CHECK(tier.statistics().live_bytes == 2 * kBlock && tier.statistics().live_extents == 1);
    }
    const DiskStatistics statistics = tier.statistics();
    CHECK(statistics.directory == directory.path());
    CHECK(statistics.live_bytes == 0 && statistics.live_extents == 0);
    CHECK(statistics.peak_live_bytes == 2 * kBlock);
    CHECK(statistics.transfers.written_bytes == 2 * kBlock);
    CHECK(statistics.transfers.read_bytes == 4 * kBlock);
    CHECK(statistics.transfers.write_ms > 0 && statistics.transfers.read_ms > 0);
    CHECK(statistics.transfers.queued_transfers == 0);
    CHECK(statistics.transfers.failed_transfers == 0);
}

TEST(disk_tier_counts_time_once_while_both_threads_work) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    CallGate gate;
    system.on_write = [&](std::size_t) { gate.pass(); };
    const Block source(kBlock);
    DiskTier tier(directory.path(), 16 * kMiB, system);
    const auto ignore = [](const std::string&) {};
    const auto begin = Clock::now();
    tier.write(tier.allocate(kBlock), source.data(), ignore);
    gate.wait_held(1);
    const auto first_held = Clock::now();
    pass_time_since(first_held, first_held - begin);
    tier.write(tier.allocate(kBlock), source.data(), ignore);
    gate.wait_held(2);
    const auto both_held = Clock::now();
    pass_time_since(both_held, 4 * (both_held - begin));
    const auto asked = Clock::now();
    CHECK(tier.statistics().transfers.write_ms >= to_ms(asked - first_held));
    gate.open();
    tier.drain();
    CHECK(tier.statistics().transfers.write_ms <= to_ms(Clock::now() - begin));
    CHECK(tier.statistics().transfers.read_ms == 0);
}

TEST(disk_tier_refuses_foreign_extents_and_unaligned_memory) {
    const TemporaryDirectory directory;
    DiskTier tier(directory.path(), 16 * kMiB);
    DiskTier other(directory.path(), 16 * kMiB);
    const Block block(2 * kBlock);
    const auto ignore = [](const std::string&) {};
    const auto extent = tier.allocate(kBlock);
    CHECK_THROWS(Error, other.write(extent, block.data(), ignore));
    CHECK_THROWS(Error, tier.read(nullptr, block.data(), ignore));
    CHECK_THROWS(Error, tier.write(extent, block.data() + 512, ignore));
    CHECK_THROWS(Error, tier.write(extent, block.data(), nullptr));
    CHECK_THROWS(Error, DiskTier(directory.path(), 16 * kMiB, real_file_system(), 100));
    CHECK(write_and_wait(tier, extent, block).empty());
}

TEST(disk_tier_extents_may_die_on_any_thread_and_after_their_tier) {
    const TemporaryDirectory directory;
    auto tier = std::make_unique<DiskTier>(directory.path(), 16 * kMiB);
    std::vector<std::shared_ptr<Extent>> extents;
    for (int i = 0; i < 100; ++i) {
        extents.push_back(tier->allocate(kBlock));
    }
    std::thread([&] { extents.resize(50); }).join();
    CHECK(tier->statistics().live_extents == 50);
    tier->close();
    extents.resize(25);
    tier.reset();
    extents.clear();
}

TEST(disk_tier_extents_that_die_in_a_forked_child_touch_nothing) {
    ReleasedOffsets released;
    released.reserve(1);
    const int status = harness::run_in_child([&] {
        released.mark(0);
        CHECK(released.take().empty());
    });
    CHECK(harness::child_passed(status));
    released.mark(kBlock);
    CHECK(released.take() == std::vector<std::size_t>{kBlock});
    CHECK(released.take().empty());
}

TEST(disk_tier_is_unusable_in_a_forked_child_and_fine_in_its_parent) {
    const TemporaryDirectory directory;
    auto tier = std::make_unique<DiskTier>(directory.path(), 16 * kMiB);
    auto extent = tier->allocate(kMiB);
    const Bytes content = pattern(kMiB, 1);
    const Block source(content);
    const Outcome outcome;
    auto transfer = tier->write(extent, source.data(), outcome.callback());
    CHECK(outcome.wait().empty());
    tier->drain();
    const int status = harness::run_in_child([&] {
        const auto ignore = [](const std::string&) {};
        CHECK_THROWS(EngineUnusable, tier->allocate(1));
        CHECK_THROWS(EngineUnusable, tier->write(extent, source.data(), ignore));
        CHECK_THROWS(EngineUnusable, tier->read(extent, source.data(), ignore));
        CHECK_THROWS(EngineUnusable, tier->trim());
        CHECK_THROWS(EngineUnusable, tier->drain());
        CHECK_THROWS(EngineUnusable, tier->statistics());
        CHECK_THROWS(EngineUnusable, tier->close());
        CHECK_THROWS(EngineUnusable, transfer->try_cancel());
        extent.reset();
        transfer.reset();
        tier.reset();
    });
    CHECK(harness::child_passed(status));
    Block target(kMiB);
    CHECK(read_and_wait(*tier, extent, target).empty() && target.holds(content));
}
