// Rules 11 and 13 of the NOTE in copy_engine.h, the arena running full, and copies that cannot be
// queued.

#include <memory>
#include <string>
#include <thread>

#include "check.h"
#include "copy_engine.h"
#include "device_host.h"
#include "forwarding_device.h"
#include "harness.h"
#include "world.h"

using namespace offload;

namespace {

constexpr std::size_t kStep = Arena::kStepBytes;

}  // namespace

TEST(rule_11_failed_offload_poisons_its_ticket_and_not_the_engine) {
    World world;
    const Bytes source = pattern(1000, 11);
    Bytes target(1000, 0);
    world.device.fail_next_copies(1);
    const auto poisoned = world.offload(source, kCallerStream);
    CHECK_THROWS(CopyFailed, poisoned->offload_copy()->synchronize());
    CHECK(!poisoned->offload_copy()->error().empty());
    CHECK_THROWS(CopyFailed, world.engine.reload(*poisoned, target.data(), kCallerStream));
    CHECK(world.engine.statistics().failed_copies == 1);
    CHECK(world.engine.statistics().in_flight_bytes == 0);

    const auto good = world.stored(source);
    world.engine.reload(*good, target.data(), kCallerStream)->wait(kCallerStream);
    CHECK(target == source);
}

TEST(rule_11_offload_that_fails_after_the_reload_was_queued_shows_on_the_reload) {
    World world;
    const Bytes source = pattern(1000, 11);
    Bytes target(1000, 0);
    Gate gate(world.device, world.d2h);
    world.device.fail_next_copies(1);
    const auto ticket = world.offload(source, kCallerStream);
    const auto copy = world.engine.reload(*ticket, target.data(), kCallerStream);
    CHECK(copy->error().empty());
    gate.open();
    CHECK_THROWS(CopyFailed, copy->wait(kCallerStream));
    CHECK_THROWS(CopyFailed, copy->synchronize());
    CHECK(!copy->error().empty());
    CHECK(copy->copy_ms() == 0);
}

TEST(rule_11_failed_reload_leaves_its_ticket_good) {
    World world;
    const Bytes source = pattern(1000, 11);
    Bytes target(1000, 0);
    const auto ticket = world.stored(source);
    world.device.fail_next_copies(1);
    const auto failed = world.engine.reload(*ticket, target.data(), kCallerStream);
    CHECK_THROWS(CopyFailed, failed->synchronize());
    world.engine.reload(*ticket, target.data(), kCallerStream)->synchronize();
    CHECK(target == source);
}

TEST(rule_11_view_of_a_slot_outlives_its_ticket) {
    World world;
    const Bytes source = pattern(kMiB, 11);
    auto ticket = world.stored(source);
    const std::shared_ptr<Slot> view = world.engine.host_slot(*ticket);
    ticket.reset();
    const auto other = world.stored(pattern(kMiB, 12));
    CHECK(Bytes(view->data(), view->data() + view->bytes()) == source);
}

TEST(rule_11_copy_that_cannot_be_queued_is_a_failed_copy) {
    HostDevice host(0);
    ForwardingDevice device(host);
    Arena arena(2 * kStep, 2 * kStep);
    CopyEngine engine(arena);
    const Bytes source = pattern(kStep + 1000, 11);
    Bytes target(source.size());
    device.copies_until_refusal = 1;
    const auto ticket = engine.offload(device, source.data(), source.size(), kCallerStream);
    CHECK_THROWS(CopyFailed, ticket->offload_copy()->synchronize());
    CHECK_THROWS(CopyFailed, engine.reload(*ticket, target.data(), kCallerStream));
    CHECK(engine.statistics().failed_copies == 1);
    device.copies_until_refusal = -1;
    const Bytes small = pattern(1000, 12);
    const auto good = engine.offload(device, small.data(), small.size(), kCallerStream);
    good->offload_copy()->synchronize();
    CHECK(slot_bytes(engine, *good) == small);
}

TEST(copies_are_split_where_separately_locked_steps_meet) {
    HostDevice host(0);
    ForwardingDevice device(host);
    Arena arena(4 * kStep, 4 * kStep);
    CopyEngine engine(arena);
    const auto shift = arena.allocate(4096);
    const Bytes source = pattern(2 * kStep, 1);
    Bytes target(source.size());
    const auto ticket = engine.offload(device, source.data(), source.size(), kCallerStream);
    const std::vector<std::size_t> parts{kStep - 4096, kStep, 4096};
    CHECK(device.copied_bytes == parts);
    device.copied_bytes.clear();
    engine.reload(*ticket, target.data(), kCallerStream)->synchronize();
    CHECK(device.copied_bytes == parts);
    CHECK(target == source);
}

TEST(offload_waits_for_copies_that_hold_slots_before_it_says_arena_full) {
    World world(kStep);
    world.engine.set_max_in_flight_bytes(4 * kStep);
    const Bytes source = pattern(kStep, 1);
    Gate gate(world.device, world.d2h);
    world.offload(source, kCallerStream);  // dropped at once, but its copy holds the slot
    CHECK(world.engine.try_offload(world.device, source.data(), kStep, kCallerStream) == nullptr);
    std::shared_ptr<Ticket> ticket;
    std::thread thread([&] { ticket = world.offload(source, kCallerStream); });
    world.let_others_run();
    gate.open();
    thread.join();
    ticket->offload_copy()->synchronize();
    CHECK(slot_bytes(world.engine, *ticket) == source);
    CHECK_THROWS(ArenaFull, world.offload(source, kCallerStream));
    CHECK_THROWS(ArenaFull,
                 world.engine.try_offload(world.device, source.data(), kStep, kCallerStream));
}

