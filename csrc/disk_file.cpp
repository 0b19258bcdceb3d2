#include "disk_file.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "check.h"

namespace offload {
namespace {

/// A direct transfer may stop inside a block, which then is moved again; it must not do so forever.
constexpr int kMaxStalls = 16;

bool flush_is_unknown(int error) {
    return error == ENOSYS || error == EINVAL || error == EOPNOTSUPP || error == ESPIPE;
}

}  // namespace

DiskFile::DiskFile(std::string directory, FileSystem& system)
    : directory_(std::move(directory)),
      system_(system),
      fd_(open_without_name()),
      direct_(direct_io_fits() && system_.set_direct(fd_, true) == 0) {}

DiskFile::~DiskFile() {
    if (owner_.is_current()) {
        close();
    }
}

int DiskFile::open_without_name() {
    const int unnamed = system_.open_unnamed(directory_);
    if (unnamed >= 0) {
        return unnamed;
    }
    std::string path = directory_ + "/offload-XXXXXX";
    const int named = system_.open_named(path);
    OFFLOAD_CHECK(named >= 0, "DiskTier: expected a directory where a file can be made, got ",
                  directory_, ": ", std::strerror(errno), ". Choose another directory.");
    if (system_.unlink(path) != 0) {
        const int error = errno;
        system_.close(named);
        throw Error(detail::concat("DiskTier: expected to unlink ", path,
                                   ", got: ", std::strerror(error),
                                   ". Remove it, and choose another directory."));
    }
    return named;
}

bool DiskFile::direct_io_fits() const {
    const DirectAlignment alignment = system_.direct_alignment(fd_);
    if (!alignment.known) {
        return true;
    }
    return alignment.offset_bytes > 0 && alignment.offset_bytes <= kAlignment &&
           alignment.memory_bytes <= kAlignment;
}

void DiskFile::write(std::size_t offset, const void* src, std::size_t bytes) {
    move_all("write", offset, bytes, [&](std::size_t done) {
        return system_.pwrite(fd_, static_cast<const unsigned char*>(src) + done, bytes - done,
                              static_cast<off_t>(offset + done));
    });
    if (direct_.load()) {
        return;
    }
    const off_t begin = static_cast<off_t>(offset);
    int flushed = 0;
    do {
        flushed = system_.flush(fd_, begin, static_cast<off_t>(bytes));
    } while (flushed != 0 && errno == EINTR);
    if (flushed != 0 && !flush_is_unknown(errno)) {
        fail("write", offset, bytes, std::strerror(errno));
    }
    system_.drop_cache(fd_, begin, static_cast<off_t>(bytes));
}

void DiskFile::read(std::size_t offset, void* dst, std::size_t bytes) {
    move_all("read", offset, bytes, [&](std::size_t done) {
        return system_.pread(fd_, static_cast<unsigned char*>(dst) + done, bytes - done,
                             static_cast<off_t>(offset + done));
    });
    if (!direct_.load()) {
        system_.drop_cache(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    }
}

template <typename Call>
void DiskFile::move_all(const char* function, std::size_t offset, std::size_t bytes,
                        const Call& call) {
    std::size_t done = 0;
    int stalls = 0;
    while (done < bytes) {
        const bool direct = direct_.load();
        const ssize_t moved = call(done);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved < 0 && errno == EINVAL && direct) {
            // Everything is aligned, so it is direct I/O itself that the file system refuses.
            system_.set_direct(fd_, false);
            direct_.store(false);
            continue;
        }
        if (moved < 0) {
            fail(function, offset, bytes, std::strerror(errno));
        }
        if (moved == 0) {
            fail(function, offset, bytes, detail::concat("a short ", function, " of ", done));
        }
        std::size_t next = done + static_cast<std::size_t>(moved);
        if (direct) {
            next = next / kAlignment * kAlignment;
        }
        stalls = next > done ? 0 : stalls + 1;
        if (stalls == kMaxStalls) {
            fail(function, offset, bytes,
                 detail::concat("a short ", function, " of ", done,
                                " and again and again less than a block"));
        }
        done = next;
    }
}

void DiskFile::fail(const char* function, std::size_t offset, std::size_t bytes,
                    const std::string& got) const {
    throw Error(detail::concat(function, ": expected ", bytes, " bytes at offset ", offset,
                               " of the file in ", directory_, ", got: ", got,
                               ". Check that disk, or choose another directory."));
}

int DiskFile::grow(std::size_t bytes) {
    if (bytes <= bytes_) {
        return 0;
    }
    const off_t old_end = static_cast<off_t>(bytes_);
    int grown = 0;
    do {
        grown = system_.fallocate(fd_, old_end, static_cast<off_t>(bytes - bytes_));
    } while (grown != 0 && errno == EINTR);
    if (grown != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
        // A sparse file: a full disk shows only in a write. The C library's substitute would write
        // single bytes, which direct I/O refuses.
        grown = system_.ftruncate(fd_, static_cast<off_t>(bytes));
    }
    if (grown != 0) {
        const int error = errno;
        // Part of the range may have got its blocks. Truncating down needs no space.
        static_cast<void>(system_.ftruncate(fd_, old_end));
        return error;
    }
    bytes_ = bytes;
    return 0;
}

int DiskFile::shrink(std::size_t bytes) {
    if (bytes >= bytes_) {
        return 0;
    }
    if (system_.ftruncate(fd_, static_cast<off_t>(bytes)) != 0) {
        return errno;
    }
    bytes_ = bytes;
    return 0;
}

void DiskFile::close() {
    if (!std::exchange(closed_, true)) {
        system_.close(fd_);
        bytes_ = 0;
    }
}

}  // namespace offload
