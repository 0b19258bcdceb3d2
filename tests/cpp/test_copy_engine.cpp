// Rules 1 to 6 of the NOTE in copy_engine.h. Rules 7 to 9 are in test_copy_engine_streams.cpp, 10
// in test_arena.cpp, 11 and 13 in test_copy_engine_faults.cpp, 12 in test_device_host.cpp.

#include <algorithm>
#include <memory>
#include <thread>

#include "check.h"
#include "copy_engine.h"
#include "device_host.h"
#include "harness.h"
#include "world.h"

using namespace offload;

TEST(offload_and_reload_return_the_same_bytes) {
    World world;
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{63}, std::size_t{1000}, 5 * kMiB}) {
        const Bytes source = pattern(bytes, 7);
        Bytes target(bytes);
        const auto ticket = world.offload(source, kCallerStream);
        const auto copy = world.engine.reload(*ticket, target.data(), kCallerStream);
        copy->wait(kCallerStream);
        CHECK(copy->done() && copy->error().empty());
        CHECK(copy->bytes() == bytes && ticket->bytes() == bytes);
        CHECK(copy->copy_ms() >= 0 && copy->stall_ms() >= 0);
        CHECK(target == source);
    }
    CHECK_THROWS(Error, world.offload(Bytes(), kCallerStream));
}

TEST(rule_01_offload_starts_after_the_work_that_produced_its_tensor) {
    World world;
    const Bytes expected = pattern(kMiB, 1);
    Bytes source(kMiB, 0);
    Gate gate(world.device, world.compute);
    world.device.enqueue(world.compute, [&] { source = expected; });
    const auto ticket = world.offload(source, world.compute);
    world.let_others_run();
    CHECK(!ticket->offload_copy()->done());
    gate.open();
    ticket->offload_copy()->synchronize();
    CHECK(slot_bytes(world.engine, *ticket) == expected);
}

TEST(rule_01_offload_waits_for_no_work_queued_after_the_call) {
    World world;
    const Bytes source = pattern(kMiB, 1);
    const auto ticket = world.offload(source, world.compute);
    Gate gate(world.device, world.compute);
    ticket->offload_copy()->synchronize();
    CHECK(!gate.reached() || slot_bytes(world.engine, *ticket) == source);
    CHECK(slot_bytes(world.engine, *ticket) == source);
}

TEST(rule_02_source_is_busy_until_its_copy_is_done) {
    World world;
    const Bytes source = pattern(kMiB, 2);
    Gate gate(world.device, world.d2h);
    const auto ticket = world.offload(source, kCallerStream);
    world.let_others_run();
    CHECK(!ticket->offload_copy()->done());
    CHECK(world.engine.statistics().in_flight_bytes == kMiB);
    gate.open();
    ticket->offload_copy()->synchronize();
    CHECK(ticket->offload_copy()->done());
    CHECK(world.engine.statistics().in_flight_bytes == 0);
}

TEST(rule_02_bytes_in_flight_are_bounded) {
    World world;
    world.engine.set_max_in_flight_bytes(2 * kMiB);
    const Bytes first = pattern(kMiB, 1);
    const Bytes second = pattern(kMiB, 2);
    const Bytes third = pattern(kMiB, 3);
    const Bytes large = pattern(3 * kMiB, 4);
    Gate gate(world.device, world.d2h);
    world.offload(first, kCallerStream);
    world.offload(second, kCallerStream);
    CHECK(world.engine.try_offload(world.device, third.data(), kMiB, kCallerStream) == nullptr);
    std::shared_ptr<Ticket> blocked;
    std::shared_ptr<Ticket> blocked_large;
    std::thread thread([&] {
        blocked = world.offload(third, kCallerStream);
        blocked->offload_copy()->synchronize();
        // More than the bound: goes alone.
        blocked_large = world.offload(large, kCallerStream);
    });
    world.let_others_run();
    // Hangs here if the blocked thread holds the engine's lock.
    CHECK(world.engine.statistics().offloads == 2);
    CHECK(world.engine.statistics().in_flight_bytes == 2 * kMiB);
    gate.open();
    thread.join();
    world.engine.drain();
    CHECK(slot_bytes(world.engine, *blocked) == third);
    CHECK(slot_bytes(world.engine, *blocked_large) == large);
    CHECK(world.engine.statistics().peak_in_flight_bytes == 3 * kMiB);
}

TEST(rule_03_reload_waits_for_its_own_offload) {
    World world;
    const Bytes source = pattern(kMiB, 3);
    Bytes target(kMiB, 0);
    Gate gate(world.device, world.d2h);
    const auto ticket = world.offload(source, kCallerStream);
    const auto copy = world.engine.reload(*ticket, target.data(), kCallerStream);
    world.let_others_run();
    CHECK(!copy->done());
    gate.open();
    copy->synchronize();
    CHECK(target == source);
}

