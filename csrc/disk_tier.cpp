#include "disk_tier.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "check.h"

namespace offload {
namespace {

constexpr std::size_t kMaxStepBytes = std::size_t{256} << 20;
constexpr std::size_t kStepsOfCap = 16;  // a last, partial step is lost: at most this part of a cap

std::size_t step_bytes(std::size_t cap_bytes) {
    const std::size_t part = cap_bytes / kStepsOfCap / DiskFile::kAlignment * DiskFile::kAlignment;
    return std::clamp(part, DiskFile::kAlignment, kMaxStepBytes);
}

bool means_full(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

}  // namespace

void ReleasedOffsets::reserve(std::size_t live_extents) {
    std::lock_guard<std::mutex> lock(mutex_);
    offsets_.reserve(live_extents);
}

void ReleasedOffsets::mark(std::size_t offset) noexcept {
    if (owner_.is_current()) {
        std::lock_guard<std::mutex> lock(mutex_);
        offsets_.push_back(offset);
    }
}

std::vector<std::size_t> ReleasedOffsets::take() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::size_t> taken = offsets_;  // a copy: the reserved room stays
    offsets_.clear();
    return taken;
}

DiskTier::DiskTier(std::string directory, std::size_t cap_bytes, FileSystem& system,
                   std::size_t piece_bytes)
    : released_(std::make_shared<ReleasedOffsets>()), allocator_(cap_bytes, step_bytes(cap_bytes)) {
    OFFLOAD_CHECK(cap_bytes >= DiskFile::kAlignment, "DiskTier: expected a cap of at least ",
                  DiskFile::kAlignment, " bytes, got ", cap_bytes, ". Raise the disk cap.");
    running_ = std::make_unique<Running>(std::move(directory), system, piece_bytes);
}

DiskTier::~DiskTier() {
    if (owner_.is_current()) {
        close();  // before any member dies: callbacks may still call
    } else {
        static_cast<void>(running_.release());
    }
}

std::shared_ptr<Extent> DiskTier::allocate(std::size_t bytes) {
    check_usable("allocate");
    OFFLOAD_CHECK(bytes > 0, "allocate: expected bytes > 0, got 0");
    std::lock_guard<std::mutex> lock(mutex_);
    check_usable("allocate");
    drain_released();
    const std::size_t free_bytes = allocator_.cap_bytes() - allocator_.live_bytes();
    Placement placement;
    try {
        placement = allocator_.allocate(bytes);
    } catch (const ArenaFull& full) {
        throw DiskFull(running_->file.directory(), bytes, free_bytes, full.cap_bytes, "");
    }
    try {
        grow_file(placement.committed_bytes, bytes, free_bytes);
        released_->reserve(allocator_.live_slots());
        auto extent = std::make_shared<Extent>(released_, placement.offset, bytes);
        peak_live_bytes_ = std::max(peak_live_bytes_, allocator_.live_bytes());
        return extent;
    } catch (...) {
        allocator_.release(placement.offset);
        // A file that stays longer than the allocator knows does no harm.
        static_cast<void>(running_->file.shrink(allocator_.trim()));
        throw;
    }
}

void DiskTier::grow_file(std::size_t file_bytes, std::size_t asked_bytes, std::size_t free_bytes) {
    DiskFile& file = running_->file;
    const int error = file.grow(file_bytes);
    if (means_full(error)) {
        throw DiskFull(file.directory(), asked_bytes, free_bytes, allocator_.cap_bytes(),
                       std::strerror(error));
    }
    OFFLOAD_CHECK(error == 0, "allocate: expected a file of ", file_bytes, " bytes in ",
                  file.directory(), ", got: ", std::strerror(error),
                  ". Check that disk, or choose another directory.");
}

std::shared_ptr<Transfer> DiskTier::write(const std::shared_ptr<Extent>& extent, const void* src,
                                          TransferDone done) {
    // Only read from: the kind says so.
    return submit("write", TransferKind::kWrite, extent, const_cast<void*>(src), std::move(done));
}

std::shared_ptr<Transfer> DiskTier::read(const std::shared_ptr<Extent>& extent, void* dst,
                                         TransferDone done) {
    return submit("read", TransferKind::kRead, extent, dst, std::move(done));
}

std::shared_ptr<Transfer> DiskTier::submit(const char* function, TransferKind kind,
                                           const std::shared_ptr<Extent>& extent, void* memory,
                                           TransferDone done) {
    check_usable(function);
    OFFLOAD_CHECK(extent != nullptr && extent->released_ == released_, function,
                  ": expected an extent of this disk tier");
    OFFLOAD_CHECK(reinterpret_cast<std::uintptr_t>(memory) % DiskFile::kAlignment == 0, function,
                  ": expected memory aligned to ", DiskFile::kAlignment, " bytes, got ", memory);
    OFFLOAD_CHECK(done != nullptr, function, ": expected a callback, got none");
    auto transfer = std::make_shared<Transfer>(kind, extent, extent->offset(), memory,
                                               extent->bytes(), std::move(done));
    running_->queue.submit(transfer);
    return transfer;
}

void DiskTier::trim() {
    check_usable("trim");
    std::lock_guard<std::mutex> lock(mutex_);
    check_usable("trim");
    drain_released();
    const int error = running_->file.shrink(allocator_.trim());
    OFFLOAD_CHECK(error == 0, "trim: expected to shorten the file in ", running_->file.directory(),
                  ", got: ", std::strerror(error), ". Check that disk.");
}

void DiskTier::drain() {
    check_usable("drain");
    running_->queue.drain();
}

void DiskTier::close() {
    owner_.check("close");
    running_->queue.close();
    std::lock_guard<std::mutex> lock(mutex_);
    running_->file.close();
}

DiskStatistics DiskTier::statistics() {
    check_usable("statistics");
    std::lock_guard<std::mutex> lock(mutex_);
    drain_released();
    const DiskFile& file = running_->file;
    return {file.directory(),        file.direct(),
            allocator_.cap_bytes(),  file.bytes(),
            allocator_.live_bytes(), allocator_.live_slots(),
            peak_live_bytes_,        running_->queue.statistics()};
}

void DiskTier::check_usable(const char* function) const {
    owner_.check(function);
    if (!running_->queue.accepts_caller()) {
        throw EngineUnusable(detail::concat(
            function, ": expected a running disk tier, got one that was closed at exit."));
    }
}

void DiskTier::drain_released() {
    for (const std::size_t offset : released_->take()) {
        allocator_.release(offset);
    }
}

}  // namespace offload
