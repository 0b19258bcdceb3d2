/// What the copy-engine tests share: a device, an arena and an engine of their own, and patterned
/// bytes.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "arena.h"
#include "copy_engine.h"
#include "device_host.h"

using Bytes = std::vector<unsigned char>;

constexpr std::size_t kMiB = std::size_t{1} << 20;

#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread")))  // private memory, and much of it
#endif
inline Bytes pattern(std::size_t bytes, unsigned seed) {
    Bytes result(bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
        result[i] = static_cast<unsigned char>((i + seed) * 2654435761u >> 13);
    }
    return result;
}

/// What the ticket's copy brought to the host; waits for it.
inline Bytes slot_bytes(offload::CopyEngine& engine, const offload::Ticket& ticket) {
    const auto slot = engine.host_slot(ticket);
    return Bytes(slot->data(), slot->data() + slot->bytes());
}

/// Destroyed in the order engine, arena, devices; tickets and gates of a test go first.
struct World {
    explicit World(std::size_t cap_bytes = 4 * offload::Arena::kStepBytes)
        : arena(cap_bytes, cap_bytes),
          engine(arena),
          compute(device.create_stream()),
          d2h(engine.streams(device).first),
          h2d(engine.streams(device).second) {}

    std::shared_ptr<offload::Ticket> offload(const Bytes& source, offload::StreamHandle stream) {
        return engine.offload(device, source.data(), source.size(), stream);
    }

    /// Offloads and waits: a ticket that holds `source`.
    std::shared_ptr<offload::Ticket> stored(const Bytes& source) {
        auto ticket = offload(source, offload::kCallerStream);
        ticket->offload_copy()->synchronize();
        return ticket;
    }

    void synchronize(offload::StreamHandle stream) {
        const auto event = device.create_event();
        event->record(stream);
        event->synchronize();
    }

    /// Gives a copy that wrongly does not wait every chance to run: many round trips through other
    /// threads. A correct engine passes whatever this does.
    void let_others_run() {
        const auto stream = bystander.create_stream();
        for (int i = 0; i < 300; ++i) {
            const auto event = bystander.create_event();
            event->record(stream);
            event->synchronize();
        }
        bystander.destroy_stream(stream);
    }

    offload::HostDevice device{0};
    offload::HostDevice bystander{7};
    offload::Arena arena;
    offload::CopyEngine engine;
    offload::StreamHandle compute;
    offload::StreamHandle d2h;
    offload::StreamHandle h2d;
};
