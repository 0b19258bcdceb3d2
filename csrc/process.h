/// Which process an object belongs to: threads, locks and CUDA contexts do not survive `fork`.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include "check.h"

namespace offload {

/// Remembers the process that made it (rule 13 of copy_engine.h).
class OwnerProcess {
   public:
    bool is_current() const { return pid_ == getpid(); }

    /// Throws `EngineUnusable` in a forked child.
    void check(const char* function) const {
        if (!is_current()) {
            throw EngineUnusable(detail::concat(
                function, ": expected the process ", pid_,
                " that started offload, got its forked child ", getpid(),
                ". Start workers with the spawn method, or offload only in the parent."));
        }
    }

   private:
    const pid_t pid_ = getpid();
};

}  // namespace offload
