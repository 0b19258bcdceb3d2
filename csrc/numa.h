/// Which NUMA node a card hangs on, and memory that prefers a node. No libnuma: one file of sysfs
/// and one system call.
#pragma once

#include <cstddef>
#include <string>

namespace offload {

/// The node of a PCI device such as "0000:3B:00.0", as cudaDeviceGetPCIBusId writes it. -1 where
/// the system does not say, and on a machine with one node, where there is nothing to choose.
/// `sysfs` is another root for tests.
int numa_node_of_pci(const std::string& bus_id, const std::string& sysfs = "/sys");

/// Asks the kernel to take pages of the range that are not backed yet from `node` while it has any.
/// False when refused, as in containers whose seccomp filter knows no mbind; nothing has changed
/// then. `begin` must lie on a page boundary.
bool prefer_numa_node(void* begin, std::size_t bytes, int node);

}  // namespace offload
