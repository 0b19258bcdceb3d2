/// The host device's threads: task queues, and the handles that name them.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "device.h"

namespace offload {

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
