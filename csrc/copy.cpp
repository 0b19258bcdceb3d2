#include "copy.h"

#include <algorithm>
#include <chrono>

#include "check.h"

namespace offload {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begin) {
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

}  // namespace

Copy::Copy(Device& device, std::size_t bytes)
    : device_(device), bytes_(bytes), begin_(device.create_event()), end_(device.create_event()) {}

bool Copy::done() const { return queued_.reached() && end_->query(); }

void Copy::synchronize() const {
    queued_.wait();
    end_->synchronize();
    const std::string reason = error();
    if (!reason.empty()) {
        throw CopyFailed(detail::concat("synchronize: expected a copy of ", bytes_,
                                        " bytes to succeed, got: ", reason));
    }
}

void Copy::wait(StreamHandle stream) {
    if (device_.is_caller(stream)) {
        const auto begin = Clock::now();
        queued_.wait();
        end_->synchronize();
        add_caller_stall(milliseconds_since(begin));
        synchronize();
        return;
    }
    if (!queued_.reached()) {
        const auto begin = Clock::now();
        queued_.wait();
        add_caller_stall(milliseconds_since(begin));
    }
    if (done()) {
        synchronize();  // throws where it failed
        return;
    }
    auto begin = device_.create_event();
    auto end = device_.create_event();
    begin->record(stream);
    end_->wait(stream);
    end->record(stream);
    std::lock_guard<std::mutex> lock(stall_mutex_);
    stalls_.emplace_back(std::move(begin), std::move(end));
}

bool Copy::would_block(StreamHandle stream) const {
    return device_.is_caller(stream) ? !done() : !queued_.reached();
}

std::string Copy::error() const {
    if (!done()) {
        return "";
    }
    if (!queue_error_.empty()) {
        return queue_error_;
    }
    const std::string own = end_->error();
    if (!own.empty() || upstream_ == nullptr) {
        return own;
    }
    const std::string upstream = upstream_->error();
    return upstream.empty() ? "" : "the copy to the host that it reads had failed: " + upstream;
}

double Copy::copy_ms() const { return done() && error().empty() ? end_->elapsed_ms(*begin_) : 0; }

bool Copy::settled() const {
    if (!done()) {
        return false;
    }
    std::lock_guard<std::mutex> lock(stall_mutex_);
    return std::all_of(stalls_.begin(), stalls_.end(),
                       [](const auto& stall) { return stall.second->query(); });
}

double Copy::stall_ms() const {
    owner_.check("stall_ms");
    std::lock_guard<std::mutex> lock(stall_mutex_);
    double total = caller_stall_ms_;
    for (const auto& [begin, end] : stalls_) {
        if (end->query() && end->error().empty()) {
            total += end->elapsed_ms(*begin);
        }
    }
    return total;
}

void Copy::add_caller_stall(double milliseconds) {
    std::lock_guard<std::mutex> lock(stall_mutex_);
    caller_stall_ms_ += milliseconds;
}

}  // namespace offload
