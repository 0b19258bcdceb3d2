#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "numa.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace offload {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::size_t kPageBytes = 4096;

std::size_t round_up(std::size_t bytes, std::size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

/// Backs a range with memory, so that the copies do not pay for page faults. With huge pages 7.8
/// GB/s where a loop over small pages makes 2.7; a second thread adds nothing (2 EPYC cores, Linux
/// 6.18).
void prefault(unsigned char* begin, std::size_t bytes) {
    if (madvise(begin, bytes, MADV_POPULATE_WRITE) == 0) {
        return;
    }
    // Kernels before 5.14 do not know the advice.
    OFFLOAD_CHECK(errno == EINVAL || errno == ENOSYS, "allocate: expected ", bytes,
                  " bytes of host memory, got: ", std::strerror(errno), ". Lower the host cap.");
    for (std::size_t offset = 0; offset < bytes; offset += kPageBytes) {
        *static_cast<volatile unsigned char*>(begin + offset) = 0;
    }
}

}  // namespace

Slot::~Slot() { arena_->mark_released(offset_); }

Arena::Arena(std::size_t reserve_bytes, std::size_t cap_bytes)
    : reserve_bytes_(round_up(reserve_bytes, kStepBytes)), allocator_(cap_bytes, kStepBytes) {
    check_cap("Arena", cap_bytes);
    mapping_bytes_ = reserve_bytes_ + kHugePageBytes;
    mapping_ = mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
    OFFLOAD_CHECK(mapping_ != MAP_FAILED, "Arena: expected ", mapping_bytes_,
                  " bytes of address space, got: ", std::strerror(errno),
                  ". Lower the host cap or raise `ulimit -v`.");
    base_ = reinterpret_cast<unsigned char*>(
        round_up(reinterpret_cast<std::uintptr_t>(mapping_), kHugePageBytes));
}

Arena::~Arena() {
    if (!owner_.is_current()) {
        return;
    }
    try {
        decommit(0);
    } catch (const std::exception&) {
        // The driver may be gone at exit, and its locks with it.
    }
    munmap(mapping_, mapping_bytes_);
}

std::shared_ptr<Slot> Arena::allocate(std::size_t bytes) {
    owner_.check("allocate");
    std::lock_guard<std::mutex> lock(mutex_);
    drain_released();
    const Placement placement = allocator_.allocate(bytes);
    try {
        commit(placement.committed_bytes);
        {
            std::lock_guard<std::mutex> released_lock(released_mutex_);
            released_.reserve(allocator_.live_slots());
        }
        auto slot = std::make_shared<Slot>(this, placement.offset, bytes, base_ + placement.offset);
        peak_live_bytes_ = std::max(peak_live_bytes_, allocator_.live_bytes());
        if (poisoning_) {
            std::memset(slot->data(), kPoison, bytes);
        }
        return slot;
    } catch (...) {
        allocator_.release(placement.offset);
        decommit(allocator_.trim());
        throw;
    }
}

std::shared_ptr<Slot> Arena::try_allocate(std::size_t bytes) {
    try {
        return allocate(bytes);
    } catch (const ArenaFull&) {
        return nullptr;
    }
}

void Arena::enable_pinning(Device& device) {
    owner_.check("enable_pinning");
    std::lock_guard<std::mutex> lock(mutex_);
    if (pinning_device_ == nullptr) {
        numa_node_ = device.numa_node();
        pinning_device_ = &device;
        pin_steps();
    }
}

void Arena::set_cap(std::size_t cap_bytes) {
    owner_.check("set_cap");
    std::lock_guard<std::mutex> lock(mutex_);
    check_cap("set_cap", cap_bytes);
    drain_released();
    decommit(allocator_.trim());
    allocator_.set_cap(cap_bytes);
}

void Arena::trim() {
    owner_.check("trim");
    std::lock_guard<std::mutex> lock(mutex_);
    drain_released();
    decommit(allocator_.trim());
}

