#include "file_system.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>

namespace offload {
namespace {

/// The kernel's `struct statx`, whose direct I/O fields the headers of older systems lack.
struct StatxReply {
    std::uint32_t mask;
    unsigned char other[148];
    std::uint32_t dio_mem_align;
    std::uint32_t dio_offset_align;
    unsigned char spare[96];
};
static_assert(sizeof(StatxReply) == 256, "the size is part of the system's interface");

constexpr unsigned kStatxDioAlign = 0x2000;  // since Linux 6.1

}  // namespace

int FileSystem::open_unnamed(const std::string& directory) {
    return ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
}

int FileSystem::open_named(std::string& path) { return ::mkostemp(path.data(), O_CLOEXEC); }

int FileSystem::unlink(const std::string& path) { return ::unlink(path.c_str()); }

int FileSystem::close(int fd) { return ::close(fd); }

int FileSystem::set_direct(int fd, bool direct) {
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0) {
        return -1;
    }
    return ::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT);
}

DirectAlignment FileSystem::direct_alignment(int fd) {
#ifdef SYS_statx
    StatxReply reply{};
    if (::syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, &reply) == 0 &&
        (reply.mask & kStatxDioAlign) != 0) {
        return {true, reply.dio_mem_align, reply.dio_offset_align};
    }
#else
    static_cast<void>(fd);
    static_cast<void>(kStatxDioAlign);
#endif
    return {false, 0, 0};
}

ssize_t FileSystem::pread(int fd, void* dst, std::size_t bytes, off_t offset) {
    return ::pread(fd, dst, bytes, offset);
}

ssize_t FileSystem::pwrite(int fd, const void* src, std::size_t bytes, off_t offset) {
    return ::pwrite(fd, src, bytes, offset);
}

int FileSystem::fallocate(int fd, off_t offset, off_t bytes) {
    return ::fallocate(fd, 0, offset, bytes);
}

int FileSystem::ftruncate(int fd, off_t bytes) { return ::ftruncate(fd, bytes); }

int FileSystem::flush(int fd, off_t offset, off_t bytes) {
    return ::sync_file_range(
        fd, offset, bytes,
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
}

void FileSystem::drop_cache(int fd, off_t offset, off_t bytes) {
    // A file system without the advice keeps its cache, and nothing is wrong.
    static_cast<void>(::posix_fadvise(fd, offset, bytes, POSIX_FADV_DONTNEED));
}

FileSystem& real_file_system() {
    static FileSystem* const real = new FileSystem;
    return *real;
}

}  // namespace offload
