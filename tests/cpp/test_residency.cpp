// What goes to the disk and comes back: the order, the waiting, and what happens when it fails.

#include <cerrno>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "disk_world.h"
#include "harness.h"
#include "injecting_file_system.h"
#include "world.h"

using namespace offload;

namespace {

constexpr std::size_t kStep = Arena::kStepBytes;
constexpr std::size_t kTensor = 8 * kMiB;  // eight of them fill an arena of one step

/// An arena of one step, and a disk behind it.
struct DiskWorld : World {
    explicit DiskWorld(std::size_t disk_bytes = 64 * kTensor) : World(kStep) {
        engine.residency().set_disk(
            std::make_unique<DiskTier>(directory.path(), disk_bytes, files));
    }

    ~DiskWorld() {
        engine.close();  // before `files` goes, which the threads use
    }

    std::vector<std::shared_ptr<Ticket>> store(int count, unsigned first_seed = 0) {
        std::vector<std::shared_ptr<Ticket>> tickets;
        for (int i = 0; i < count; ++i) {
            tickets.push_back(stored(pattern(kTensor, first_seed + i)));
        }
        return tickets;
    }

    Bytes reloaded(const Ticket& ticket) {
        Bytes target(ticket.bytes());
        const auto copy = engine.reload(ticket, target.data(), kCallerStream);
        copy->wait(kCallerStream);
        return target;
    }

    std::string tier(const std::shared_ptr<Ticket>& ticket) { return engine.tier_of(*ticket); }

    std::size_t written_bytes() {
        engine.residency().drain();
        return engine.residency().disk_statistics().transfers.written_bytes;
    }

    /// Waits until dropped tickets, whose last owner may be a callback that ends, are gone.
    void wait_until_disk_is_empty() {
        engine.residency().drain();
        while (engine.residency().disk_statistics().live_extents != 0) {
            std::this_thread::yield();
        }
    }

    TemporaryDirectory directory;
    InjectingFileSystem files;
};

}  // namespace

TEST(tickets_beyond_the_arenas_cap_go_to_the_disk_and_come_back_equal) {
    DiskWorld world;
    auto tickets = world.store(30);
    CHECK(world.arena.statistics().peak_committed_bytes <= kStep);
    CHECK(world.engine.residency().disk_statistics().live_extents >= 22);
    for (int i = 29; i >= 0; --i) {
        CHECK(world.reloaded(*tickets[i]) == pattern(kTensor, i));
    }
    for (int i = 0; i < 30; ++i) {  // a graph that is kept is walked again
        CHECK(world.reloaded(*tickets[i]) == pattern(kTensor, i));
    }
    tickets.clear();
    world.engine.drain();
    world.wait_until_disk_is_empty();
    CHECK(world.arena.statistics().live_slots == 0);
    CHECK(world.directory.empty());
}

TEST(nothing_is_written_while_the_arena_has_room) {
    DiskWorld world;
    const auto tickets = world.store(5);
    CHECK(world.written_bytes() == 0);
    for (const auto& ticket : tickets) {
        CHECK(world.tier(ticket) == "host");
    }
}

TEST(what_was_stored_first_leaves_first) {
    DiskWorld world;
    const auto tickets = world.store(12);
    CHECK(world.tier(tickets[0]) == "disk");
    CHECK(world.tier(tickets[3]) == "disk");
    CHECK(world.tier(tickets[9]) == "host");
    CHECK(world.tier(tickets[11]) == "host");
}

TEST(a_ticket_that_was_put_last_stays) {
    DiskWorld world;
    auto tickets = world.store(3);
    world.engine.put_last(*tickets[0]);
    const auto more = world.store(7, 3);
    CHECK(world.tier(tickets[0]) == "host");
    CHECK(world.tier(tickets[1]) == "disk");
    CHECK(world.tier(tickets[2]) == "disk");
    CHECK(world.reloaded(*tickets[0]) == pattern(kTensor, 0));
}

TEST(a_written_ticket_keeps_its_slot_until_the_room_is_needed) {
    DiskWorld world;
    const auto tickets = world.store(8);
    CHECK(world.written_bytes() > 0);  // behind the last ones, before the arena is full
    CHECK(world.tier(tickets[0]) == "host");
    CHECK(world.reloaded(*tickets[0]) == pattern(kTensor, 0));
    CHECK(world.files.calls('r').empty());
}

TEST(bytes_read_back_are_not_written_again) {
    DiskWorld world;
    auto tickets = world.store(16);
    const std::size_t written = world.written_bytes();
    for (int round = 0; round < 2; ++round) {
        for (int i = 0; i < 8; ++i) {
            CHECK(world.reloaded(*tickets[i]) == pattern(kTensor, i));
        }
    }
    CHECK(world.written_bytes() - written <=
          8 * kTensor);  // those that had not been written before
}

