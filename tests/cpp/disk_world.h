/// What the disk tier's tests share: directories, aligned memory, and callbacks one can wait for.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "disk_tier.h"
#include "world.h"

/// A fresh directory on the system's disk, removed at the end.
class TemporaryDirectory {
   public:
    TemporaryDirectory() {
        std::string path = std::filesystem::temp_directory_path() / "offload-test-XXXXXX";
        if (mkdtemp(path.data()) == nullptr) {
            throw std::runtime_error("no temporary directory");
        }
        path_ = path;
    }
    ~TemporaryDirectory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

    const std::string& path() const { return path_; }
    bool empty() const { return std::filesystem::is_empty(path_); }

   private:
    std::string path_;
};

/// Memory as an arena slot's: aligned, with room for whole blocks.
class Block {
   public:
    explicit Block(std::size_t bytes)
        : bytes_(bytes),
          data_(
              static_cast<unsigned char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096))) {
        std::memset(data_.get(), 0, (bytes + 4095) / 4096 * 4096);
    }
    explicit Block(const Bytes& content) : Block(content.size()) {
        std::memcpy(data_.get(), content.data(), content.size());
    }

    unsigned char* data() const { return data_.get(); }
    bool holds(const Bytes& content) const {
        return content.size() == bytes_ &&
               std::memcmp(data_.get(), content.data(), content.size()) == 0;
    }

   private:
    struct Free {
        void operator()(unsigned char* data) const { std::free(data); }
    };

    std::size_t bytes_;
    std::unique_ptr<unsigned char, Free> data_;
};

/// A callback that counts its calls and can be waited for. Copies share the count.
class Outcome {
   public:
    offload::TransferDone callback() const {
        return [state = state_](const std::string& error) {
            std::lock_guard<std::mutex> lock(state->mutex);
            state->error = error;
            ++state->calls;
            state->changed.notify_all();
        };
    }

    /// Blocks until it was called; the error it was called with.
    std::string wait() const {
        std::unique_lock<std::mutex> lock(state_->mutex);
        state_->changed.wait(lock, [this] { return state_->calls > 0; });
        return state_->error;
    }

    int calls() const {
        std::lock_guard<std::mutex> lock(state_->mutex);
        return state_->calls;
    }

   private:
    struct State {
        std::mutex mutex;
        std::condition_variable changed;
        int calls = 0;
        std::string error;
    };

    std::shared_ptr<State> state_ = std::make_shared<State>();
};

inline std::string write_and_wait(offload::DiskTier& tier,
                                  const std::shared_ptr<offload::Extent>& extent,
                                  const Block& source) {
    const Outcome outcome;
    tier.write(extent, source.data(), outcome.callback());
    return outcome.wait();
}

inline std::string read_and_wait(offload::DiskTier& tier,
                                 const std::shared_ptr<offload::Extent>& extent, Block& target) {
    const Outcome outcome;
    tier.read(extent, target.data(), outcome.callback());
    return outcome.wait();
}

/// Whether `bytes` bytes come back equal through a new extent.
inline bool round_trip(offload::DiskTier& tier, std::size_t bytes, unsigned seed = 1) {
    const Bytes content = pattern(bytes, seed);
    const Block source(content);
    Block target(bytes);
    const auto extent = tier.allocate(bytes);
    return write_and_wait(tier, extent, source).empty() &&
           read_and_wait(tier, extent, target).empty() && target.holds(content);
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

/// Targets of this process's file descriptors that lie in `directory`.
inline std::vector<std::string> open_files_in(const std::string& directory) {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code gone;  // the iterator's own descriptor
        const std::string target = std::filesystem::read_symlink(entry, gone);
        if (contains(target, directory + "/")) {
            found.push_back(target);
        }
    }
    return found;
}

/// The message of the `Error` that `function` throws, or nothing.
template <typename Function>
std::string error_of(const Function& function) {
    try {
        function();
    } catch (const offload::Error& error) {
        return error.what();
    }
    return {};
}
