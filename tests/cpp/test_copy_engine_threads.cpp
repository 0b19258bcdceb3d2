#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "copy_engine.h"
#include "device_host.h"
#include "harness.h"
#include "world.h"

using namespace offload;

namespace {

struct Held {
    Bytes source;
    std::shared_ptr<Ticket> ticket;
};

/// Offloads, reloads, verifies and drops in random order, with a compute stream of its own.
void hammer(World& world, HostDevice& device, unsigned seed) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<std::size_t> sizes(1, 300000);
    const StreamHandle stream = device.create_stream();
    std::deque<Held> held;
    for (unsigned round = 0; round < 150; ++round) {
        held.push_back({pattern(sizes(random), seed * 1000 + round), nullptr});
        Held& newest = held.back();
        newest.ticket = world.engine.offload(device, newest.source.data(), newest.source.size(),
                                             round % 2 == 0 ? stream : kCallerStream);
        const Held& picked = held[random() % held.size()];
        Bytes target(picked.source.size());
        const auto copy = world.engine.reload(*picked.ticket, target.data(), stream);
        if (round % 3 == 0) {
            copy->wait(kCallerStream);
            CHECK(target == picked.source);
        } else {
            bool equal = false;
            copy->wait(stream);
            device.enqueue(stream, [&] { equal = target == picked.source; });
            const auto consumed = device.create_event();
            consumed->record(stream);
            consumed->synchronize();
            CHECK(equal);
        }
        if (round % 7 == 0) {
            world.engine.retire();
            CHECK(world.engine.statistics().offloads > 0);
        }
        if (held.size() > 8) {
            held.front().ticket->offload_copy()->synchronize();  // its source dies here
            held.pop_front();
        }
    }
    world.engine.drain();
    held.clear();
    device.destroy_stream(stream);
}

}  // namespace

TEST(four_threads_offload_reload_and_drop_without_losing_a_byte) {
    HostDevice second_device(1);
    World world;
    world.engine.set_max_in_flight_bytes(kMiB);
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
        threads.emplace_back([&world, &second_device, seed] {
            hammer(world, seed % 2 == 0 ? world.device : second_device, seed);
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    const EngineStatistics statistics = world.engine.statistics();
    CHECK(statistics.offloads == 600 && statistics.reloads == 600);
    CHECK(statistics.in_flight_bytes == 0);
    CHECK(statistics.failed_copies == 0);
    CHECK(statistics.peak_in_flight_bytes <= 2 * kMiB);  // two devices, one bound each
    CHECK(world.arena.statistics().live_slots == 0);
    world.engine.close();
}

TEST(tickets_dropped_on_another_thread_come_back_to_the_arena) {
    World world;
    std::deque<Held> shared;
    std::mutex mutex;
    std::atomic<bool> finished{false};
    std::thread dropper([&] {
        while (true) {
            Held victim;
            {
                std::lock_guard<std::mutex> lock(mutex);
                if (!shared.empty()) {
                    victim = std::move(shared.front());
                    shared.pop_front();
                } else if (finished) {
                    return;
                }
            }
            if (victim.ticket != nullptr) {
                victim.ticket->offload_copy()->synchronize();
            }
        }
    });
    for (unsigned round = 0; round < 200; ++round) {
        Held held{pattern(10000 + round, round), nullptr};
        held.ticket = world.offload(held.source, kCallerStream);
        std::lock_guard<std::mutex> lock(mutex);
        shared.push_back(std::move(held));
    }
    finished = true;
    dropper.join();
    world.engine.drain();
    CHECK(world.arena.statistics().live_slots == 0);
    CHECK(world.arena.statistics().committed_bytes == Arena::kStepBytes);
}