TEST(a_ticket_that_leaves_is_written_without_need_and_gives_its_slot_up) {
    DiskWorld world;
    const Bytes source = pattern(kTensor, 1);
    const auto ticket =
        world.engine.offload(world.device, source.data(), kTensor, kCallerStream, true);
    ticket->offload_copy()->synchronize();
    world.engine.retire();
    world.engine.residency().drain();
    CHECK(world.tier(ticket) == "disk");
    CHECK(world.arena.statistics().live_slots == 0);
    CHECK(world.reloaded(*ticket) == source);
}

TEST(a_reload_from_the_disk_waits_for_the_read) {
    DiskWorld world;
    auto tickets = world.store(12);
    world.engine.residency().drain();
    Bytes target(kTensor);
    CallGate gate;
    world.files.on_read = [&gate](std::size_t) { gate.pass(); };
    tickets.resize(6);  // room in the arena
    const auto copy = world.engine.try_reload(*tickets[0], target.data(), kCallerStream);
    CHECK(copy != nullptr);
    gate.wait_held(1);
    world.let_others_run();
    CHECK(!copy->done());
    CHECK(copy->would_block(kCallerStream) && copy->would_block(world.compute));
    CHECK(!world.engine.idle());
    gate.open();
    copy->wait(kCallerStream);
    CHECK(target == pattern(kTensor, 0));
    CHECK(copy->stall_ms() > 0);
}

TEST(a_reload_without_room_for_its_bytes_says_so) {
    DiskWorld world;
    auto tickets = world.store(12);
    world.engine.residency().drain();
    std::vector<std::shared_ptr<Slot>> views;  // slots that cannot be given up
    for (const auto& ticket : tickets) {
        if (world.tier(ticket) == "host") {
            views.push_back(world.engine.host_slot(*ticket));
        }
    }
    Bytes target(kTensor);
    CHECK(world.arena.live_bytes() + kTensor > kStep);
    CHECK_THROWS(ArenaFull, world.engine.reload(*tickets[0], target.data(), kCallerStream));
    views.clear();
    CHECK(world.reloaded(*tickets[0]) == pattern(kTensor, 0));
}

TEST(reloads_read_ahead_what_stands_before) {
    DiskWorld world;
    auto tickets = world.store(20);
    world.engine.residency().drain();
    while (tickets.size() > 10) {
        tickets.pop_back();  // what backward has used
    }
    CHECK(world.tier(tickets[9]) == "disk" && world.tier(tickets[5]) == "disk");
    CHECK(world.reloaded(*tickets[9]) == pattern(kTensor, 9));
    world.engine.residency().drain();
    CHECK(world.tier(tickets[8]) == "host" && world.tier(tickets[5]) == "host");
    CHECK(world.tier(tickets[0]) == "disk");
}

TEST(an_offload_waits_for_the_disk_when_the_arena_is_full) {
    DiskWorld world;
    CallGate gate;
    world.files.on_write = [&gate](std::size_t) { gate.pass(); };
    auto tickets = world.store(8);
    const Bytes source = pattern(kTensor, 8);
    CHECK(world.engine.try_offload(world.device, source.data(), kTensor, kCallerStream) == nullptr);
    std::thread thread([&] { tickets.push_back(world.stored(source)); });
    gate.wait_held(2);
    world.let_others_run();
    CHECK(world.engine.statistics().offloads == 8);
    gate.open();
    thread.join();
    for (int i = 0; i < 9; ++i) {
        CHECK(world.reloaded(*tickets[i]) == pattern(kTensor, i));
    }
}

TEST(a_disk_that_cannot_write_makes_the_arena_full_and_loses_nothing) {
    DiskWorld world;
    world.files.write_fault.set(EIO, 0, -1);
    auto tickets = world.store(8);
    CHECK_THROWS(ArenaFull, world.store(1));
    CHECK(!world.engine.residency().statistics().write_refusal.empty());
    for (int i = 0; i < 8; ++i) {
        CHECK(world.reloaded(*tickets[i]) == pattern(kTensor, i));
    }
    world.files.write_fault.set(0, 0, 0);
    const auto more = world.store(8, 8);
    CHECK(world.engine.residency().statistics().write_refusal.empty());
    CHECK(world.reloaded(*tickets[0]) == pattern(kTensor, 0));
    CHECK(world.reloaded(*more[7]) == pattern(kTensor, 15));
}

