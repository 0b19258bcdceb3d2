/// A file system whose answers a test can change: real calls, with faults in front of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <iterator>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "file_system.h"

/// Holds every thread that comes, until it is opened.
class CallGate {
   public:
    ~CallGate() { open(); }

    void pass() {
        std::unique_lock<std::mutex> lock(mutex_);
        ++held_;
        changed_.notify_all();
        changed_.wait(lock, [this] { return open_; });
        --held_;
    }

    void wait_held(int threads) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return held_ == threads; });
    }

    void open() {
        std::lock_guard<std::mutex> lock(mutex_);
        open_ = true;
        changed_.notify_all();
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int held_ = 0;
    bool open_ = false;
};

/// The calls from `first` on (the next one is 0) fail, `count` of them.
class Fault {
   public:
    void set(int error, int first = 0, int count = 1) {
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = error;
        first_ = first;
        left_ = count;
    }

    /// Whether this call fails; `errno` is then set.
    bool strikes() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (left_ == 0 || first_-- > 0) {
            return false;
        }
        first_ = 0;
        --left_;
        errno = error_;
        return true;
    }

   private:
    std::mutex mutex_;
    int error_ = 0;
    int first_ = 0;
    int left_ = 0;
};

class InjectingFileSystem final : public offload::FileSystem {
   public:
    struct Call {
        char kind;  // 'r'ead, 'w'rite, 'f'lush, 'd'rop
        std::size_t offset;
        std::size_t bytes;
    };

    // Set before the transfers that they are for.
    bool can_open_unnamed = true;
    bool can_be_direct = true;
    bool refuses_direct_transfers = false;
    offload::DirectAlignment alignment{false, 0, 0};
    std::size_t least_bytes = 0;  // with a value, transfers are short, and of random length
    bool tears_blocks = false;    // short transfers move less than a block
    std::function<void(std::size_t offset)> on_read;
    std::function<void(std::size_t offset)> on_write;

    Fault read_fault;
    Fault write_fault;
    Fault preallocation_fault;
    Fault truncation_fault;
    Fault flush_fault;
    Fault unlink_fault;
    std::atomic<std::size_t> file_bytes{0};  // as the last successful call made it
    std::atomic<bool> is_direct{false};

    std::vector<Call> calls(char kind) {
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<Call> found;
        std::copy_if(calls_.begin(), calls_.end(), std::back_inserter(found),
                     [kind](const Call& call) { return call.kind == kind; });
        return found;
    }

    int open_unnamed(const std::string& directory) override {
        if (!can_open_unnamed) {
            errno = EOPNOTSUPP;
            return -1;
        }
        return FileSystem::open_unnamed(directory);
    }

    int unlink(const std::string& path) override {
        return unlink_fault.strikes() ? -1 : FileSystem::unlink(path);
    }

    int set_direct(int fd, bool direct) override {
        if (direct && !can_be_direct) {
            errno = EINVAL;
            return -1;
        }
        const int result = FileSystem::set_direct(fd, direct);
        is_direct = direct && result == 0;
        return result;
    }

    offload::DirectAlignment direct_alignment(int fd) override {
        return alignment.known ? alignment : FileSystem::direct_alignment(fd);
    }

    ssize_t pread(int fd, void* dst, std::size_t bytes, off_t offset) override {
        if (on_read) {
            on_read(static_cast<std::size_t>(offset));
        }
        return transfer('r', read_fault, bytes, offset,
                        [&](std::size_t part) { return FileSystem::pread(fd, dst, part, offset); });
    }

    ssize_t pwrite(int fd, const void* src, std::size_t bytes, off_t offset) override {
        if (on_write) {
            on_write(static_cast<std::size_t>(offset));
        }
        return transfer('w', write_fault, bytes, offset, [&](std::size_t part) {
            return FileSystem::pwrite(fd, src, part, offset);
        });
    }

    int fallocate(int fd, off_t offset, off_t bytes) override {
        if (preallocation_fault.strikes() || FileSystem::fallocate(fd, offset, bytes) != 0) {
            return -1;
        }
        file_bytes = static_cast<std::size_t>(offset + bytes);
        return 0;
    }

    int ftruncate(int fd, off_t bytes) override {
        if (truncation_fault.strikes() || FileSystem::ftruncate(fd, bytes) != 0) {
            return -1;
        }
        file_bytes = static_cast<std::size_t>(bytes);
        return 0;
    }

    int flush(int fd, off_t offset, off_t bytes) override {
        note('f', static_cast<std::size_t>(bytes), offset);
        return flush_fault.strikes() ? -1 : FileSystem::flush(fd, offset, bytes);
    }

    void drop_cache(int fd, off_t offset, off_t bytes) override {
        note('d', static_cast<std::size_t>(bytes), offset);
        FileSystem::drop_cache(fd, offset, bytes);
    }

   private:
    template <typename Real>
    ssize_t transfer(char kind, Fault& fault, std::size_t bytes, off_t offset, const Real& real) {
        note(kind, bytes, offset);
        if (refuses_direct_transfers && is_direct) {
            errno = EINVAL;
            return -1;
        }
        if (fault.strikes()) {
            return -1;
        }
        const std::size_t reported = reported_bytes(bytes);
        // Direct I/O cannot tear a sector: what is reported beyond the last whole one did not move.
        const std::size_t part = is_direct ? reported / 512 * 512 : reported;
        if (part > 0) {
            const ssize_t moved = real(part);
            if (moved != static_cast<ssize_t>(part)) {
                return moved;
            }
        }
        return static_cast<ssize_t>(reported);
    }

    std::size_t reported_bytes(std::size_t bytes) {
        if (tears_blocks) {
            return std::min<std::size_t>(bytes, 100);
        }
        if (least_bytes == 0 || least_bytes >= bytes) {
            return bytes;
        }
        std::lock_guard<std::mutex> lock(mutex_);
        return std::uniform_int_distribution<std::size_t>(least_bytes, bytes)(random_);
    }

    void note(char kind, std::size_t bytes, off_t offset) {
        std::lock_guard<std::mutex> lock(mutex_);
        calls_.push_back({kind, static_cast<std::size_t>(offset), bytes});
    }

    std::mutex mutex_;
    std::vector<Call> calls_;
    std::mt19937 random_{1000};
};
