#include "host_stream.h"

#include <map>
#include <utility>

#include "check.h"

namespace offload {
namespace {

struct StreamTable {
    std::mutex mutex;
    std::map<StreamHandle, std::shared_ptr<HostStream>> streams;
    StreamHandle next = kCallerStream + 1;
};

StreamTable& stream_table() {
    static StreamTable* const table = new StreamTable;
    return *table;
}

}  // namespace

HostStream::HostStream(int device_index)
    : device_index_(device_index), worker_([this] { run(); }) {}

HostStream::~HostStream() { finish(); }

void HostStream::enqueue(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    OFFLOAD_CHECK(!finishing_, "enqueue: expected a live stream, got one that was shut down");
    tasks_.push_back(std::move(task));
    changed_.notify_one();
}

void HostStream::finish() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        finishing_ = true;
        changed_.notify_one();
    }
    if (worker_.joinable()) {
        worker_.join();
    }
}

std::string HostStream::take_error() { return std::exchange(error_, std::string()); }

void HostStream::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return finishing_ || !tasks_.empty(); });
        if (tasks_.empty()) {
            return;
        }
        auto task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        std::string error;
        try {
            task();
        } catch (const std::exception& exception) {
            error = exception.what();
        } catch (...) {
            error = "a task threw something that is no std::exception";
        }
        if (error_.empty()) {
            error_ = std::move(error);
        }
        task = nullptr;  // what it owns dies outside the lock
        lock.lock();
    }
}

StreamHandle register_stream(std::shared_ptr<HostStream> stream) {
    StreamTable& table = stream_table();
    std::lock_guard<std::mutex> lock(table.mutex);
    const StreamHandle handle = table.next++;
    table.streams.emplace(handle, std::move(stream));
    return handle;
}

void unregister_stream(StreamHandle handle) {
    StreamTable& table = stream_table();
    std::lock_guard<std::mutex> lock(table.mutex);
    table.streams.erase(handle);
}

std::shared_ptr<HostStream> find_stream(const char* function, StreamHandle handle) {
    StreamTable& table = stream_table();
    std::lock_guard<std::mutex> lock(table.mutex);
    const auto found = table.streams.find(handle);
    OFFLOAD_CHECK(found != table.streams.end(), function,
                  ": expected a live stream of a host device, got handle ", handle);
    return found->second;
}

std::shared_ptr<HostStream> find_stream_of(const char* function, StreamHandle handle,
                                           int device_index) {
    auto stream = find_stream(function, handle);
    OFFLOAD_CHECK(stream->device_index() == device_index, function,
                  ": expected a stream of host device ", device_index, ", got one of host device ",
                  stream->device_index());
    return stream;
}

}  // namespace offload
