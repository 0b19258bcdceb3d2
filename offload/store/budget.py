"""How much host memory the arena may take, and why so much."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from offload.errors import OffloadError
from offload.policy import MIN_HOST_BYTES, format_bytes
from offload.store.cgroup import cgroup_headrooms
from offload.store.limits import (
    Getrlimit,
    Headroom,
    address_space_headroom,
    proc_values,
    process_headrooms,
)

AVAILABLE_SHARE = 0.7
"""Share of the available memory that the arena takes by default; the rest is the program's."""

DISK_SHARE = 0.9


@dataclass(frozen=True)
class HostBudget:
    """A cap of the host arena, and where it comes from as `report` shows it."""

    cap_bytes: int
    reason: str


def physical_bytes() -> int:
    """Returns the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def tightest_headroom(
    root: Path = Path("/"), getrlimit: Getrlimit = resource.getrlimit
) -> Headroom:
    """Asks everything that limits this process's memory: the kernel, each cgroup, `ulimit`.

    Half of the physical memory stands in for the kernel's estimate where it gives none.

    Args:
        root: where `proc` and the cgroups lie; another one in tests.
        getrlimit: the limits of this process.

    Returns:
        What leaves the least.
    """
    available = proc_values(root, "proc/meminfo").get("MemAvailable")
    if available is None:
        machine = Headroom(physical_bytes() // 2, "is half of this machine's memory")
    else:
        machine = Headroom(available, "this machine has available")
    found = [machine, *cgroup_headrooms(root), *process_headrooms(root, getrlimit)]
    return min(found, key=lambda headroom: headroom.nbytes)


def free_disk_bytes(directory: str) -> int:
    """Says how much may lie on a disk where the policy names no cap.

    Args:
        directory: on that disk.

    Returns:
        90 % of what an unprivileged user may still write to its file system.

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


def reservable(root: Path = Path("/"), getrlimit: Getrlimit = resource.getrlimit) -> HostBudget:
    """Says how much address space to reserve for the arena, which no later cap exceeds.

    Args:
        root: where `proc` lies; another one in tests.
        getrlimit: the limits of this process.

    Returns:
        As much as the machine has memory, since it costs nothing, unless `ulimit -v` leaves less.
    """
    size = physical_bytes()
    machine = HostBudget(size, f"the {format_bytes(size)} that this machine has")
    space = address_space_headroom(root, getrlimit)
    if space is None:
        return machine
    share = _share_of(space)
    steps = share.cap_bytes // MIN_HOST_BYTES * MIN_HOST_BYTES  # the arena rounds up
    return min(machine, HostBudget(steps, share.reason), key=lambda budget: budget.cap_bytes)


def default_budget(root: Path = Path("/"), getrlimit: Getrlimit = resource.getrlimit) -> HostBudget:
    """Returns the cap where the policy names none: a share of what the tightest limit leaves."""
    return _share_of(tightest_headroom(root, getrlimit))


def named_budget(
    asked_bytes: int,
    reserved: HostBudget,
    committed_bytes: int = 0,
    root: Path = Path("/"),
    getrlimit: Getrlimit = resource.getrlimit,
) -> HostBudget:
    """Says what becomes of a cap that the policy names.

    Args:
        asked_bytes: `Policy.host_bytes`.
        reserved: the arena's address space, from `reservable`.
        committed_bytes: what the arena holds already, and the limits' figures therefore lack.
        root: where `proc` and the cgroups lie; another one in tests.
        getrlimit: the limits of this process.

    Returns:
        The cap as asked, unless it cannot be reserved; its reason tells where a limit leaves less.
    """
    if asked_bytes > reserved.cap_bytes:
        asked = f"where Policy.host_bytes asks for {format_bytes(asked_bytes)}"
        return HostBudget(reserved.cap_bytes, f"{reserved.reason}, {asked}")
    left = tightest_headroom(root, getrlimit)
    left_bytes = left.nbytes + committed_bytes
    if asked_bytes <= left_bytes:
        return HostBudget(asked_bytes, "Policy.host_bytes")
    more = f"more than the {format_bytes(left_bytes)} that {left.source}"
    return HostBudget(asked_bytes, f"Policy.host_bytes, {more}")


def _share_of(left: Headroom) -> HostBudget:
    return HostBudget(
        int(left.nbytes * AVAILABLE_SHARE),
        f"{100 * AVAILABLE_SHARE:.0f} % of the {format_bytes(left.nbytes)} that {left.source}",
    )
