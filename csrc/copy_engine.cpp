#include "copy_engine.h"

#include <algorithm>
#include <chrono>

#include "check.h"

namespace offload {
CopyEngine::CopyEngine(Arena& arena) : arena_(arena), residency_(arena) {}

CopyEngine::~CopyEngine() {
    if (!owner_.is_current()) {
        return;
    }
    try {
        close();
    } catch (const std::exception&) {
        // The driver may be gone at exit, and nobody is left to tell.
    }
}

std::shared_ptr<Ticket> CopyEngine::offload(Device& device, const void* src, std::size_t bytes,
                                            StreamHandle compute_stream, bool leaves) {
    return offload_or_null(device, src, bytes, compute_stream, leaves, true);
}

std::shared_ptr<Ticket> CopyEngine::try_offload(Device& device, const void* src, std::size_t bytes,
                                                StreamHandle compute_stream, bool leaves) {
    return offload_or_null(device, src, bytes, compute_stream, leaves, false);
}

std::shared_ptr<Ticket> CopyEngine::offload_or_null(Device& device, const void* src,
                                                    std::size_t bytes, StreamHandle compute_stream,
                                                    bool leaves, bool may_block) {
    check_usable("offload");
    OFFLOAD_CHECK(bytes > 0, "offload: expected bytes > 0, got 0");
    check_not_capturing("offload", device, compute_stream);
    // Recorded before anything blocks: what other threads queue meanwhile must not delay the copy.
    const auto produced = device.create_event();
    produced->record(compute_stream);

    Lock lock(mutex_);
    if (!wait_for_room(lock, device, bytes, may_block)) {
        return nullptr;
    }
    lock.unlock();
    const auto slot = allocate_or_null(bytes, may_block);
    if (slot == nullptr) {
        return nullptr;
    }
    auto copy = std::make_shared<Copy>(device, bytes);
    copy->slot_ = slot;
    auto resident = std::make_shared<Resident>(slot, copy);
    auto ticket = std::make_shared<Ticket>(device, resident);
    lock.lock();
    // Again, since another thread may have taken the room.
    if (!wait_for_room(lock, device, bytes, may_block)) {
        return nullptr;
    }
    Queues& queues = queues_of(device);
    queues.d2h_in_flight.push_back(copy);
    queues.d2h_in_flight_bytes += bytes;
    d2h_in_flight_bytes_ += bytes;
    statistics_.in_flight_bytes += bytes;
    statistics_.peak_in_flight_bytes =
        std::max(statistics_.peak_in_flight_bytes, d2h_in_flight_bytes_);
    ++statistics_.offloads;
    statistics_.offloaded_bytes += bytes;
    queue_copy(*copy, slot->data(), src, CopyKind::kDeviceToHost, queues.d2h_stream,
               {produced.get()});
    copy->queued_.reach("");
    lock.unlock();
    residency_.add(resident, leaves);
    residency_.write_behind();
    return ticket;
}

std::shared_ptr<Slot> CopyEngine::allocate_or_null(std::size_t bytes, bool may_block) {
    if (auto slot = arena_.try_allocate(bytes)) {
        return slot;
    }
    residency_.retry_writes();
    bool nothing_moves = false;
    while (true) {
        if (auto slot = nothing_moves ? arena_.allocate(bytes) : arena_.try_allocate(bytes)) {
            return slot;
        }
        // Copies in flight own slots, and what they copy cannot be written to the disk yet.
        const bool was_idle = idle();
        const Residency::Room room = residency_.make_room(bytes);
        if (room == Residency::Room::kMade) {
            continue;
        }
        if (room == Residency::Room::kNone && was_idle) {
            nothing_moves = true;  // what others did since is asked for once more; then it throws
            continue;
        }
        if (!may_block) {
            return nullptr;
        }
        if (room == Residency::Room::kComing) {
            residency_.wait_for_room();
        } else {
            wait_for_all();
        }
    }
}

bool CopyEngine::wait_for_room(Lock& lock, Device& device, std::size_t bytes, bool may_block) {
    while (true) {
        check_usable("offload");
        retire_locked();
        const Queues& queues = queues_of(device);
        if (queues.d2h_in_flight_bytes + bytes <= std::max(max_in_flight_bytes_, bytes)) {
            return true;
        }
        if (!may_block) {
            return false;
        }
        const std::shared_ptr<Copy> oldest = queues.d2h_in_flight.front();
        lock.unlock();
        const auto begin = std::chrono::steady_clock::now();
        oldest->end_->synchronize();
        const std::chrono::duration<double, std::milli> blocked =
            std::chrono::steady_clock::now() - begin;
        lock.lock();
        statistics_.back_pressure_ms += blocked.count();
    }
}

std::shared_ptr<Copy> CopyEngine::reload(const Ticket& ticket, void* dst,
                                         StreamHandle compute_stream) {
    return reload_or_null(ticket, dst, compute_stream, true);
}

std::shared_ptr<Copy> CopyEngine::try_reload(const Ticket& ticket, void* dst,
                                             StreamHandle compute_stream) {
    return reload_or_null(ticket, dst, compute_stream, false);
}

std::shared_ptr<Copy> CopyEngine::reload_or_null(const Ticket& ticket, void* dst,
                                                 StreamHandle compute_stream, bool may_block) {
    check_usable("reload");
    Device& device = ticket.device_;
    check_not_capturing("reload", device, compute_stream);
    const std::string failure = ticket.offload_copy()->error();
    if (!failure.empty()) {
        throw CopyFailed(
            detail::concat("reload: expected a ticket that holds ", ticket.bytes(),
                           " bytes, got one whose copy to the host failed: ", failure));
    }
    const std::shared_ptr<Event> allocated = device.create_event();
    allocated->record(compute_stream);
    auto copy = std::make_shared<Copy>(device, ticket.bytes());
    copy->upstream_ = ticket.offload_copy();
    const bool comes = fetch(
        ticket, copy,
        [this, copy, dst, allocated](const std::shared_ptr<Slot>& slot, const std::string& error) {
            queue_reload(copy, dst, *allocated, slot, error);
        },
        may_block);
    if (!comes) {
        return nullptr;
    }
    residency_.read_ahead(*ticket.resident_);
    return copy;
}

bool CopyEngine::fetch(const Ticket& ticket, const std::shared_ptr<Copy>& copy,
                       const Resident::Ready& ready, bool may_block) {
    std::shared_ptr<Slot> spare;
    while (true) {
        {
            Lock lock(mutex_);
            check_usable("reload");
            awaiting_.insert(copy);
        }
        bool comes = false;
        try {
            comes = residency_.fetch(ticket.resident_, spare, ready);
        } catch (...) {
            Lock lock(mutex_);
            awaiting_.erase(copy);
            throw;
        }
        if (comes) {
            return true;
        }
        {
            // Not while it looks for room: that waits for what is awaited.
            Lock lock(mutex_);
            awaiting_.erase(copy);
        }
        spare = allocate_or_null(ticket.bytes(), may_block);
        if (spare == nullptr) {
            return false;
        }
    }
}

void CopyEngine::queue_reload(const std::shared_ptr<Copy>& copy, void* dst, Event& allocated,
                              const std::shared_ptr<Slot>& slot, const std::string& error) {
    {
        Lock lock(mutex_);
        awaiting_.erase(copy);
        retire_locked();
        ++statistics_.reloads;
        if (error.empty()) {
            Queues& queues = queues_of(copy->device_);
            copy->slot_ = slot;
            queues.h2d_in_flight.push_back(copy);
            statistics_.in_flight_bytes += copy->bytes();
            statistics_.reloaded_bytes += copy->bytes();
            queue_copy(*copy, dst, slot->data(), CopyKind::kHostToDevice, queues.h2d_stream,
                       {&allocated, copy->upstream_->end_.get()});
        } else {
            copy->queue_error_ = error;
            ++statistics_.failed_copies;
        }
    }
    copy->queued_.reach("");
}

std::shared_ptr<Slot> CopyEngine::host_slot(const Ticket& ticket) {
    ticket.offload_copy()->synchronize();
    if (auto slot = slot_now(ticket)) {
        return slot;
    }
    check_usable("host_slot");
    const auto copy = std::make_shared<Copy>(ticket.device_, ticket.bytes());
    std::shared_ptr<Slot> slot;
    fetch(
        ticket, copy,
        [&](const std::shared_ptr<Slot>& arrived, const std::string& error) {
            slot = arrived;
            {
                Lock lock(mutex_);
                awaiting_.erase(copy);
            }
            copy->queue_error_ = error;
            copy->queued_.reach("");
        },
        true);
    copy->synchronize();
    return slot;
}

void CopyEngine::queue_copy(Copy& copy, void* dst, const void* src, CopyKind kind,
                            StreamHandle stream, std::initializer_list<Event*> after) {
    try {
        for (Event* event : after) {
            event->wait(stream);
        }
        copy.begin_->record(stream);
        // Each step of the arena is registered on its own, and one cudaMemcpyAsync must not span
        // two registered ranges.
        std::size_t done = 0;
        while (done < copy.bytes_) {
            const std::size_t position = copy.slot_->offset() + done;
            const std::size_t step_left = Arena::kStepBytes - position % Arena::kStepBytes;
            const std::size_t part = std::min(step_left, copy.bytes_ - done);
            copy.device_.copy_async(static_cast<unsigned char*>(dst) + done,
                                    static_cast<const unsigned char*>(src) + done, part, kind,
                                    stream);
            done += part;
        }
        copy.end_->record(stream);
    } catch (const std::exception& exception) {
        copy.queue_error_ = detail::concat("the copy could not be queued: ", exception.what());
        try {
            // Parts that were queued still run: the copy is done, and its memory free, only after
            // them.
            copy.end_->record(stream);
        } catch (const std::exception&) {
            // The stream is beyond use, and an event that was never recorded counts as done.
        }
    }
}

void CopyEngine::retire() {
    check_usable("retire");
    {
        Lock lock(mutex_);
        retire_locked();
    }
    residency_.write_behind();
}

bool CopyEngine::idle() {
    check_usable("idle");
    Lock lock(mutex_);
    retire_locked();
    return statistics_.in_flight_bytes == 0 && awaiting_.empty();
}

void CopyEngine::drain() {
    check_usable("drain");
    wait_for_all();
    residency_.drain();
}

bool CopyEngine::drained() { return idle() && residency_.idle(); }

void CopyEngine::close() {
    owner_.check("close");
    {
        Lock lock(mutex_);
        if (closed_.exchange(true)) {
            return;
        }
    }
    wait_for_all();
    residency_.close();
    std::map<Device*, Queues> queues;
    {
        Lock lock(mutex_);
        queues.swap(queues_);
    }
    for (const auto& [device, of_device] : queues) {
        device->destroy_stream(of_device.d2h_stream);
        device->destroy_stream(of_device.h2d_stream);
    }
}

void CopyEngine::set_max_in_flight_bytes(std::size_t bytes) {
    check_usable("set_max_in_flight_bytes");
    Lock lock(mutex_);
    max_in_flight_bytes_ = bytes;
}

EngineStatistics CopyEngine::statistics() {
    check_usable("statistics");
    Lock lock(mutex_);
    retire_locked();
    return statistics_;
}

std::pair<StreamHandle, StreamHandle> CopyEngine::streams(Device& device) {
    check_usable("streams");
    Lock lock(mutex_);
    const Queues& queues = queues_of(device);
    return {queues.d2h_stream, queues.h2d_stream};
}

void CopyEngine::wait_for_all() {
    std::vector<std::shared_ptr<Copy>> last;
    {
        Lock lock(mutex_);
        last.assign(awaiting_.begin(), awaiting_.end());
        for (const auto& [device, queues] : queues_) {
            for (const auto* queue : {&queues.d2h_in_flight, &queues.h2d_in_flight}) {
                if (!queue->empty()) {
                    last.push_back(queue->back());  // a queue runs in order
                }
            }
        }
    }
    for (const auto& copy : last) {
        copy->queued_.wait();
        copy->end_->synchronize();
    }
    Lock lock(mutex_);
    retire_locked();
}

CopyEngine::Queues& CopyEngine::queues_of(Device& device) {
    const auto found = queues_.find(&device);
    if (found != queues_.end()) {
        return found->second;
    }
    Queues queues;
    queues.d2h_stream = device.create_stream();
    queues.h2d_stream = device.create_stream();
    return queues_.emplace(&device, std::move(queues)).first->second;
}

void CopyEngine::retire_locked() {
    for (auto& [device, queues] : queues_) {
        retire_queue(queues.d2h_in_flight, &queues.d2h_in_flight_bytes);
        retire_queue(queues.h2d_in_flight, nullptr);
    }
}

void CopyEngine::retire_queue(std::deque<std::shared_ptr<Copy>>& queue, std::size_t* d2h_bytes) {
    while (!queue.empty() && queue.front()->done()) {
        const std::shared_ptr<Copy> copy = std::move(queue.front());
        queue.pop_front();
        copy->slot_.reset();
        statistics_.in_flight_bytes -= copy->bytes();
        if (d2h_bytes != nullptr) {
            *d2h_bytes -= copy->bytes();
            d2h_in_flight_bytes_ -= copy->bytes();
        }
        if (!copy->error().empty()) {
            ++statistics_.failed_copies;
        }
    }
}

void CopyEngine::check_usable(const char* function) const {
    owner_.check(function);
    if (closed_.load()) {
        throw EngineUnusable(detail::concat(
            function, ": expected a running engine, got one that was closed at exit."));
    }
}

void CopyEngine::check_not_capturing(const char* function, Device& device,
                                     StreamHandle stream) const {
    OFFLOAD_CHECK(!device.is_capturing(stream), function,
                  ": expected a compute stream that records no CUDA graph, got stream ", stream,
                  ", which does. Offload outside of the captured region.");
}

}  // namespace offload
