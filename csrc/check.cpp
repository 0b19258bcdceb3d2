#include "check.h"

namespace offload {

ArenaFull::ArenaFull(std::size_t asked_bytes, std::size_t free_bytes, std::size_t cap_bytes)
    : Error(detail::concat("allocate: expected room for ", asked_bytes,
                           " bytes of host memory, got ", free_bytes,
                           " bytes free (maybe in pieces) under the cap of ", cap_bytes,
                           " bytes. Raise the host cap.")),
      asked_bytes(asked_bytes),
      free_bytes(free_bytes),
      cap_bytes(cap_bytes) {}

}  // namespace offload
