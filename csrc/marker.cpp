#include "marker.h"

#include <utility>

#include "check.h"

namespace offload {

void Marker::reach(std::string error) {
    std::lock_guard<std::mutex> lock(mutex_);
    reached_ = true;
    time_ = Clock::now();
    error_ = std::move(error);
    changed_.notify_all();
}

bool Marker::reached() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
}

void Marker::wait() const {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
}

std::string Marker::error() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
}

Marker::Clock::time_point Marker::time() const {
    std::lock_guard<std::mutex> lock(mutex_);
    OFFLOAD_CHECK(reached_, "elapsed_ms: expected a marker that was reached");
    return time_;
}

}  // namespace offload