TEST(a_full_disk_makes_the_arena_full_and_both_go_on) {
    DiskWorld world(4 * kTensor);
    std::vector<std::shared_ptr<Ticket>> tickets;
    CHECK_THROWS(ArenaFull, [&] {
        for (int i = 0; i < 20; ++i) {
            tickets.push_back(world.stored(pattern(kTensor, i)));
        }
    }());
    CHECK(tickets.size() >= 11);
    CHECK(!world.engine.residency().statistics().write_refusal.empty());
    while (!tickets.empty()) {  // as backward goes, and gives room to read into
        const auto seed = static_cast<unsigned>(tickets.size() - 1);
        CHECK(world.reloaded(*tickets.back()) == pattern(kTensor, seed));
        tickets.pop_back();
    }
    tickets = world.store(11);
    CHECK(world.reloaded(*tickets[0]) == pattern(kTensor, 0));
}

TEST(a_read_that_fails_poisons_its_copy_and_may_be_tried_again) {
    DiskWorld world;
    auto tickets = world.store(12);
    world.engine.residency().drain();
    tickets.resize(6);
    world.files.read_fault.set(EIO, 0, -1);
    Bytes target(kTensor);
    const auto copy = world.engine.reload(*tickets[0], target.data(), kCallerStream);
    CHECK_THROWS(CopyFailed, copy->wait(kCallerStream));
    CHECK_THROWS(CopyFailed, copy->wait(world.compute));
    CHECK(copy->done() && !copy->error().empty());
    CHECK(world.engine.statistics().failed_copies == 1);
    world.files.read_fault.set(0, 0, 0);
    CHECK(world.reloaded(*tickets[0]) == pattern(kTensor, 0));
}

TEST(tickets_dropped_while_they_are_written_leave_nothing) {
    DiskWorld world;
    CallGate gate;
    world.files.on_write = [&gate](std::size_t) { gate.pass(); };
    auto tickets = world.store(8);
    gate.wait_held(2);
    tickets.clear();
    gate.open();
    world.wait_until_disk_is_empty();
    world.engine.drain();
    CHECK(world.arena.statistics().live_slots == 0);
}

TEST(a_ticket_on_the_disk_shows_its_bytes_on_the_host) {
    DiskWorld world;
    auto tickets = world.store(12);
    world.engine.residency().drain();
    CHECK(world.tier(tickets[0]) == "disk");
    CHECK(slot_bytes(world.engine, *tickets[0]) == pattern(kTensor, 0));
}

TEST(the_disk_is_changed_only_while_it_is_empty) {
    DiskWorld world;
    auto tickets = world.store(12);
    CHECK_THROWS(Error, world.engine.residency().set_disk(nullptr));
    tickets.clear();
    world.wait_until_disk_is_empty();
    world.engine.residency().set_disk(nullptr);
    CHECK(!world.engine.residency().has_disk());
    CHECK_THROWS(ArenaFull, world.store(9));
}

TEST(closing_ends_transfers_that_are_under_way) {
    DiskWorld world;
    auto tickets = world.store(12);
    tickets.resize(6);
    Bytes target(kTensor);
    const auto copy = world.engine.reload(*tickets[0], target.data(), kCallerStream);
    world.engine.close();
    CHECK(copy->done());
    CHECK(target == pattern(kTensor, 0));
    CHECK_THROWS(EngineUnusable, world.engine.reload(*tickets[0], target.data(), kCallerStream));
}

TEST(threads_share_a_small_arena_over_the_disk) {
    DiskWorld world;
    constexpr std::size_t kSmall = 3 * kMiB;
    const auto work = [&](unsigned seed) {
        std::mt19937 random(seed);
        std::vector<std::pair<unsigned, std::shared_ptr<Ticket>>> held;
        for (unsigned i = 0; i < 24; ++i) {
            const unsigned value = 100 * seed + i;
            held.emplace_back(value, world.stored(pattern(kSmall, value)));
            if (random() % 3 == 0) {
                const auto& [expected, ticket] = held[random() % held.size()];
                Bytes target(kSmall);
                const auto copy = world.engine.reload(*ticket, target.data(), kCallerStream);
                copy->wait(kCallerStream);
                CHECK(target == pattern(kSmall, expected));
            }
            if (random() % 4 == 0) {
                held.erase(held.begin() + random() % held.size());
            }
        }
        while (!held.empty()) {
            Bytes target(kSmall);
            const auto copy =
                world.engine.reload(*held.back().second, target.data(), kCallerStream);
            copy->wait(kCallerStream);
            CHECK(target == pattern(kSmall, held.back().first));
            held.pop_back();
        }
    };
    std::thread other([&] { work(1); });
    std::thread third([&] { work(2); });
    work(3);
    other.join();
    third.join();
    world.engine.drain();
    CHECK(world.arena.statistics().peak_committed_bytes <= kStep);
}
