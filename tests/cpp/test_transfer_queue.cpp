// Order, cancelling, callbacks and closing of the disk tier's queue.

#include <atomic>
#include <memory>
#include <stdexcept>
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

/// A tier with pieces of one block, whose reads and writes the test can hold.
struct Gated {
    Gated() {
        system.on_write = [this](std::size_t) {
            if (CallGate* const gate = writes.load()) {
                gate->pass();
            }
        };
        system.on_read = [this](std::size_t) {
            if (CallGate* const gate = reads.load()) {
                gate->pass();
            }
        };
    }

    /// Writes two pieces that hold both workers in `gate`.
    void occupy(CallGate& gate) {
        writes = &gate;
        tier.write(tier.allocate(2 * kBlock), block.data(), occupied.callback());
        gate.wait_held(2);
    }

    TemporaryDirectory directory;
    InjectingFileSystem system;
    std::atomic<CallGate*> writes{nullptr};
    std::atomic<CallGate*> reads{nullptr};
    Block block{8 * kBlock};
    Outcome occupied;
    DiskTier tier{directory.path(), 16 * kMiB, system, kBlock};
};

}  // namespace

TEST(waiting_write_can_be_cancelled_and_is_never_heard_of_again) {
    CallGate gate;
    Gated gated;
    gated.occupy(gate);
    const Outcome outcome;
    auto held = std::make_shared<int>(0);
    const std::weak_ptr<int> watched = held;
    auto extent = gated.tier.allocate(kBlock);
    const std::size_t offset = extent->offset();
    const auto transfer =
        gated.tier.write(extent, gated.block.data(),
                         [held, done = outcome.callback()](const std::string& e) { done(e); });
    held.reset();
    extent.reset();
    CHECK(gated.tier.statistics().transfers.queued_transfers == 1);
    CHECK(gated.tier.statistics().live_extents == 2);
    CHECK(!watched.expired());
    CHECK(transfer->try_cancel());
    CHECK(watched.expired());
    CHECK(gated.tier.statistics().transfers.queued_transfers == 0);
    CHECK(gated.tier.statistics().live_extents == 1);
    CHECK(!transfer->try_cancel());
    gate.open();
    gated.tier.drain();
    CHECK(outcome.calls() == 0 && gated.occupied.calls() == 1);
    for (const auto& call : gated.system.calls('w')) {
        CHECK(call.offset != offset);
    }
    CHECK(gated.tier.statistics().transfers.failed_transfers == 0);
}

TEST(begun_or_finished_transfer_cannot_be_cancelled) {
    CallGate gate;
    Gated gated;
    gated.writes = &gate;
    const Outcome outcome;
    // Four pieces, two of which have begun.
    const auto transfer =
        gated.tier.write(gated.tier.allocate(4 * kBlock), gated.block.data(), outcome.callback());
    gate.wait_held(2);
    CHECK(!transfer->try_cancel());
    gate.open();
    CHECK(outcome.wait().empty());
    CHECK(!transfer->try_cancel());
    gated.tier.drain();
    CHECK(outcome.calls() == 1 && gated.system.calls('w').size() == 4);
}

