#include "numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <fstream>
#include <limits>

namespace offload {
namespace {

constexpr int kPreferred = 1;  // MPOL_PREFERRED of <linux/mempolicy.h>, which not every image has
constexpr int kMaxNodes = 1024;
constexpr int kWordBits = std::numeric_limits<unsigned long>::digits;

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

/// `online` lists ranges, "0" or "0-1,4"; one node alone has neither a dash nor a comma.
bool has_several_nodes(const std::string& sysfs) {
    const std::string online = first_line(sysfs + "/devices/system/node/online");
    return online.find_first_of("-,") != std::string::npos;
}

}  // namespace

int numa_node_of_pci(const std::string& bus_id, const std::string& sysfs) {
    if (!has_several_nodes(sysfs)) {
        return -1;
    }
    std::string lower = bus_id;
    for (char& c : lower) {
        c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    std::ifstream file(sysfs + "/bus/pci/devices/" + lower + "/numa_node");
    int node = -1;
    return file >> node && node >= 0 ? node : -1;
}

bool prefer_numa_node(void* begin, std::size_t bytes, int node) {
    if (node < 0 || node >= kMaxNodes) {
        return false;
    }
    std::array<unsigned long, kMaxNodes / kWordBits> nodes{};
    nodes[node / kWordBits] = 1UL << (node % kWordBits);
    // The kernel reads one bit less than it is told.
    return syscall(SYS_mbind, begin, bytes, kPreferred, nodes.data(), kMaxNodes + 1UL, 0U) == 0;
}

}  // namespace offload
