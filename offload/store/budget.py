"""How much host memory the arena may take."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from offload.errors import OffloadError

AVAILABLE_SHARE = 0.7
"""Share of the available memory that the arena takes by default; the rest is the program's."""

DISK_SHARE = 0.9


def physical_bytes() -> int:
    """Returns the machine's memory. The arena reserves as much address space, at no cost."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Returns the memory that new allocations can get without swapping, as the kernel estimates it.

    Falls back to half of the physical memory where the kernel does not say (no Linux).
    """
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return physical_bytes() // 2


def free_disk_bytes(directory: str) -> int:
    """Returns 90 % of what an unprivileged user may still write to a directory's file system.

    Raises:
        OffloadError: if there is no such directory.
    """
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise OffloadError(
            f"Policy.disk: expected a directory, got {directory!r}: {error.strerror}. Make it, or "
            "name another one."
        ) from error
    return int(free * DISK_SHARE)


def default_cap_bytes() -> int:
    """Returns the arena's cap where the policy names none."""
    return int(available_bytes() * AVAILABLE_SHARE)
