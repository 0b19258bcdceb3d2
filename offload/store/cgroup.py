"""Memory limits of the control groups that this process is in, versions 1 and 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.store.limits import Headroom, read_text

_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page below 2**63."""


@dataclass(frozen=True)
class _Version:
    """How one version names its files; `reclaimable` is a line of memory.stat."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")


@dataclass(frozen=True)
class _Mount:
    """Where a hierarchy is mounted, and which of its groups lies there."""

    version: _Version
    group: str
    folder: str


def cgroup_headrooms(root: Path = Path("/")) -> list[Headroom]:
    """Returns what each limit leaves, from this process's group up to the topmost one it can see.

    Usage counts without the file pages that the kernel drops first (inactive_file). A hybrid
    system, with memory in version 1 beside a version 2 hierarchy, is read in both.

    Args:
        root: where `proc` and the mount points lie; another one in tests.

    Returns:
        One entry a limit; empty without any.
    """
    groups = _groups(read_text(root / "proc/self/cgroup"))
    found: list[Headroom] = []
    for mount in _mounts(read_text(root / "proc/self/mountinfo")):
        if mount.version not in groups:
            continue
        for folder in _folders(root, mount, groups[mount.version]):
            found += _folder_headrooms(root, folder, mount.version)
    return found


def _groups(text: str) -> dict[_Version, str]:
    """Reads this process's groups from lines `4:memory:/a/b` (version 1) and `0::/a/b` (2)."""
    groups = {}
    for line in text.splitlines():
        match line.split(":", 2):
            case ["0", "", path]:
                groups[_V2] = path
            case [_, controllers, path] if "memory" in controllers.split(","):
                groups[_V1] = path
    return groups


def _mounts(text: str) -> Iterator[_Mount]:
    """Reads the mounts that may hold memory limits; proc_pid_mountinfo(5) has the format."""
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, types = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(types) < 3:
            continue
        group, folder = _unescape(fields[3]), _unescape(fields[4])
        if types[0] == "cgroup2":
            yield _Mount(_V2, group, folder)
        elif types[0] == "cgroup" and "memory" in types[2].split(","):
            yield _Mount(_V1, group, folder)


def _unescape(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _folders(root: Path, mount: _Mount, group: str) -> Iterator[Path]:
    """Yields the folders of a group and of those above it, up to the mount point.

    A folder that is missing is passed over, since containers may show only the upper ones.
    """
    below = _path_below(mount.group, group)
    if below is None:
        return
    top = root / mount.folder.lstrip("/")
    for depth in range(len(below), -1, -1):
        folder = top.joinpath(*below[:depth])
        # A version 1 group that is not hierarchical limits itself alone, nor do those above it
        # count what is below.
        if depth < len(below) and read_text(folder / "memory.use_hierarchy").strip() == "0":
            return
        if folder.is_dir():
            yield folder


def _path_below(top: str, group: str) -> list[str] | None:
    """Returns the path from a mounted group down to `group`, None when it is not below.

    Both are as seen from the process's cgroup namespace, in which `/..` is above all that it can
    name: a mount made outside of the namespace begins there.
    """
    top_parts = [part for part in top.split("/") if part]
    parts = [part for part in group.split("/") if part]
    below = parts[len(top_parts) :]
    if parts[: len(top_parts)] == top_parts:
        return None if ".." in below else below
    return [] if all(part == ".." for part in top_parts) else None


def _folder_headrooms(root: Path, folder: Path, version: _Version) -> Iterator[Headroom]:
    for name in version.limits:
        limit = _bytes(folder / name)
        if limit is None or limit >= _UNLIMITED_BYTES:
            continue
        used = (_bytes(folder / version.usage) or 0) - _reclaimable(folder, version)
        path = "/" + (folder / name).relative_to(root).as_posix()
        yield Headroom(max(0, limit - max(0, used)), f"the cgroup limit {path} leaves")


def _reclaimable(folder: Path, version: _Version) -> int:
    for line in read_text(folder / "memory.stat").splitlines():
        match line.split():
            case [name, number] if name == version.reclaimable and number.isdigit():
                return int(number)
    return 0


def _bytes(path: Path) -> int | None:
    """Reads a number; None for "max", and where there is none."""
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None
