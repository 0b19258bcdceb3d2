// The file under the disk tier: where it lies, what is left of it, direct and buffered I/O.

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "check.h"
#include "disk_file.h"
#include "disk_world.h"
#include "harness.h"
#include "injecting_file_system.h"

using namespace offload;

namespace {

constexpr std::size_t kBlock = DiskFile::kAlignment;

/// Whether `bytes` bytes come back equal through `file`.
bool moves(DiskFile& file, std::size_t bytes) {
    const Bytes content = pattern(bytes, 3);
    const Block source(content);
    Block target(bytes);
    file.write(kBlock, source.data(), bytes);
    file.read(kBlock, target.data(), bytes);
    return target.holds(content);
}

}  // namespace

TEST(disk_file_has_no_name_and_is_closed_with_its_owner) {
    const TemporaryDirectory directory;
    for (const bool unnamed : {true, false}) {
        InjectingFileSystem system;
        system.can_open_unnamed = unnamed;
        {
            DiskFile file(directory.path(), system);
            CHECK(file.grow(kMiB) == 0);
            CHECK(directory.empty());
            const auto open_files = open_files_in(directory.path());
            CHECK(open_files.size() == 1 && contains(open_files.front(), "(deleted)"));
        }
        CHECK(open_files_in(directory.path()).empty());
    }
    CHECK(directory.empty());
}

TEST(disk_file_leaves_nothing_behind_when_the_process_is_killed) {
    const TemporaryDirectory directory;
    for (const bool unnamed : {true, false}) {
        const int status = harness::run_in_child([&] {
            InjectingFileSystem system;
            system.can_open_unnamed = unnamed;
            DiskFile file(directory.path(), system);
            CHECK(file.grow(kMiB) == 0 && moves(file, kBlock));
            raise(SIGKILL);
        });
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        CHECK(directory.empty());
    }
}

TEST(disk_file_error_names_the_directory_that_cannot_hold_it) {
    const TemporaryDirectory directory;
    const std::string missing = directory.path() + "/missing";
    const std::string error = error_of([&] { DiskFile(missing, real_file_system()); });
    CHECK(contains(error, missing) && contains(error, "No such file or directory"));

    const int status = harness::run_in_child([&] {
        chmod(directory.path().c_str(), 0555);
        if (geteuid() == 0) {  // else the mode would not stop it
            CHECK(seteuid(65534) == 0);
        }
        const std::string refused =
            error_of([&] { DiskFile(directory.path(), real_file_system()); });
        CHECK(contains(refused, directory.path()) && contains(refused, "Permission denied"));
    });
    CHECK(harness::child_passed(status));

    InjectingFileSystem system;
    system.can_open_unnamed = false;
    system.unlink_fault.set(EBUSY);
    CHECK(contains(error_of([&] { DiskFile(directory.path(), system); }), "busy"));
    CHECK(open_files_in(directory.path()).empty());
}

TEST(disk_file_goes_through_the_page_cache_where_direct_io_is_refused) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    system.can_be_direct = false;
    DiskFile file(directory.path(), system);
    CHECK(!file.direct());
    CHECK(moves(file, 3 * kBlock));

    InjectingFileSystem late;
    late.refuses_direct_transfers = true;
    late.alignment = {true, 512, 512};
    DiskFile refused_late(directory.path(), late);
    CHECK(refused_late.direct());
    CHECK(moves(refused_late, 3 * kBlock));
    CHECK(!refused_late.direct() && !late.is_direct);
}

TEST(disk_file_is_direct_only_where_four_kib_suffice) {
    const TemporaryDirectory directory;
    const std::vector<std::pair<DirectAlignment, bool>> cases{
        {{true, 512, 512}, true},   {{true, 4096, 4096}, true}, {{true, 4, 4096}, true},
        {{true, 512, 8192}, false}, {{true, 8192, 512}, false}, {{true, 0, 0}, false}};
    for (const auto& [alignment, direct] : cases) {
        InjectingFileSystem system;
        system.alignment = alignment;
        DiskFile file(directory.path(), system);
        CHECK(file.direct() == direct && system.is_direct == direct);
    }
}

TEST(disk_file_writes_back_and_drops_what_went_through_the_page_cache) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    system.can_be_direct = false;
    DiskFile file(directory.path(), system);
    CHECK(moves(file, 2 * kBlock));
    const auto flushes = system.calls('f');
    CHECK(flushes.size() == 1 && flushes[0].offset == kBlock && flushes[0].bytes == 2 * kBlock);
    const auto drops = system.calls('d');  // after the write and after the read
    CHECK(drops.size() == 2 && drops[0].offset == kBlock && drops[1].bytes == 2 * kBlock);

    const Block block(kBlock);
    system.flush_fault.set(EIO);  // the disk may fail only when the cache is written back
    CHECK(contains(error_of([&] { file.write(0, block.data(), kBlock); }), "Input/output error"));
    system.flush_fault.set(EINTR);
    file.write(0, block.data(), kBlock);
    system.flush_fault.set(ENOSYS);
    file.write(0, block.data(), kBlock);
    CHECK(system.calls('d').size() == 4);
}

