/// One file without a name: nothing of it is left when the process ends, however it ends.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

#include "file_system.h"
#include "process.h"
#include "slot_allocator.h"

namespace offload {

/// Reads and writes past the page cache where the file system offers direct I/O on 4 KiB units,
/// else through it; then pages are written back and dropped at once, so that spilled bytes do not
/// come back as cache.
///
/// `read` and `write` may be called from any thread, `grow` and `shrink` from one at a time beside
/// them. In a forked child the destructor does nothing.
class DiskFile {
   public:
    static constexpr std::size_t kAlignment = SlotAllocator::kAlignment;

    /// Throws `Error` when no file can be made in `directory`.
    DiskFile(std::string directory, FileSystem& system);
    ~DiskFile();
    DiskFile(const DiskFile&) = delete;
    DiskFile& operator=(const DiskFile&) = delete;

    /// Block until all bytes have moved; throw `Error` otherwise. Offset, address and length must
    /// be multiples of `kAlignment`.
    void write(std::size_t offset, const void* src, std::size_t bytes);
    void read(std::size_t offset, void* dst, std::size_t bytes);

    /// Reserves disk blocks up to `bytes`, so that a full disk shows here rather than in a write.
    /// Returns 0, or the `errno` of the refusal; the file then has its old size.
    int grow(std::size_t bytes);

    /// Gives the blocks behind `bytes` back. Returns 0 or the `errno`.
    int shrink(std::size_t bytes);

    /// Gives all blocks back. Nothing may be in flight or come later.
    void close();

    std::size_t bytes() const { return bytes_; }
    bool direct() const { return direct_.load(); }  ///< may turn false at the first transfer
    const std::string& directory() const { return directory_; }

   private:
    int open_without_name();
    bool direct_io_fits() const;
    template <typename Call>
    void move_all(const char* function, std::size_t offset, std::size_t bytes, const Call& call);
    [[noreturn]] void fail(const char* function, std::size_t offset, std::size_t bytes,
                           const std::string& got) const;

    const std::string directory_;
    FileSystem& system_;
    const OwnerProcess owner_;
    const int fd_;
    std::atomic<bool> direct_;
    std::size_t bytes_ = 0;
    bool closed_ = false;
};

}  // namespace offload
