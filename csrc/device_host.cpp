#include "device_host.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "check.h"
#include "host_stream.h"
#include "marker.h"

namespace offload {
namespace {

class HostEvent final : public Event {
   public:
    explicit HostEvent(const HostDevice& device) : index_(device.index()), owner_(device.owner()) {}

    void record(StreamHandle stream) override {
        owner_.check("Event::record");
        auto marker = std::make_shared<Marker>();
        if (stream == kCallerStream) {
            marker->reach("");
        } else {
            auto target = find_stream_of("Event::record", stream, index_);
            HostStream* const raw = target.get();
            target->enqueue([marker, raw] { marker->reach(raw->take_error()); });
        }
        std::lock_guard<std::mutex> lock(mutex_);
        marker_ = std::move(marker);
    }

    void wait(StreamHandle stream) override {
        const auto marker = current("Event::wait");
        if (marker == nullptr || marker->reached()) {
            return;
        }
        if (stream == kCallerStream) {
            marker->wait();
        } else {
            find_stream("Event::wait", stream)->enqueue([marker] { marker->wait(); });
        }
    }

    bool query() const override {
        const auto marker = current("Event::query");
        return marker == nullptr || marker->reached();
    }

    void synchronize() const override {
        const auto marker = current("Event::synchronize");
        if (marker != nullptr) {
            marker->wait();
        }
    }

    double elapsed_ms(const Event& start) const override {
        const auto begin = static_cast<const HostEvent&>(start).current("Event::elapsed_ms");
        const auto end = current("Event::elapsed_ms");
        OFFLOAD_CHECK(begin != nullptr && end != nullptr,
                      "elapsed_ms: expected two recorded events");
        return std::chrono::duration<double, std::milli>(end->time() - begin->time()).count();
    }

    std::string error() const override {
        const auto marker = current("Event::error");
        return marker == nullptr ? std::string() : marker->error();
    }

   private:
    std::shared_ptr<Marker> current(const char* function) const {
        owner_.check(function);
        std::lock_guard<std::mutex> lock(mutex_);
        return marker_;
    }

    const int index_;
    const OwnerProcess owner_;
    mutable std::mutex mutex_;
    std::shared_ptr<Marker> marker_;
};

struct HostDeviceTable {
    const OwnerProcess owner;
    std::mutex mutex;
    std::map<int, std::unique_ptr<HostDevice>> devices;
};

HostDeviceTable& host_device_table() {
    static HostDeviceTable* const table = new HostDeviceTable;
    return *table;
}

}  // namespace

HostDevice::~HostDevice() {
    if (owner_.is_current()) {
        shut_down();
    }
}

StreamHandle HostDevice::create_stream() {
    owner_.check("create_stream");
    std::lock_guard<std::mutex> lock(mutex_);
    OFFLOAD_CHECK(!shut_down_, "create_stream: expected a live host device, got one shut down");
    const StreamHandle handle = register_stream(std::make_shared<HostStream>(index_));
    streams_.push_back(handle);
    return handle;
}

void HostDevice::destroy_stream(StreamHandle stream) {
    owner_.check("destroy_stream");
    const auto found = find_stream_of("destroy_stream", stream, index_);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        streams_.erase(std::remove(streams_.begin(), streams_.end(), stream), streams_.end());
    }
    unregister_stream(stream);
    found->finish();
}

std::unique_ptr<Event> HostDevice::create_event() {
    owner_.check("create_event");
    return std::make_unique<HostEvent>(*this);
}

void HostDevice::copy_async(void* dst, const void* src, std::size_t bytes, CopyKind,
                            StreamHandle stream) {
    owner_.check("copy_async");
    bool fails = false;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (failing_copies_ > 0) {
            --failing_copies_;
            fails = true;
        }
    }
    const auto copy = [dst, src, bytes, fails] {
        OFFLOAD_CHECK(!fails, "copy_async: failure injected by fail_next_copies");
        std::memcpy(dst, src, bytes);
    };
    if (stream == kCallerStream) {
        copy();
    } else {
        enqueue(stream, copy);
    }
}

std::string HostDevice::pin(void* address, std::size_t bytes) {
    owner_.check("pin");
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pin_refusal_.empty() && pinned_bytes_ + bytes > refuse_above_bytes_) {
        return pin_refusal_;
    }
    OFFLOAD_CHECK(pinned_.emplace(address, bytes).second,
                  "pin: expected a range that is not pinned, got one that is");
    pinned_bytes_ += bytes;
    return "";
}

void HostDevice::unpin(void* address) {
    owner_.check("unpin");
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pinned_.find(address);
    OFFLOAD_CHECK(found != pinned_.end(), "unpin: expected a pinned range, got one that is not");
    pinned_bytes_ -= found->second;
    pinned_.erase(found);
}

void HostDevice::enqueue(StreamHandle stream, std::function<void()> task) {
    owner_.check("enqueue");
    find_stream_of("enqueue", stream, index_)->enqueue(std::move(task));
}

void HostDevice::fail_next_copies(int count) {
    std::lock_guard<std::mutex> lock(mutex_);
    failing_copies_ = count;
}

void HostDevice::refuse_pinning(const std::string& reason, std::size_t above_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    pin_refusal_ = reason;
    refuse_above_bytes_ = above_bytes;
}

void HostDevice::shut_down() {
    owner_.check("shut_down");
    std::vector<StreamHandle> streams;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        shut_down_ = true;
        streams = streams_;
    }
    for (const StreamHandle stream : streams) {
        destroy_stream(stream);
    }
}

struct Gate::State {
    const OwnerProcess owner;
    Marker reached;
    Marker opened;
};

Gate::Gate(HostDevice& device, StreamHandle stream) : state_(std::make_shared<State>()) {
    device.enqueue(stream, [state = state_] {
        state->reached.reach("");
        state->opened.wait();
    });
}

Gate::~Gate() {
    if (state_->owner.is_current()) {
        open();
    }
}

void Gate::open() { state_->opened.reach(""); }

bool Gate::reached() const { return state_->reached.reached(); }

void Gate::wait_reached() const { state_->reached.wait(); }

HostDevice& host_device(int index) {
    OFFLOAD_CHECK(index >= 0, "host_device: expected an index >= 0, got ", index);
    HostDeviceTable& table = host_device_table();
    table.owner.check("host_device");
    std::lock_guard<std::mutex> lock(table.mutex);
    auto& device = table.devices[index];
    if (device == nullptr) {
        device = std::make_unique<HostDevice>(index);
    }
    return *device;
}

void shut_down_host_devices() {
    HostDeviceTable& table = host_device_table();
    table.owner.check("shut_down_host_devices");
    std::lock_guard<std::mutex> lock(table.mutex);
    for (auto& [index, device] : table.devices) {
        device->shut_down();
    }
}

}  // namespace offload
