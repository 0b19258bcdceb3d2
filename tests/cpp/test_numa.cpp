#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "arena.h"
#include "device_host.h"
#include "harness.h"
#include "numa.h"

using namespace offload;

namespace {

constexpr std::size_t kStep = Arena::kStepBytes;

/// A sysfs in a temporary folder.
class FakeSysfs {
   public:
    explicit FakeSysfs(const std::string& online) : root_(make_root()) {
        write("devices/system/node/online", online);
    }
    ~FakeSysfs() { std::filesystem::remove_all(root_); }

    void write(const std::string& path, const std::string& text) const {
        const std::filesystem::path file = std::filesystem::path(root_) / path;
        std::filesystem::create_directories(file.parent_path());
        std::ofstream(file) << text << '\n';
    }

    const std::string& root() const { return root_; }

   private:
    static std::string make_root() {
        std::string pattern = (std::filesystem::temp_directory_path() / "sysfs-XXXXXX").string();
        return mkdtemp(pattern.data());
    }

    const std::string root_;
};

/// The policy of the page at `address`, or -1 where the kernel tells none.
int policy_at(void* address) {
    int mode = -1;
    return syscall(SYS_get_mempolicy, &mode, nullptr, 0UL, address, MPOL_F_ADDR) == 0 ? mode : -1;
}

}  // namespace

TEST(a_cards_node_is_read_by_its_bus_id_in_either_case) {
    const FakeSysfs sysfs("0-1");
    sysfs.write("bus/pci/devices/0000:3b:00.0/numa_node", "1");
    CHECK(numa_node_of_pci("0000:3B:00.0", sysfs.root()) == 1);
    CHECK(numa_node_of_pci("0000:3b:00.0", sysfs.root()) == 1);
    CHECK(numa_node_of_pci("0000:3c:00.0", sysfs.root()) == -1);
}

TEST(a_card_whose_node_the_firmware_does_not_tell_has_none) {
    const FakeSysfs sysfs("0,2");
    sysfs.write("bus/pci/devices/0000:3a:00.0/numa_node", "2");
    CHECK(numa_node_of_pci("0000:3A:00.0", sysfs.root()) == 2);
    sysfs.write("bus/pci/devices/0000:3b:00.0/numa_node", "-1");
    CHECK(numa_node_of_pci("0000:3B:00.0", sysfs.root()) == -1);
    sysfs.write("bus/pci/devices/0000:3b:00.0/numa_node", "");
    CHECK(numa_node_of_pci("0000:3B:00.0", sysfs.root()) == -1);
}

TEST(on_a_machine_with_one_node_there_is_none_to_choose) {
    const FakeSysfs sysfs("0");
    sysfs.write("bus/pci/devices/0000:3b:00.0/numa_node", "0");
    CHECK(numa_node_of_pci("0000:3B:00.0", sysfs.root()) == -1);
    CHECK(numa_node_of_pci("0000:3B:00.0", sysfs.root() + "/missing") == -1);
}

TEST(a_node_that_no_machine_has_is_refused) {
    Arena arena(kStep, kStep);
    const auto slot = arena.allocate(kStep);
    CHECK(!prefer_numa_node(slot->data(), 4096, -1));
    CHECK(!prefer_numa_node(slot->data(), 4096, 1023));
    CHECK(!prefer_numa_node(slot->data(), 4096, 1 << 20));
}

TEST(steps_committed_after_pinning_prefer_the_node_of_the_device) {
    HostDevice device(0);
    device.set_numa_node(0);
    Arena arena(4 * kStep, 4 * kStep);
    const auto before = arena.allocate(kStep);
    arena.enable_pinning(device);
    const auto after = arena.allocate(2 * kStep);
    after->data()[2 * kStep - 1] = 1;
    Arena other(kStep, kStep);
    if (!prefer_numa_node(other.allocate(1)->data(), 4096, 0)) {
        harness::skip("this kernel or container refuses mbind");
        return;
    }
    CHECK(arena.statistics().numa_node == 0);
    CHECK(policy_at(before->data()) == MPOL_DEFAULT);
    CHECK(policy_at(after->data()) == MPOL_PREFERRED);
    CHECK(policy_at(after->data() + 2 * kStep - 1) == MPOL_PREFERRED);
}

TEST(a_refused_node_is_harmless_and_shows_in_the_statistics) {
    HostDevice device(0);
    device.set_numa_node(1023);
    Arena arena(2 * kStep, 2 * kStep);
    arena.enable_pinning(device);
    const auto slot = arena.allocate(kStep);
    slot->data()[kStep - 1] = 1;
    CHECK(arena.statistics().numa_node == -1);
    CHECK(arena.statistics().pinned_bytes == kStep);
    CHECK(policy_at(slot->data()) <= MPOL_DEFAULT);
}

TEST(a_device_without_a_node_leaves_memory_where_the_kernel_puts_it) {
    HostDevice device(0);
    Arena arena(kStep, kStep);
    arena.enable_pinning(device);
    const auto slot = arena.allocate(1000);
    CHECK(arena.statistics().numa_node == -1);
    CHECK(policy_at(slot->data()) <= MPOL_DEFAULT);
}
