// What fails under the disk tier is told, and what comes next works.

#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
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
constexpr int kCannotMount = 77;

}  // namespace

TEST(disk_tier_failed_write_is_told_and_the_next_one_works) {
    const TemporaryDirectory directory;
    for (const int error : {EIO, ENOSPC, EDQUOT}) {
        InjectingFileSystem system;
        DiskTier tier(directory.path(), 16 * kMiB, system);
        const auto extent = tier.allocate(kBlock);
        const Bytes content = pattern(kBlock, 1);
        system.write_fault.set(error);
        const std::string told = write_and_wait(tier, extent, Block(content));
        CHECK(contains(told, directory.path()) && contains(told, std::strerror(error)));
        CHECK(tier.statistics().transfers.failed_transfers == 1);
        CHECK(tier.statistics().transfers.written_bytes == 0);
        Block target(kBlock);
        CHECK(write_and_wait(tier, extent, Block(content)).empty());
        CHECK(read_and_wait(tier, extent, target).empty() && target.holds(content));
    }
}

TEST(disk_tier_failed_read_is_told_and_the_next_one_works) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    DiskTier tier(directory.path(), 16 * kMiB, system);
    const auto extent = tier.allocate(kMiB);
    const Bytes content = pattern(kMiB, 1);
    CHECK(write_and_wait(tier, extent, Block(content)).empty());
    Block target(kMiB);
    system.read_fault.set(EIO);
    CHECK(contains(read_and_wait(tier, extent, target), "read: expected"));
    CHECK(tier.statistics().transfers.failed_transfers == 1);
    CHECK(read_and_wait(tier, extent, target).empty() && target.holds(content));
}

TEST(disk_tier_failed_piece_ends_its_transfer_once_and_nothing_else) {
    const TemporaryDirectory directory;
    for (int first = 0; first < 8; ++first) {
        InjectingFileSystem system;
        DiskTier tier(directory.path(), 16 * kMiB, system, kBlock);
        const auto extent = tier.allocate(8 * kBlock);
        const Block source(8 * kBlock);
        system.write_fault.set(EIO, first, 2);  // one a worker
        const Outcome outcome;
        tier.write(extent, source.data(), outcome.callback());
        CHECK(!outcome.wait().empty());
        tier.drain();
        CHECK(outcome.calls() == 1);
        CHECK(system.calls('w').size() <= static_cast<std::size_t>(first) + 2);
        CHECK(tier.statistics().transfers.failed_transfers == 1);
        system.write_fault.set(0, 0, 0);
        CHECK(round_trip(tier, 8 * kBlock));
    }
}

TEST(disk_tier_failed_transfer_ends_after_its_other_piece) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    CallGate gate;
    system.on_write = [&](std::size_t offset) {
        if (offset == 0) {
            gate.pass();
        }
    };
    DiskTier tier(directory.path(), 16 * kMiB, system, kBlock);
    const auto extent = tier.allocate(2 * kBlock);
    CHECK(extent->offset() == 0);
    const Block source(2 * kBlock);
    const Outcome outcome;
    system.write_fault.set(EIO);  // strikes the piece that is not held
    tier.write(extent, source.data(), outcome.callback());
    while (tier.statistics().transfers.failed_transfers == 0) {
        std::this_thread::yield();
    }
    gate.wait_held(1);
    CHECK(outcome.calls() == 0);  // the memory is still in use
    gate.open();
    CHECK(!outcome.wait().empty());
    tier.drain();
    CHECK(outcome.calls() == 1);
}

TEST(disk_tier_full_disk_is_told_and_space_is_asked_for_again) {
    const TemporaryDirectory directory;
    for (const int error : {ENOSPC, EDQUOT}) {
        InjectingFileSystem system;
        DiskTier tier(directory.path(), 16 * kMiB, system);
        const auto kept = tier.allocate(kMiB);
        system.preallocation_fault.set(error);
        try {
            tier.allocate(3 * kMiB);
            CHECK(false);
        } catch (const DiskFull& full) {
            CHECK(full.asked_bytes == 3 * kMiB && full.free_bytes == 15 * kMiB);
            CHECK(full.cap_bytes == 16 * kMiB && full.directory == directory.path());
            CHECK(contains(full.what(), std::strerror(error)));
            CHECK(contains(full.what(), directory.path()));
        }
        CHECK(system.file_bytes == kMiB);
        CHECK(tier.statistics().file_bytes == kMiB && tier.statistics().live_extents == 1);
        CHECK(tier.statistics().peak_live_bytes == kMiB);
        CHECK(round_trip(tier, 3 * kMiB));
    }
}

TEST(disk_tier_preallocation_that_fails_otherwise_is_no_full_disk) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    DiskTier tier(directory.path(), 16 * kMiB, system);
    system.preallocation_fault.set(EIO);
    try {
        tier.allocate(kMiB);
        CHECK(false);
    } catch (const DiskFull&) {
        CHECK(false);
    } catch (const Error& error) {
        CHECK(contains(error.what(), directory.path()));
        CHECK(contains(error.what(), "Input/output error"));
    }
    CHECK(tier.statistics().live_extents == 0 && tier.statistics().file_bytes == 0);
    CHECK(round_trip(tier, kMiB));
}

TEST(disk_tier_file_size_limit_is_a_full_disk) {
    const TemporaryDirectory directory;
    const int status = harness::run_in_child([&] {
        signal(SIGXFSZ, SIG_IGN);
        const rlimit limit{2 * kMiB, 2 * kMiB};
        CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
        DiskTier tier(directory.path(), 64 * kMiB);
        CHECK_THROWS(DiskFull, tier.allocate(kMiB));  // a step is 4 MiB
        DiskTier small(directory.path(), 16 * kMiB);
        CHECK(round_trip(small, kMiB));
        CHECK_THROWS(DiskFull, small.allocate(3 * kMiB));
        CHECK(round_trip(small, kMiB));
        small.close();
        tier.close();
    });
    CHECK(harness::child_passed(status));
}

TEST(disk_tier_fills_a_file_system_of_one_mebibyte) {
    const TemporaryDirectory directory;
    const int status = harness::run_in_child([&] {
        if (unshare(CLONE_NEWNS) != 0 ||
            mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) ||
            mount("none", directory.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
            _exit(kCannotMount);
        }
        DiskTier tier(directory.path(), 8 * kMiB);  // steps of 512 KiB
        std::vector<std::shared_ptr<Extent>> extents{tier.allocate(500000)};
        CHECK_THROWS(DiskFull, tier.allocate(2 * kMiB));
        const Bytes content = pattern(500000, 1);
        CHECK(write_and_wait(tier, extents[0], Block(content)).empty());
        Block target(500000);
        CHECK(read_and_wait(tier, extents[0], target).empty() && target.holds(content));
        extents.clear();
        CHECK(round_trip(tier, 900000));
        tier.close();
    });
    if (WIFEXITED(status) && WEXITSTATUS(status) == kCannotMount) {
        harness::skip("needs to mount a file system");
        return;
    }
    CHECK(harness::child_passed(status));
}

TEST(disk_tier_full_disk_under_a_sparse_file_fails_the_write) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    DiskTier tier(directory.path(), 16 * kMiB, system);
    system.preallocation_fault.set(EOPNOTSUPP, 0, 100);
    const auto extent = tier.allocate(kMiB);
    CHECK(tier.statistics().file_bytes == kMiB);
    const Block source(kMiB);
    system.write_fault.set(ENOSPC);
    CHECK(contains(write_and_wait(tier, extent, source), "No space left on device"));
    CHECK(write_and_wait(tier, extent, source).empty());
}
