"""What the system lets this process take and page-lock, read rather than guessed."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offload.policy import format_bytes

Getrlimit = Callable[[int], tuple[int, int]]
"""`resource.getrlimit`, or a test's: a resource to its soft and hard limit."""

_CAP_IPC_LOCK = 14
_NEVER_OVERCOMMIT = 2


@dataclass(frozen=True)
class Headroom:
    """Bytes that one limit leaves to this process.

    Attributes:
        nbytes: 0 or more.
        source: which limit, as the end of "11.2 GiB that ...".
    """

    nbytes: int
    source: str


@dataclass(frozen=True)
class PinningLimits:
    """What may stand between this process and page-locked memory.

    The driver only says that it refused. NVIDIA's own on Linux counts nothing against
    RLIMIT_MEMLOCK (`os_lock_user_pages` in NVIDIA/open-gpu-kernel-modules takes the pages without
    asking), but sandboxes that page-lock in its place do. WSL2 has a limit that nothing tells:
    0.5 to 1 GiB were seen (microsoft/WSL#14078, NVIDIA/nvidia-docker#1725).

    Attributes:
        wsl: whether the kernel is Microsoft's.
        memlock_bytes: the soft limit; None where it is unlimited or does not bind this process.
        memlock_hard_bytes: how far it may raise that by itself; None without a limit.
    """

    wsl: bool
    memlock_bytes: int | None
    memlock_hard_bytes: int | None

    def found(self) -> str:
        """Names the limits, for a report."""
        names = ["WSL2"] if self.wsl else []
        if self.memlock_bytes is not None:
            names.append(f"RLIMIT_MEMLOCK {self._memlock()}")
        return " and ".join(names) or "none known"

    def remedies(self, pinned_bytes: int) -> str:
        """Says what to set, where `pinned_bytes` had been page-locked before the refusal."""
        advice = []
        if self.wsl:
            advice.append(
                "WSL2 lets CUDA page-lock only a part of the memory, however much is free: run on "
                "Linux itself for more."
            )
        if self.memlock_bytes is not None:
            advice.append(
                f"RLIMIT_MEMLOCK is {self._memlock()}: raise it by `ulimit -l unlimited`, in a "
                "container by `--ulimit memlock=-1`, in case it is what stood in the way."
            )
        advice.append(
            f"With Policy.host_bytes of at most {format_bytes(pinned_bytes)} all is page-locked."
            if pinned_bytes
            else "Policy(tier='device') does without host memory."
        )
        return " ".join(advice)

    def _memlock(self) -> str:
        hard = self.memlock_hard_bytes
        upper = "no hard limit" if hard is None else f"hard limit {format_bytes(hard)}"
        return f"{format_bytes(self.memlock_bytes or 0)} ({upper})"


def process_headrooms(
    root: Path = Path("/"), getrlimit: Getrlimit = resource.getrlimit
) -> list[Headroom]:
    """Reads what `ulimit` and strict overcommit leave to this process.

    Args:
        root: where `proc` lies; another one in tests.
        getrlimit: the limits of this process.

    Returns:
        One entry a limit; empty where nothing limits.
    """
    found = []
    status = proc_values(root, "proc/self/status")
    if (space := address_space_headroom(root, getrlimit)) is not None:
        found.append(space)
    data_limit = getrlimit(resource.RLIMIT_DATA)[0]
    if data_limit != resource.RLIM_INFINITY:
        left = data_limit - status.get("VmData", 0)
        found.append(Headroom(max(0, left), "the limit on data (`ulimit -d`) leaves"))
    if _number(root / "proc/sys/vm/overcommit_memory") == _NEVER_OVERCOMMIT:
        meminfo = proc_values(root, "proc/meminfo")
        if "CommitLimit" in meminfo:
            left = meminfo["CommitLimit"] - meminfo.get("Committed_AS", 0)
            source = "strict overcommit (vm.overcommit_memory = 2) leaves"
            found.append(Headroom(max(0, left), source))
    return found


def address_space_headroom(
    root: Path = Path("/"), getrlimit: Getrlimit = resource.getrlimit
) -> Headroom | None:
    """Returns the address space that `ulimit -v` leaves, None where it is unlimited."""
    limit = getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    left = limit - proc_values(root, "proc/self/status").get("VmSize", 0)
    return Headroom(max(0, left), "the limit on address space (`ulimit -v`) leaves")


def pinning_limits(
    root: Path = Path("/"), getrlimit: Getrlimit = resource.getrlimit
) -> PinningLimits:
    """Returns what may limit page-locked memory here; see `PinningLimits`."""
    soft, hard = getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _may_lock_any(root):
        return PinningLimits(is_wsl(root), None, None)
    return PinningLimits(is_wsl(root), soft, None if hard == resource.RLIM_INFINITY else hard)


def is_wsl(root: Path = Path("/")) -> bool:
    """Returns whether the kernel is that of the Windows Subsystem for Linux."""
    files = ("proc/sys/kernel/osrelease", "proc/version")
    return any("microsoft" in read_text(root / file).lower() for file in files)


def _may_lock_any(root: Path) -> bool:
    """Whether CAP_IPC_LOCK lifts the limit; it does not when a user namespace granted it."""
    capabilities = 0
    for line in read_text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            capabilities = int(line.split()[1], 16)
    own_users = read_text(root / "proc/self/uid_map").split() != ["0", "0", "4294967295"]
    return bool(capabilities >> _CAP_IPC_LOCK & 1) and not own_users


def proc_values(root: Path, file: str) -> dict[str, int]:
    """Reads the lines `Name: 12 kB` of a file below /proc, as bytes; empty without the file."""
    values = {}
    for line in read_text(root / file).splitlines():
        name, _, value = line.partition(":")
        match value.split():
            case [number, "kB"] if number.isdigit():
                values[name] = int(number) * 1024
    return values


def read_text(path: Path) -> str:
    """Returns a file's text, empty where it cannot be read."""
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None