void Arena::set_poisoning(bool on) {
    owner_.check("set_poisoning");
    std::lock_guard<std::mutex> lock(mutex_);
    poisoning_ = on;
}

std::size_t Arena::cap_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return allocator_.cap_bytes();
}

std::size_t Arena::live_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    drain_released();
    return allocator_.live_bytes();
}

ArenaStatistics Arena::statistics() {
    owner_.check("statistics");
    std::lock_guard<std::mutex> lock(mutex_);
    drain_released();
    return {
        allocator_.cap_bytes(),  backed_bytes_,    pinned_bytes_,         allocator_.live_bytes(),
        allocator_.live_slots(), peak_live_bytes_, peak_committed_bytes_, pin_refusal_,
        pinnable_bytes_,         numa_node_};
}

void Arena::mark_released(std::size_t offset) noexcept {
    if (owner_.is_current()) {
        std::lock_guard<std::mutex> lock(released_mutex_);
        released_.push_back(offset);
    }
}

void Arena::drain_released() {
    std::lock_guard<std::mutex> lock(released_mutex_);
    for (const std::size_t offset : released_) {
        const std::size_t bytes = allocator_.release(offset);
        if (poisoning_) {
            std::memset(base_ + offset, kPoison, bytes);
        }
    }
    released_.clear();
}

void Arena::commit(std::size_t committed_bytes) {
    while (backed_bytes_ < committed_bytes) {
        unsigned char* step = base_ + backed_bytes_;
        OFFLOAD_CHECK(mprotect(step, kStepBytes, PROT_READ | PROT_WRITE) == 0,
                      "allocate: expected ", kStepBytes,
                      " more bytes of host memory, got: ", std::strerror(errno),
                      ". Lower the host cap, or raise `ulimit -d`.");
        backed_bytes_ += kStepBytes;  // from here on a failure gives the step back
        if (numa_node_ >= 0 && !prefer_numa_node(step, kStepBytes, numa_node_)) {
            numa_node_ = -1;
        }
        // A kernel without transparent huge pages refuses; the memory is as good.
        madvise(step, kStepBytes, MADV_HUGEPAGE);
        OFFLOAD_CHECK(madvise(step, kStepBytes, MADV_DONTFORK) == 0,
                      "allocate: expected MADV_DONTFORK to work, got: ", std::strerror(errno));
        prefault(step, kStepBytes);
        peak_committed_bytes_ = std::max(peak_committed_bytes_, backed_bytes_);
    }
    pin_steps();
}

void Arena::decommit(std::size_t committed_bytes) {
    while (pinned_bytes_ > committed_bytes) {
        pinned_bytes_ -= kStepBytes;
        pinning_device_->unpin(base_ + pinned_bytes_);
    }
    if (backed_bytes_ > committed_bytes) {
        unsigned char* begin = base_ + committed_bytes;
        madvise(begin, backed_bytes_ - committed_bytes, MADV_DONTNEED);
        mprotect(begin, backed_bytes_ - committed_bytes, PROT_NONE);
        backed_bytes_ = committed_bytes;
    }
}

void Arena::pin_steps() {
    while (pinning_device_ != nullptr && pinned_bytes_ < std::min(backed_bytes_, pinnable_bytes_)) {
        std::string refusal = pinning_device_->pin(base_ + pinned_bytes_, kStepBytes);
        if (refusal.empty()) {
            pinned_bytes_ += kStepBytes;
        } else {
            pinnable_bytes_ = pinned_bytes_;
            pin_refusal_ = std::move(refusal);
        }
    }
}

void Arena::check_cap(const char* function, std::size_t cap_bytes) const {
    OFFLOAD_CHECK(cap_bytes >= kStepBytes && cap_bytes <= reserve_bytes_, function,
                  ": expected a cap between one step (", kStepBytes, " bytes) and the ",
                  reserve_bytes_, " bytes reserved, got ", cap_bytes);
}

}  // namespace offload
