/// Typed errors with file and line, and the two macros that raise them.
#pragma once

#include <cstddef>
#include <sstream>
#include <stdexcept>
#include <string>

namespace offload {

/// Base of every error this library raises.
class Error : public std::runtime_error {
   public:
    explicit Error(const std::string& message) : std::runtime_error(message) {}
};

/// The host arena cannot give `asked_bytes` without exceeding its cap.
class ArenaFull : public Error {
   public:
    ArenaFull(std::size_t asked_bytes, std::size_t free_bytes, std::size_t cap_bytes);

    std::size_t asked_bytes;
    std::size_t free_bytes;  ///< below the cap, in all pieces together; may be fragmented
    std::size_t cap_bytes;
};

/// The disk tier cannot give `asked_bytes`: its cap, or the file system under it, is exhausted.
class DiskFull : public Error {
   public:
    /// `refusal` is what the file system said; empty when the cap was reached.
    DiskFull(const std::string& directory, std::size_t asked_bytes, std::size_t free_bytes,
             std::size_t cap_bytes, const std::string& refusal);

    std::string directory;
    std::size_t asked_bytes;
    std::size_t free_bytes;  ///< below the cap, in all pieces together; may be fragmented
    std::size_t cap_bytes;
};

/// A copy failed; the ticket or buffer it belongs to holds no valid bytes. The engine goes on.
class CopyFailed : public Error {
   public:
    using Error::Error;
};

/// The engine was closed, or the call comes from a forked child (rule 13 of copy_engine.h).
class EngineUnusable : public Error {
   public:
    using Error::Error;
};

namespace detail {

template <typename... Args>
std::string concat(const Args&... args) {
    std::ostringstream stream;
    (stream << ... << args);
    return stream.str();
}

}  // namespace detail
}  // namespace offload

#define OFFLOAD_CHECK(condition, ...)                                                        \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            throw ::offload::Error(                                                          \
                ::offload::detail::concat(__VA_ARGS__, " (", __FILE__, ":", __LINE__, ")")); \
        }                                                                                    \
    } while (false)

/// Only usable where <cuda_runtime_api.h> is included.
#define OFFLOAD_CUDA_CHECK(call)                                                                   \
    do {                                                                                           \
        const cudaError_t offload_status = (call);                                                 \
        if (offload_status != cudaSuccess) {                                                       \
            throw ::offload::Error(::offload::detail::concat(#call, ": ",                          \
                                                             cudaGetErrorString(offload_status),   \
                                                             " (", __FILE__, ":", __LINE__, ")")); \
        }                                                                                          \
    } while (false)
