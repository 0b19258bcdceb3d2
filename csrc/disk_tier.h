/// Where host slots spill to: extents of one unlinked file, filled and read by two threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "disk_file.h"
#include "process.h"
#include "slot_allocator.h"
#include "transfer_queue.h"

namespace offload {

/// Offsets given back from any thread, also from finalizers, until somebody has time for them.
class ReleasedOffsets {
   public:
    /// Makes room, so that `mark` never allocates.
    void reserve(std::size_t live_extents);
    void mark(std::size_t offset) noexcept;
    std::vector<std::size_t> take();

   private:
    const OwnerProcess owner_;
    std::mutex mutex_;  // never held while taking another lock
    std::vector<std::size_t> offsets_;
};

/// A piece of the file. The last owner gives it back; transfers in flight are owners. May outlive
/// its tier.
class Extent {
   public:
    Extent(std::shared_ptr<ReleasedOffsets> released, std::size_t offset, std::size_t bytes)
        : released_(std::move(released)), offset_(offset), bytes_(bytes) {}
    ~Extent() { released_->mark(offset_); }
    Extent(const Extent&) = delete;
    Extent& operator=(const Extent&) = delete;

    std::size_t bytes() const { return bytes_; }    ///< as asked, not rounded
    std::size_t offset() const { return offset_; }  ///< from the start of the file

   private:
    friend class DiskTier;

    std::shared_ptr<ReleasedOffsets> released_;
    std::size_t offset_;
    std::size_t bytes_;
};

struct DiskStatistics {
    std::string directory;
    bool direct;  ///< past the page cache; settled by the first transfer
    std::size_t cap_bytes;
    std::size_t file_bytes;  ///< disk space reserved now
    std::size_t live_bytes;  ///< in live extents, rounded to 4 KiB
    std::size_t live_extents;
    std::size_t peak_live_bytes;
    TransferStatistics transfers;
};

/// Memory on the other side of a transfer is aligned to 4 KiB and has room for whole blocks of
/// 4 KiB, as arena slots do. The file grows in steps and keeps its blocks until `trim`.
/// Thread-safe.
///
/// In a forked child every call throws `EngineUnusable`, and destructors do nothing.
class DiskTier {
   public:
    /// Of 2, 4 and 8 MiB the fastest (2: 0.7 GB/s written, 0.9 read; 8: 0.9 and 1.5; busy two-core
    /// machine). 16 MiB may be faster with many tensors, but leaves one of 16 MiB to one worker.
    static constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

    /// Makes the file, without any space. Throws `Error`, naming `directory`. `system` must outlive
    /// the tier.
    DiskTier(std::string directory, std::size_t cap_bytes, FileSystem& system = real_file_system(),
             std::size_t piece_bytes = kPieceBytes);
    ~DiskTier();
    DiskTier(const DiskTier&) = delete;
    DiskTier& operator=(const DiskTier&) = delete;

    /// Throws `DiskFull` when the cap or the disk is exhausted; the tier is then as before. `bytes`
    /// must be > 0. May block while the file system reserves a step.
    std::shared_ptr<Extent> allocate(std::size_t bytes);

    /// Queue a transfer of the whole extent and return. The caller keeps the memory valid and, when
    /// reading, untouched until `done` or a successful `try_cancel`. A read queued before the write
    /// of the same extent is done reads anything.
    std::shared_ptr<Transfer> write(const std::shared_ptr<Extent>& extent, const void* src,
                                    TransferDone done);
    std::shared_ptr<Transfer> read(const std::shared_ptr<Extent>& extent, void* dst,
                                   TransferDone done);

    /// Gives disk space behind the last live extent back, in steps.
    void trim();

    /// Waits until nothing is queued or in flight.
    void drain();

    /// Drains, joins the threads and frees the disk space. While it drains, only `done` may call;
    /// later everything throws `EngineUnusable`, but `close` does nothing again.
    void close();

    DiskStatistics statistics();

   private:
    /// Leaked in a forked child: there, neither threads nor condition variables can be destroyed.
    struct Running {
        Running(std::string directory, FileSystem& system, std::size_t piece_bytes)
            : file(std::move(directory), system), queue(file, piece_bytes) {}

        DiskFile file;
        TransferQueue queue;
    };

    std::shared_ptr<Transfer> submit(const char* function, TransferKind kind,
                                     const std::shared_ptr<Extent>& extent, void* memory,
                                     TransferDone done);
    void check_usable(const char* function) const;
    // These require mutex_.
    void grow_file(std::size_t file_bytes, std::size_t asked_bytes, std::size_t free_bytes);
    void drain_released();

    const OwnerProcess owner_;
    const std::shared_ptr<ReleasedOffsets> released_;
    std::unique_ptr<Running> running_;

    std::mutex mutex_;  // guards what follows, and the size of the file
    SlotAllocator allocator_;
    std::size_t peak_live_bytes_ = 0;
};

}  // namespace offload
