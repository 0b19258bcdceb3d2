/// The system calls of the disk tier, in one place that a test can override.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace offload {

/// What direct I/O asks of memory addresses, file offsets and lengths. 0: direct I/O is not
/// offered.
struct DirectAlignment {
    bool known;  ///< false where the kernel does not tell
    std::size_t memory_bytes;
    std::size_t offset_bytes;
};

/// The real calls. All return what the call of that name returns, -1 and `errno` on failure.
/// Thread-safe.
class FileSystem {
   public:
    virtual ~FileSystem() = default;

    /// A file without a name in `directory`, for reading and writing. Not every file system can.
    virtual int open_unnamed(const std::string& directory);

    /// A file with a fresh name, which replaces the six X at the end of `path`.
    virtual int open_named(std::string& path);

    virtual int unlink(const std::string& path);
    virtual int close(int fd);

    /// Asks for direct I/O, or for I/O through the page cache again.
    virtual int set_direct(int fd, bool direct);

    virtual DirectAlignment direct_alignment(int fd);

    virtual ssize_t pread(int fd, void* dst, std::size_t bytes, off_t offset);
    virtual ssize_t pwrite(int fd, const void* src, std::size_t bytes, off_t offset);

    /// Reserves blocks for the range, and makes the file as long.
    virtual int fallocate(int fd, off_t offset, off_t bytes);

    virtual int ftruncate(int fd, off_t bytes);

    /// Writes the page cache of the range back and waits for it. Tells failed writes.
    virtual int flush(int fd, off_t offset, off_t bytes);

    /// Drops the clean page cache of the range. A hint.
    virtual void drop_cache(int fd, off_t offset, off_t bytes);
};

/// Never destroyed.
FileSystem& real_file_system();

}  // namespace offload
