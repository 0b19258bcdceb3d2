/// The host device's threads: markers, task queues, and the handles that name the queues.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "device.h"

namespace offload {

/// One-shot: reached once, at a known time, with the error of the work before it. Thread-safe.
class Marker {
   public:
    using Clock = std::chrono::steady_clock;

    void reach(std::string error);
    bool reached() const;
    void wait() const;
    std::string error() const;

    /// Throws `Error` before it was reached.
    Clock::time_point time() const;

   private:
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    bool reached_ = false;
    Clock::time_point time_;
    std::string error_;
};

/// A queue of tasks that one worker thread runs in order. A task that throws does not stop the
/// worker: the first message is kept for the next marker. Thread-safe.
class HostStream {
   public:
    explicit HostStream(int device_index);
    ~HostStream();
    HostStream(const HostStream&) = delete;
    HostStream& operator=(const HostStream&) = delete;

    void enqueue(std::function<void()> task);

    /// Runs what is queued, then joins the worker; `enqueue` then throws.
    void finish();

    /// Error since the previous call. Only for tasks of this stream.
    std::string take_error();

    int device_index() const { return device_index_; }

   private:
    void run();

    const int device_index_;
    std::string error_;  // touched by the worker only
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    bool finishing_ = false;
    std::thread worker_;
};

/// The table of live streams, of all host devices: an event may be waited for on another device's
/// stream. Handles are never used twice.
StreamHandle register_stream(std::shared_ptr<HostStream> stream);
void unregister_stream(StreamHandle handle);

/// Throw `Error`, naming `function`, when the stream is gone or belongs to another device.
std::shared_ptr<HostStream> find_stream(const char* function, StreamHandle handle);
std::shared_ptr<HostStream> find_stream_of(const char* function, StreamHandle handle,
                                           int device_index);

}  // namespace offload