TEST(transfer_is_either_cancelled_or_called_back_whoever_wins) {
    const TemporaryDirectory directory;
    DiskTier tier(directory.path(), 16 * kMiB);
    const Block block(kBlock);
    const auto extent = tier.allocate(kBlock);
    std::vector<Outcome> outcomes(300);
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (const Outcome& outcome : outcomes) {
        transfers.push_back(tier.write(extent, block.data(), outcome.callback()));
    }
    std::vector<std::atomic<int>> cancelled(outcomes.size());
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 2; ++thread) {
        threads.emplace_back([&] {
            for (std::size_t i = transfers.size(); i-- > 0;) {
                cancelled[i] += transfers[i]->try_cancel() ? 1 : 0;
            }
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    tier.drain();
    for (std::size_t i = 0; i < outcomes.size(); ++i) {
        CHECK(outcomes[i].calls() + cancelled[i] == 1);
    }
}

TEST(reads_overtake_writes_that_wait) {
    CallGate write_gate;
    CallGate read_gate;
    Gated gated;
    const auto extent = gated.tier.allocate(2 * kBlock);
    const Bytes content = pattern(2 * kBlock, 1);
    CHECK(write_and_wait(gated.tier, extent, Block(content)).empty());
    gated.occupy(write_gate);
    gated.reads = &read_gate;
    const Outcome written;
    gated.tier.write(gated.tier.allocate(kBlock), gated.block.data(), written.callback());
    Block target(2 * kBlock);
    const Outcome read;
    gated.tier.read(extent, target.data(), read.callback());
    write_gate.open();
    read_gate.wait_held(2);  // both workers read
    CHECK(written.calls() == 0);
    CHECK(gated.tier.statistics().transfers.queued_transfers == 1);
    read_gate.open();
    CHECK(read.wait().empty() && target.holds(content));
    CHECK(written.wait().empty());
}

TEST(reads_overtake_the_rest_of_a_write_that_has_begun) {
    CallGate write_gate;
    CallGate read_gate;
    Gated gated;
    const auto extent = gated.tier.allocate(2 * kBlock);
    gated.writes = &write_gate;
    gated.reads = &read_gate;
    const Outcome written;
    gated.tier.write(gated.tier.allocate(8 * kBlock), gated.block.data(), written.callback());
    write_gate.wait_held(2);
    Block target(2 * kBlock);
    const Outcome read;
    gated.tier.read(extent, target.data(), read.callback());
    write_gate.open();
    read_gate.wait_held(2);
    CHECK(gated.system.calls('w').size() == 2);
    read_gate.open();
    CHECK(read.wait().empty() && written.wait().empty());
    CHECK(gated.system.calls('w').size() == 8);
}

TEST(transfers_of_a_kind_begin_in_the_order_of_the_calls) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    CallGate gate;
    system.on_write = [&](std::size_t offset) {
        if (offset == 0) {
            gate.pass();  // holds one worker, so that the other one runs alone
        }
    };
    const Block block(2 * kBlock);  // outlives the tier, and with it the held write
    DiskTier tier(directory.path(), 16 * kMiB, system, kBlock);
    const auto ignore = [](const std::string&) {};
    tier.write(tier.allocate(kBlock), block.data(), ignore);
    gate.wait_held(1);
    std::vector<std::size_t> expected;  // without the held one, which comes last
    Outcome last;
    for (int i = 0; i < 20; ++i) {
        const auto extent = tier.allocate(2 * kBlock);
        expected.push_back(extent->offset());
        expected.push_back(extent->offset() + kBlock);
        tier.write(extent, block.data(), i == 19 ? last.callback() : ignore);
    }
    CHECK(last.wait().empty());
    std::vector<std::size_t> begun;
    for (const auto& call : system.calls('w')) {
        begun.push_back(call.offset);
    }
    CHECK(begun == expected);
    gate.open();
}

TEST(callbacks_may_submit_and_drain_waits_for_what_they_submit) {
    Gated gated;
    const Bytes content = pattern(3 * kBlock, 1);
    const Block source(content);
    Block target(3 * kBlock);
    const Outcome outcome;
    const auto extent = gated.tier.allocate(3 * kBlock);
    gated.tier.write(extent, source.data(), [&](const std::string& error) {
        CHECK(error.empty());
        gated.tier.statistics();
        gated.tier.allocate(kBlock);
        gated.tier.read(extent, target.data(), outcome.callback());
    });
    gated.tier.drain();
    CHECK(outcome.calls() == 1 && outcome.wait().empty() && target.holds(content));
}

TEST(callback_that_throws_or_waits_for_itself_harms_nobody) {
    Gated gated;
    const auto extent = gated.tier.allocate(kBlock);
    std::atomic<int> refusals{0};
    gated.tier.write(extent, gated.block.data(), [&](const std::string&) {
        CHECK_THROWS(Error, gated.tier.drain());
        CHECK_THROWS(Error, gated.tier.close());
        ++refusals;
        throw std::runtime_error("not allowed");
    });
    gated.tier.write(extent, gated.block.data(), [&](const std::string&) { throw 1; });
    gated.tier.drain();
    CHECK(refusals == 1);
    CHECK(round_trip(gated.tier, 3 * kBlock));
}

TEST(transfer_owns_its_extent_and_gives_it_up_before_it_calls_back) {
    CallGate gate;
    Gated gated;
    gated.writes = &gate;
    std::size_t live_at_callback = 1;
    const auto transfer = gated.tier.write(
        gated.tier.allocate(kBlock), gated.block.data(),
        [&](const std::string&) { live_at_callback = gated.tier.statistics().live_extents; });
    gate.wait_held(1);
    CHECK(gated.tier.statistics().live_extents == 1);
    gate.open();
    gated.tier.drain();
    CHECK(live_at_callback == 0);  // though the handle lives
}

TEST(close_finishes_what_is_queued_and_what_callbacks_add) {
    CallGate gate;
    Gated gated;
    gated.occupy(gate);
    std::vector<Outcome> outcomes(5);
    const auto extent = gated.tier.allocate(kBlock);
    for (const Outcome& outcome : outcomes) {
        gated.tier.write(extent, gated.block.data(), outcome.callback());
    }
    Block target(kBlock);
    const Outcome chained;
    gated.tier.write(extent, gated.block.data(), [&](const std::string&) {
        gated.tier.read(extent, target.data(), chained.callback());
    });
    std::thread closer([&] { gated.tier.close(); });
    const auto ignore = [](const std::string&) {};
    // Refused as soon as the other thread is closing.
    while (error_of([&] { gated.tier.write(extent, gated.block.data(), ignore); }).empty()) {
        std::this_thread::yield();
    }
    CHECK(gated.occupied.calls() == 0);
    gate.open();
    closer.join();
    for (const Outcome& outcome : outcomes) {
        CHECK(outcome.calls() == 1 && outcome.wait().empty());
    }
    CHECK(chained.calls() == 1 && chained.wait().empty());
    CHECK(open_files_in(gated.directory.path()).empty());
    CHECK_THROWS(EngineUnusable, gated.tier.allocate(1));
    CHECK_THROWS(EngineUnusable, gated.tier.write(extent, gated.block.data(), ignore));
    CHECK_THROWS(EngineUnusable, gated.tier.read(extent, target.data(), ignore));
    CHECK_THROWS(EngineUnusable, gated.tier.trim());
    CHECK_THROWS(EngineUnusable, gated.tier.drain());
    CHECK_THROWS(EngineUnusable, gated.tier.statistics());
    gated.tier.close();
}

TEST(tier_destroyed_with_queued_transfers_finishes_them_and_what_they_call) {
    CallGate gate;
    std::vector<Outcome> outcomes(5);
    std::thread opener;
    {
        Gated gated;
        gated.occupy(gate);
        for (const Outcome& outcome : outcomes) {
            gated.tier.write(gated.tier.allocate(kBlock), gated.block.data(),
                             [&gated, done = outcome.callback()](const std::string& error) {
                                 gated.tier.allocate(kBlock);
                                 done(error);
                             });
        }
        opener = std::thread([&] { gate.open(); });
    }
    opener.join();
    for (const Outcome& outcome : outcomes) {
        CHECK(outcome.calls() == 1 && outcome.wait().empty());
    }
}
