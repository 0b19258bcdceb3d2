// Rules 7 to 9 of the NOTE in copy_engine.h: several streams, several devices, finalizers, capture.

#include <memory>
#include <thread>

#include "check.h"
#include "copy_engine.h"
#include "device_host.h"
#include "forwarding_device.h"
#include "harness.h"
#include "world.h"

using namespace offload;

TEST(rule_07_ticket_is_reloaded_for_two_streams_independently) {
    World world;
    const auto other_stream = world.device.create_stream();
    const Bytes source = pattern(kMiB, 7);
    const Bytes earlier = pattern(kMiB, 8);
    Bytes first(kMiB, 0);
    Bytes second = earlier;
    Bytes seen;
    const auto ticket = world.stored(source);
    Gate gate(world.device, other_stream);
    world.device.enqueue(other_stream, [&] { seen = second; });
    const auto free_copy = world.engine.reload(*ticket, first.data(), world.compute);
    const auto held_copy = world.engine.reload(*ticket, second.data(), other_stream);
    free_copy->synchronize();
    CHECK(first == source);
    world.let_others_run();
    CHECK(!held_copy->done());
    gate.open();
    held_copy->synchronize();
    CHECK(seen == earlier);
    CHECK(second == source);
}

TEST(rule_08_queues_and_bounds_belong_to_the_tensors_device) {
    HostDevice second_device(1);
    World world;
    world.engine.set_max_in_flight_bytes(kMiB);
    const Bytes source = pattern(kMiB, 8);
    CHECK(world.engine.streams(second_device) != world.engine.streams(world.device));
    Gate gate(world.device, world.d2h);
    const auto held = world.offload(source, kCallerStream);
    const auto stream = second_device.create_stream();
    const auto free_ticket = world.engine.offload(second_device, source.data(), kMiB, stream);
    free_ticket->offload_copy()->synchronize();
    CHECK(slot_bytes(world.engine, *free_ticket) == source);
    CHECK(!held->offload_copy()->done());
    CHECK_THROWS(Error, world.offload(source, stream));
    gate.open();
    world.engine.drain();
}

TEST(rule_09_dropping_a_ticket_waits_for_nothing) {
    World world;
    Bytes target(kMiB, 0);
    const Bytes source = pattern(kMiB, 9);
    Gate d2h_gate(world.device, world.d2h);
    Gate h2d_gate(world.device, world.h2d);
    auto ticket = world.offload(source, kCallerStream);
    auto copy = world.engine.reload(*ticket, target.data(), kCallerStream);
    std::thread finalizer([&] {
        ticket.reset();
        copy.reset();
    });
    finalizer.join();
    CHECK(!d2h_gate.reached() || world.engine.statistics().in_flight_bytes == 2 * kMiB);
    d2h_gate.open();
    h2d_gate.open();
    world.engine.drain();
    CHECK(target == source);
    CHECK(world.arena.statistics().live_slots == 0);
}

TEST(rule_09_dropping_a_slot_takes_no_lock_that_is_held_for_long) {
    HostDevice host(0);
    ForwardingDevice device(host);
    Arena arena(2 * Arena::kStepBytes, 2 * Arena::kStepBytes);
    auto slot = arena.allocate(1000);
    Holder holder;
    device.on_pin = [&] { holder.hold(); };
    std::thread thread([&] { arena.enable_pinning(device); });
    holder.wait_held();
    slot.reset();  // the arena's lock is held: a finalizer that takes it hangs here
    holder.let_go();
    thread.join();
    CHECK(arena.statistics().live_slots == 0);
}

TEST(rule_09_offload_and_reload_refuse_while_the_compute_stream_is_captured) {
    HostDevice host(0);
    ForwardingDevice device(host);
    Arena arena(Arena::kStepBytes, Arena::kStepBytes);
    CopyEngine engine(arena);
    const Bytes source = pattern(1000, 9);
    Bytes target(1000);
    const auto ticket = engine.offload(device, source.data(), 1000, kCallerStream);
    device.capturing = true;
    CHECK_THROWS(Error, engine.offload(device, source.data(), 1000, kCallerStream));
    CHECK_THROWS(Error, engine.try_offload(device, source.data(), 1000, kCallerStream));
    CHECK_THROWS(Error, engine.reload(*ticket, target.data(), kCallerStream));
    device.capturing = false;
    engine.reload(*ticket, target.data(), kCallerStream)->synchronize();
    CHECK(target == source);
}
