#include "check.h"

namespace offload {
namespace {

std::string disk_full_message(const std::string& directory, std::size_t asked_bytes,
                              std::size_t free_bytes, std::size_t cap_bytes,
                              const std::string& refusal) {
    const std::string expected = detail::concat("allocate: expected room for ", asked_bytes,
                                                " bytes on the disk of ", directory, ", got ");
    if (refusal.empty()) {
        return detail::concat(expected, free_bytes,
                              " bytes free (maybe in pieces) under the cap of ", cap_bytes,
                              " bytes. Raise the disk cap.");
    }
    return detail::concat(expected, refusal, " with ", free_bytes, " bytes left under the cap of ",
                          cap_bytes, " bytes. Free disk space, or choose another directory.");
}

}  // namespace

ArenaFull::ArenaFull(std::size_t asked_bytes, std::size_t free_bytes, std::size_t cap_bytes)
    : Error(detail::concat("allocate: expected room for ", asked_bytes,
                           " bytes of host memory, got ", free_bytes,
                           " bytes free (maybe in pieces) under the cap of ", cap_bytes,
                           " bytes. Raise the host cap.")),
      asked_bytes(asked_bytes),
      free_bytes(free_bytes),
      cap_bytes(cap_bytes) {}

DiskFull::DiskFull(const std::string& directory, std::size_t asked_bytes, std::size_t free_bytes,
                   std::size_t cap_bytes, const std::string& refusal)
    : Error(disk_full_message(directory, asked_bytes, free_bytes, cap_bytes, refusal)),
      directory(directory),
      asked_bytes(asked_bytes),
      free_bytes(free_bytes),
      cap_bytes(cap_bytes) {}

}  // namespace offload