TEST(disk_file_past_the_page_cache_flushes_nothing) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    DiskFile file(directory.path(), system);
    if (!file.direct()) {
        harness::skip("no direct I/O in " + directory.path());
        return;
    }
    CHECK(moves(file, 2 * kBlock));
    CHECK(system.calls('f').empty() && system.calls('d').empty());
}

TEST(disk_file_goes_on_where_a_short_transfer_stopped) {
    const TemporaryDirectory directory;
    for (const bool direct : {true, false}) {
        for (const std::size_t blocks : {1, 2, 77}) {
            InjectingFileSystem system;
            system.can_be_direct = direct;
            // Less than a block is no progress for direct I/O.
            system.least_bytes = direct ? kBlock : 1;
            DiskFile file(directory.path(), system);
            CHECK(file.grow((blocks + 1) * kBlock) == 0);
            CHECK(moves(file, blocks * kBlock));
            CHECK(blocks == 1 || system.calls('w').size() > 1);
            CHECK(file.direct() == (direct && system.is_direct));
        }
    }
}

TEST(disk_file_continues_direct_io_on_block_borders_only) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    system.least_bytes = kBlock;
    DiskFile file(directory.path(), system);
    if (!file.direct()) {
        harness::skip("no direct I/O in " + directory.path());
        return;
    }
    CHECK(file.grow(100 * kBlock) == 0);
    CHECK(moves(file, 99 * kBlock));
    for (const char kind : {'r', 'w'}) {
        CHECK(system.calls(kind).size() > 1);
        for (const auto& call : system.calls(kind)) {
            CHECK(call.offset % kBlock == 0 && call.bytes % kBlock == 0);
        }
    }
}

TEST(disk_file_gives_up_on_direct_io_that_never_moves_a_block) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    DiskFile file(directory.path(), system);
    if (!file.direct()) {
        harness::skip("no direct I/O in " + directory.path());
        return;
    }
    const Block block(kBlock);
    system.tears_blocks = true;
    CHECK(contains(error_of([&] { file.write(0, block.data(), kBlock); }), "less than a block"));
    system.tears_blocks = false;
    CHECK(moves(file, kBlock));
}

TEST(disk_file_asks_again_after_an_interruption) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    DiskFile file(directory.path(), system);
    system.preallocation_fault.set(EINTR, 0, 3);
    CHECK(file.grow(kMiB) == 0 && file.bytes() == kMiB);
    system.write_fault.set(EINTR, 0, 3);
    system.read_fault.set(EINTR, 0, 3);
    CHECK(moves(file, 8 * kBlock));
    CHECK(system.calls('w').size() == 4 && system.calls('r').size() == 4);
}

TEST(disk_file_error_tells_what_moved_where) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    DiskFile file(directory.path(), system);
    Block block(2 * kBlock);
    system.write_fault.set(EIO);
    const std::string written = error_of([&] { file.write(kBlock, block.data(), 2 * kBlock); });
    CHECK(contains(written, "write: expected 8192 bytes at offset 4096 of the file in " +
                                directory.path() + ", got: Input/output error"));
    CHECK(file.grow(2 * kBlock) == 0);
    const std::string read = error_of([&] { file.read(kBlock, block.data(), 2 * kBlock); });
    CHECK(contains(read, "read: expected 8192 bytes at offset 4096 of the file in " +
                             directory.path() + ", got: a short read of 4096"));
}

TEST(disk_file_grows_without_preallocation_where_that_is_unknown) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    DiskFile file(directory.path(), system);
    system.preallocation_fault.set(EOPNOTSUPP);
    CHECK(file.grow(kMiB) == 0 && system.file_bytes == kMiB);
    CHECK(moves(file, kBlock));
    system.preallocation_fault.set(EOPNOTSUPP);
    system.truncation_fault.set(ENOSPC);
    CHECK(file.grow(2 * kMiB) == ENOSPC && file.bytes() == kMiB);
}

TEST(disk_file_keeps_its_size_when_growth_is_refused) {
    const TemporaryDirectory directory;
    InjectingFileSystem system;
    DiskFile file(directory.path(), system);
    CHECK(file.grow(kMiB) == 0);
    system.file_bytes = 2 * kMiB;  // as if blocks had been found for a part
    system.preallocation_fault.set(ENOSPC);
    CHECK(file.grow(3 * kMiB) == ENOSPC);
    CHECK(file.bytes() == kMiB && system.file_bytes == kMiB);
    CHECK(file.shrink(kBlock) == 0 && file.bytes() == kBlock && system.file_bytes == kBlock);
    system.truncation_fault.set(EIO);
    CHECK(file.shrink(0) == EIO && file.bytes() == kBlock);
}
