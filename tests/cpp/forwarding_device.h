/// A host device whose answers a test can change and whose copies it can count.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "device_host.h"

/// Holds a thread inside a callback: `hold` blocks there until `let_go`, `wait_held` until it is
/// there.
class Holder {
   public:
    void hold() {
        std::unique_lock<std::mutex> lock(mutex_);
        held_ = true;
        changed_.notify_all();
        changed_.wait(lock, [this] { return let_go_; });
    }

    void wait_held() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return held_; });
    }

    void let_go() {
        std::lock_guard<std::mutex> lock(mutex_);
        let_go_ = true;
        changed_.notify_all();
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool held_ = false;
    bool let_go_ = false;
};

class ForwardingDevice final : public offload::Device {
   public:
    explicit ForwardingDevice(offload::HostDevice& host) : host_(host) {}

    offload::StreamHandle create_stream() override { return host_.create_stream(); }
    void destroy_stream(offload::StreamHandle stream) override { host_.destroy_stream(stream); }
    std::unique_ptr<offload::Event> create_event() override { return host_.create_event(); }

    void copy_async(void* dst, const void* src, std::size_t bytes, offload::CopyKind kind,
                    offload::StreamHandle stream) override {
        if (copies_until_refusal == 0) {
            throw offload::Error("the driver refused the copy");
        }
        --copies_until_refusal;
        if (on_copy) {
            on_copy();
        }
        copied_bytes.push_back(bytes);
        host_.copy_async(dst, src, bytes, kind, stream);
    }

    bool is_caller(offload::StreamHandle stream) const override { return host_.is_caller(stream); }
    bool is_capturing(offload::StreamHandle) const override { return capturing; }

    std::string pin(void* address, std::size_t bytes) override {
        if (on_pin) {
            on_pin();
        }
        return host_.pin(address, bytes);
    }

    void unpin(void* address) override { host_.unpin(address); }
    int numa_node() const override { return host_.numa_node(); }

    bool capturing = false;
    int copies_until_refusal = -1;  // negative: never
    std::function<void()> on_copy;  // called with the engine's lock held
    std::function<void()> on_pin;   // called with the arena's lock held
    std::vector<std::size_t> copied_bytes;

   private:
    offload::HostDevice& host_;
};
