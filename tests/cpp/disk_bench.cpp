// GB/s of the disk tier beside a plain loop of the same direct transfers: disk_bench DIRECTORY
// [tensors of 16 MiB] [rounds] [MiB of a piece]. Not a test, and not built with them: `ninja
// disk_bench`.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "disk_tier.h"

using namespace offload;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kTensorBytes = 16 * kMiB;
constexpr std::size_t kHugePageBytes = 2 * kMiB;
constexpr int kThreads = 2;

struct Memory {
    explicit Memory(std::size_t bytes)
        : data(static_cast<unsigned char*>(std::aligned_alloc(kHugePageBytes, bytes))) {
        madvise(data, bytes, MADV_HUGEPAGE);
        for (std::size_t i = 0; i < bytes; ++i) {
            data[i] = static_cast<unsigned char>(i * 2654435761u >> 11);
        }
    }
    ~Memory() { std::free(data); }

    unsigned char* data;
};

double gbps(std::size_t bytes, const std::function<void()>& run) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    return static_cast<double>(bytes) / seconds.count() / 1e9;
}

/// Two threads that take the next piece of the whole range, without a queue, extents or callbacks.
void raw_loop(int fd, bool write, const Memory& memory, std::size_t bytes, std::size_t piece) {
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t at = next.fetch_add(piece); at < bytes; at = next.fetch_add(piece)) {
            const auto offset = static_cast<off_t>(at);
            const ssize_t moved = write ? pwrite(fd, memory.data + at, piece, offset)
                                        : pread(fd, memory.data + at, piece, offset);
            OFFLOAD_CHECK(moved == static_cast<ssize_t>(piece), "raw loop: a short transfer");
        }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
        threads.emplace_back(work);
    }
    for (auto& thread : threads) {
        thread.join();
    }
}

void measure_raw(const std::string& directory, const Memory& memory, std::size_t bytes,
                 std::size_t piece) {
    const int fd = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_DIRECT, 0600);
    OFFLOAD_CHECK(fd >= 0 && fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0, "no raw file");
    const double first = gbps(bytes, [&] { raw_loop(fd, true, memory, bytes, piece); });
    const double read = gbps(bytes, [&] { raw_loop(fd, false, memory, bytes, piece); });
    std::printf("raw   piece %2zu MiB: write %.3f GB/s, read %.3f GB/s\n", piece / kMiB, first,
                read);
    close(fd);
}

void measure_tier(const std::string& directory, const Memory& memory, std::size_t bytes,
                  std::size_t piece) {
    DiskTier tier(directory, 8192 * kMiB, real_file_system(), piece);
    std::vector<std::shared_ptr<Extent>> extents;
    for (std::size_t at = 0; at < bytes; at += kTensorBytes) {
        extents.push_back(tier.allocate(kTensorBytes));
    }
    std::atomic<int> failures{0};
    const auto note = [&](const std::string& error) { failures += error.empty() ? 0 : 1; };
    const double write = gbps(bytes, [&] {
        for (std::size_t i = 0; i < extents.size(); ++i) {
            tier.write(extents[i], memory.data + i * kTensorBytes, note);
        }
        tier.drain();
    });
    const double read = gbps(bytes, [&] {
        for (std::size_t i = 0; i < extents.size(); ++i) {
            tier.read(extents[i], memory.data + i * kTensorBytes, note);
        }
        tier.drain();
    });
    std::printf("tier  piece %2zu MiB: write %.3f GB/s, read %.3f GB/s, direct %d, %d failures\n",
                piece / kMiB, write, read, tier.statistics().direct, failures.load());
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 2) {
        std::fprintf(stderr, "usage: disk_bench DIRECTORY [tensors] [rounds] [piece]\n");
        return 2;
    }
    const std::size_t tensors = count > 2 ? std::strtoul(arguments[2], nullptr, 10) : 64;
    const unsigned long rounds = count > 3 ? std::strtoul(arguments[3], nullptr, 10) : 1;
    const std::size_t bytes = tensors * kTensorBytes;
    const Memory memory(bytes);
    std::vector<std::size_t> pieces{2, 4, 8, 16};
    if (count > 4) {
        pieces = {std::strtoul(arguments[4], nullptr, 10)};
    }
    for (unsigned long round = 0; round < rounds; ++round) {
        for (const std::size_t piece : pieces) {
            measure_raw(arguments[1], memory, bytes, piece * kMiB);
            measure_tier(arguments[1], memory, bytes, piece * kMiB);
        }
    }
}