TEST(rule_03_reload_waits_until_its_buffer_was_given_up_by_earlier_work) {
    World world;
    const Bytes source = pattern(kMiB, 3);
    const Bytes earlier = pattern(kMiB, 4);
    Bytes target = earlier;
    Bytes seen;
    const auto ticket = world.stored(source);
    Gate gate(world.device, world.compute);
    world.device.enqueue(world.compute, [&] { seen = target; });
    const auto copy = world.engine.reload(*ticket, target.data(), world.compute);
    world.let_others_run();
    CHECK(!copy->done());
    gate.open();
    copy->synchronize();
    CHECK(seen == earlier);
    CHECK(target == source);
}

TEST(rule_03_consuming_stream_waits_for_the_reload) {
    World world;
    const Bytes source = pattern(kMiB, 3);
    Bytes target(kMiB, 0);
    Bytes consumed;
    const auto ticket = world.stored(source);
    Gate gate(world.device, world.h2d);
    const auto copy = world.engine.reload(*ticket, target.data(), world.compute);
    CHECK(!copy->would_block(world.compute) && copy->would_block(kCallerStream));
    copy->wait(world.compute);
    world.device.enqueue(world.compute, [&] { consumed = target; });
    world.let_others_run();
    CHECK(!copy->settled());
    gate.open();
    world.synchronize(world.compute);
    CHECK(consumed == source);
    CHECK(!copy->would_block(kCallerStream));
    CHECK(copy->settled());
    CHECK(copy->stall_ms() > 0);
}

TEST(rule_04_slot_is_not_reused_before_its_offload_has_finished) {
    World world;
    const Bytes source = pattern(kMiB, 4);
    Gate gate(world.device, world.d2h);
    auto ticket = world.offload(source, kCallerStream);
    const unsigned char* const address = world.engine.slot_now(*ticket)->data();
    ticket.reset();
    world.engine.retire();
    CHECK(world.arena.statistics().live_slots == 1);
    const auto other = world.offload(source, kCallerStream);
    CHECK(world.engine.slot_now(*other)->data() != address);
    gate.open();
    world.engine.drain();
    CHECK(world.arena.statistics().live_slots == 1);
}

TEST(rule_04_slot_is_not_reused_before_its_reload_has_finished) {
    World world;
    const Bytes source = pattern(kMiB, 4);
    const Bytes other = pattern(kMiB, 5);
    Bytes target(kMiB, 0);
    auto ticket = world.stored(source);
    Gate gate(world.device, world.h2d);
    world.engine.reload(*ticket, target.data(), kCallerStream);
    ticket.reset();
    const auto next = world.stored(other);
    CHECK(world.arena.statistics().live_slots == 2);
    gate.open();
    world.engine.drain();
    CHECK(target == source);
    CHECK(world.arena.statistics().live_slots == 1);
}

TEST(rule_04_retired_copy_gives_its_slot_back_though_its_handle_lives) {
    World world;
    auto ticket = world.stored(pattern(1000, 4));
    const auto copy = ticket->offload_copy();
    ticket.reset();
    world.engine.retire();
    CHECK(world.arena.statistics().live_slots == 0);
    CHECK(copy->done() && copy->bytes() == 1000);
}

TEST(rule_05_buffer_may_be_overwritten_by_work_that_waits_for_its_offload) {
    World world;
    const Bytes original = pattern(kMiB, 5);
    Bytes source = original;
    Gate gate(world.device, world.d2h);
    const auto ticket = world.offload(source, kCallerStream);
    ticket->offload_copy()->wait(world.compute);
    world.device.enqueue(world.compute, [&] { std::fill(source.begin(), source.end(), 0); });
    world.let_others_run();
    gate.open();
    world.synchronize(world.compute);
    CHECK(slot_bytes(world.engine, *ticket) == original);
    CHECK(source[1] == 0);
}

TEST(rule_06_dropped_reload_buffer_is_busy_until_its_copy_is_done) {
    World world;
    Bytes target(kMiB, 0);
    auto ticket = world.stored(pattern(kMiB, 6));
    Gate gate(world.device, world.h2d);
    const auto copy = world.engine.reload(*ticket, target.data(), kCallerStream);
    ticket.reset();
    world.let_others_run();
    CHECK(!copy->done());
    CHECK(!world.engine.idle());
    gate.open();
    copy->synchronize();
    std::fill(target.begin(), target.end(), 9);
    world.engine.drain();
    CHECK(target == Bytes(kMiB, 9));
}
