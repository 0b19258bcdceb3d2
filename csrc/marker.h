/// A one-shot flag that threads can wait for.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

namespace offload {

/// Reached once, at a known time, with the error of the work before it. Thread-safe.
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

}  // namespace offload
