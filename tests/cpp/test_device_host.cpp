#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "device_host.h"
#include "harness.h"
#include "world.h"

using namespace offload;

TEST(stream_runs_its_tasks_in_order_on_another_thread) {
    HostDevice device(0);
    const auto stream = device.create_stream();
    std::vector<int> order;
    for (int i = 0; i < 100; ++i) {
        device.enqueue(stream, [&order, i] { order.push_back(i); });
    }
    const auto event = device.create_event();
    event->record(stream);
    event->synchronize();
    CHECK(order.size() == 100 && order.front() == 0 && order.back() == 99);
}

TEST(rule_12_event_that_was_never_recorded_is_done) {
    HostDevice device(0);
    const auto stream = device.create_stream();
    const auto event = device.create_event();
    CHECK(event->query());
    event->synchronize();
    event->wait(stream);
    event->wait(kCallerStream);
    CHECK(event->error().empty());
    CHECK_THROWS(Error, event->elapsed_ms(*event));
}

TEST(rule_12_recording_again_does_not_change_an_earlier_wait) {
    HostDevice device(0);
    const auto producer = device.create_stream();
    const auto consumer = device.create_stream();
    const auto event = device.create_event();
    const auto consumed = device.create_event();
    event->record(producer);
    event->wait(consumer);
    Gate gate(device, producer);
    event->record(producer);
    CHECK(!event->query());
    consumed->record(consumer);
    consumed->synchronize();
    CHECK(!event->query());
    gate.open();
    event->synchronize();
    CHECK(event->query());
}

TEST(rule_12_wait_holds_the_other_stream_until_the_marker) {
    HostDevice device(0);
    const auto producer = device.create_stream();
    const auto consumer = device.create_stream();
    const auto event = device.create_event();
    const auto consumed = device.create_event();
    std::atomic<int> value{0};
    Gate gate(device, producer);
    device.enqueue(producer, [&value] { value = 1; });
    event->record(producer);
    event->wait(consumer);
    int seen = -1;
    device.enqueue(consumer, [&] { seen = value; });
    consumed->record(consumer);
    gate.wait_reached();
    CHECK(!consumed->query());
    gate.open();
    consumed->synchronize();
    CHECK(seen == 1);
    CHECK(consumed->elapsed_ms(*event) >= 0);
}

TEST(rule_12_caller_stream_is_done_at_once_and_waits_by_blocking) {
    HostDevice device(0);
    const auto stream = device.create_stream();
    const auto event = device.create_event();
    event->record(kCallerStream);
    CHECK(event->query());
    int value = 0;
    device.enqueue(stream, [&value] { value = 1; });
    event->record(stream);
    event->wait(kCallerStream);
    CHECK(value == 1);
    CHECK(device.is_caller(kCallerStream) && !device.is_caller(stream));
    CHECK(!device.is_capturing(stream));
}

TEST(rule_12_no_exception_leaves_a_worker_and_only_the_next_marker_tells_it) {
    HostDevice device(0);
    const auto stream = device.create_stream();
    const auto failed = device.create_event();
    const auto clean = device.create_event();
    device.enqueue(stream, [] { throw std::runtime_error("first"); });
    device.enqueue(stream, [] { throw std::runtime_error("second"); });
    failed->record(stream);
    clean->record(stream);
    clean->synchronize();
    CHECK(failed->error() == "first");
    CHECK(clean->error().empty());
    device.enqueue(stream, [] { throw 5; });
    failed->record(stream);
    failed->synchronize();
    CHECK(!failed->error().empty());
}

TEST(rule_08_event_is_not_recorded_on_another_devices_stream) {
    HostDevice one(0);
    HostDevice two(1);
    const auto stream = two.create_stream();
    const auto event = one.create_event();
    CHECK_THROWS(Error, event->record(stream));
    CHECK_THROWS(Error, one.enqueue(stream, [] {}));
    CHECK_THROWS(Error, one.destroy_stream(stream));
    event->record(kCallerStream);
    event->wait(stream);
}