TEST(rule_13_closed_engine_throws_and_destroying_tickets_is_harmless) {
    World world;
    const Bytes source = pattern(1000, 13);
    Bytes target(1000);
    auto ticket = world.offload(source, kCallerStream);
    auto copy = world.engine.reload(*ticket, target.data(), kCallerStream);
    world.engine.close();
    world.engine.close();
    CHECK(copy->done() && target == source);
    CHECK_THROWS(EngineUnusable, world.offload(source, kCallerStream));
    CHECK_THROWS(EngineUnusable, world.engine.reload(*ticket, target.data(), kCallerStream));
    CHECK_THROWS(EngineUnusable, world.engine.retire());
    CHECK_THROWS(EngineUnusable, world.engine.drain());
    CHECK_THROWS(EngineUnusable, world.engine.idle());
    CHECK_THROWS(EngineUnusable, world.engine.statistics());
    CHECK_THROWS(EngineUnusable, world.engine.streams(world.device));
    CHECK_THROWS(EngineUnusable, world.engine.set_max_in_flight_bytes(1));
    copy.reset();
    ticket.reset();
    CHECK(world.arena.statistics().live_slots == 0);
}

TEST(rule_13_close_finishes_what_was_queued) {
    World world;
    const Bytes source = pattern(kMiB, 13);
    Gate gate(world.device, world.d2h);
    const auto ticket = world.offload(source, kCallerStream);
    std::thread closer([&] { world.engine.close(); });
    world.let_others_run();
    gate.open();
    closer.join();
    CHECK(slot_bytes(world.engine, *ticket) == source);
}

TEST(rule_13_closing_ends_an_offload_that_is_blocked_on_the_bound) {
    World world;
    world.engine.set_max_in_flight_bytes(kMiB);
    const Bytes source = pattern(kMiB, 13);
    Gate gate(world.device, world.d2h);
    const auto first = world.offload(source, kCallerStream);
    bool refused = false;
    std::thread blocked([&] {
        try {
            world.offload(source, kCallerStream);
        } catch (const EngineUnusable&) {
            refused = true;
        }
    });
    world.let_others_run();
    std::thread closer([&] { world.engine.close(); });
    // Once closed, a call that never blocks says so; only then may the blocked one be let go.
    for (bool closed = false; !closed;) {
        try {
            world.engine.retire();
            std::this_thread::yield();
        } catch (const EngineUnusable&) {
            closed = true;
        }
    }
    gate.open();
    blocked.join();
    closer.join();
    CHECK(refused);
}

TEST(rule_13_engine_throws_in_a_forked_child_and_its_destructors_do_nothing) {
    auto world = std::make_unique<World>();
    const Bytes source = pattern(kMiB, 13);
    Bytes target(kMiB, 0);
    auto gate = std::make_unique<Gate>(world->device, world->d2h);
    auto ticket = world->offload(source, kCallerStream);
    auto copy = world->engine.reload(*ticket, target.data(), kCallerStream);
    copy->wait(world->compute);
    const int status = harness::run_in_child([&] {
        CHECK_THROWS(EngineUnusable, world->offload(source, kCallerStream));
        CHECK_THROWS(EngineUnusable, world->engine.reload(*ticket, target.data(), kCallerStream));
        CHECK_THROWS(EngineUnusable, world->engine.retire());
        CHECK_THROWS(EngineUnusable, world->engine.drain());
        CHECK_THROWS(EngineUnusable, world->engine.close());
        CHECK_THROWS(EngineUnusable, world->engine.statistics());
        CHECK_THROWS(EngineUnusable, copy->done());
        CHECK_THROWS(EngineUnusable, copy->error());
        CHECK_THROWS(EngineUnusable, copy->synchronize());
        CHECK_THROWS(EngineUnusable, copy->wait(kCallerStream));
        CHECK_THROWS(EngineUnusable, copy->stall_ms());
        copy.reset();
        ticket.reset();
        gate.reset();
        world.reset();
    });
    CHECK(harness::child_passed(status));
    gate->open();
    copy->synchronize();
    CHECK(target == source);
}

TEST(rule_13_child_forked_while_locks_are_held_neither_hangs_nor_works) {
    HostDevice host(0);
    ForwardingDevice device(host);
    auto arena = std::make_unique<Arena>(2 * kStep, 2 * kStep);
    auto engine = std::make_unique<CopyEngine>(*arena);
    const Bytes source = pattern(1000, 13);
    Holder in_copy;
    Holder in_pin;
    device.on_copy = [&] { in_copy.hold(); };
    device.on_pin = [&] { in_pin.hold(); };
    std::thread offloading(
        [&] { engine->offload(device, source.data(), source.size(), kCallerStream); });
    in_copy.wait_held();
    std::thread pinning([&] { arena->enable_pinning(device); });
    in_pin.wait_held();
    const int status = harness::run_in_child([&] {
        CHECK_THROWS(EngineUnusable, engine->retire());
        CHECK_THROWS(EngineUnusable, engine->idle());
        CHECK_THROWS(EngineUnusable, engine->drain());
        CHECK_THROWS(EngineUnusable, engine->statistics());
        CHECK_THROWS(EngineUnusable, engine->streams(device));
        CHECK_THROWS(EngineUnusable, engine->set_max_in_flight_bytes(1));
        CHECK_THROWS(EngineUnusable, engine->close());
        CHECK_THROWS(EngineUnusable, arena->statistics());
        CHECK_THROWS(EngineUnusable, arena->allocate(1));
        engine.reset();
        arena.reset();
    });
    CHECK(harness::child_passed(status));
    in_copy.let_go();
    in_pin.let_go();
    offloading.join();
    pinning.join();
    engine->drain();
    engine.reset();
}