TEST(destroying_a_stream_runs_what_is_queued_first) {
    HostDevice device(0);
    const auto stream = device.create_stream();
    std::atomic<int> ran{0};
    for (int i = 0; i < 50; ++i) {
        device.enqueue(stream, [&ran] { ++ran; });
    }
    device.destroy_stream(stream);
    CHECK(ran == 50);
    CHECK_THROWS(Error, device.enqueue(stream, [] {}));
}

TEST(shutting_down_runs_everything_even_across_waiting_streams) {
    HostDevice device(0);
    const auto first = device.create_stream();
    const auto second = device.create_stream();
    const auto event = device.create_event();
    std::atomic<int> ran{0};
    Gate gate(device, second);
    event->record(second);
    event->wait(first);
    device.enqueue(first, [&ran] { ++ran; });
    gate.open();
    device.shut_down();
    CHECK(ran == 1);
    CHECK_THROWS(Error, device.create_stream());
    CHECK_THROWS(Error, event->record(first));
    CHECK(event->query());
}

TEST(injected_copy_failures_hit_exactly_the_next_copies) {
    HostDevice device(0);
    const auto stream = device.create_stream();
    const auto failed = device.create_event();
    const auto good = device.create_event();
    const Bytes source = pattern(63, 1);
    Bytes target(63);
    device.fail_next_copies(1);
    device.copy_async(target.data(), source.data(), 63, CopyKind::kDeviceToHost, stream);
    failed->record(stream);
    device.copy_async(target.data(), source.data(), 63, CopyKind::kDeviceToHost, stream);
    good->record(stream);
    good->synchronize();
    CHECK(!failed->error().empty());
    CHECK(good->error().empty());
    CHECK(target == source);
    device.copy_async(target.data(), source.data() + 1, 62, CopyKind::kHostToDevice, kCallerStream);
    CHECK(target[0] == source[1]);
}

TEST(gate_opens_when_it_is_destroyed) {
    HostDevice device(0);
    const auto stream = device.create_stream();
    const auto event = device.create_event();
    {
        Gate gate(device, stream);
        gate.wait_reached();
        CHECK(gate.reached());
        event->record(stream);
        CHECK(!event->query());
    }
    event->synchronize();
}

TEST(rule_13_host_device_throws_in_a_forked_child_and_its_destructor_does_nothing) {
    auto device = std::make_unique<HostDevice>(0);
    const auto stream = device->create_stream();
    auto event = device->create_event();
    auto gate = std::make_unique<Gate>(*device, stream);
    event->record(stream);
    event->wait(device->create_stream());
    const int status = harness::run_in_child([&] {
        CHECK_THROWS(EngineUnusable, device->create_stream());
        CHECK_THROWS(EngineUnusable, device->destroy_stream(stream));
        CHECK_THROWS(EngineUnusable, device->enqueue(stream, [] {}));
        CHECK_THROWS(EngineUnusable, event->query());
        CHECK_THROWS(EngineUnusable, event->record(kCallerStream));
        CHECK_THROWS(EngineUnusable, event->wait(kCallerStream));
        CHECK_THROWS(EngineUnusable, event->synchronize());
        CHECK_THROWS(EngineUnusable, event->error());
        gate.reset();
        event.reset();
        device.reset();
    });
    CHECK(harness::child_passed(status));
    CHECK(!event->query());
    gate->open();
    event->synchronize();
}

TEST(process_devices_are_the_same_object_for_the_same_index) {
    CHECK(&host_device(3) == &host_device(3));
    CHECK(&host_device(3) != &host_device(4));
    CHECK_THROWS(Error, host_device(-1));
    CHECK_THROWS(Error, cuda_device(0));
    CHECK(!built_with_cuda());
    const auto stream = host_device(3).create_stream();
    shut_down_host_devices();
    CHECK_THROWS(Error, host_device(3).enqueue(stream, [] {}));
}
