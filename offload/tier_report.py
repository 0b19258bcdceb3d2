"""What `report` says of the memory behind the device: the host arena and the disk."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from offload import _native
from offload.policy import format_bytes
from offload.store import engine


@dataclass(frozen=True)
class ArenaReport:
    """The process's host arena. `live_bytes` belong to tickets; `committed_bytes` use memory.

    `cap_reason` says which limit the cap comes from, `pin_refusal` why memory is pageable and is
    empty where it is not; `numa_node` is the node that the memory prefers, -1 for none.
    """

    cap_bytes: int
    cap_reason: str
    committed_bytes: int
    pinned_bytes: int
    live_bytes: int
    peak_live_bytes: int
    peak_committed_bytes: int
    pin_refusal: str
    numa_node: int

    def __str__(self) -> str:
        line = (
            f"host arena: {format_bytes(self.live_bytes)} live "
            f"(peak {format_bytes(self.peak_live_bytes)}), "
            f"{format_bytes(self.committed_bytes)} committed, "
            f"{format_bytes(self.pinned_bytes)} page-locked, "
            f"cap {format_bytes(self.cap_bytes)} ({self.cap_reason})"
        )
        return f"{line}\nhost arena: pageable: {self.pin_refusal}" if self.pin_refusal else line


@dataclass(frozen=True)
class DiskReport:
    """The process's disk tier.

    Attributes:
        directory: where its file is, which has no name.
        direct: whether transfers bypass the page cache.
        cap_bytes, file_bytes, live_bytes, peak_live_bytes: the cap, the space that is reserved now,
            and what belongs to tickets.
        written_bytes, read_bytes: of all transfers so far; writes wear a drive out.
        write_ms, read_ms: time during which at least one was under way.
        write_refusal: why the last write failed; empty when it went well.
    """

    directory: str
    direct: bool
    cap_bytes: int
    file_bytes: int
    live_bytes: int
    peak_live_bytes: int
    written_bytes: int
    read_bytes: int
    write_ms: float
    read_ms: float
    write_refusal: str

    def __str__(self) -> str:
        line = (
            f"disk: {format_bytes(self.live_bytes)} live "
            f"(peak {format_bytes(self.peak_live_bytes)}), "
            f"{_rate(self.written_bytes, self.write_ms)} out, "
            f"{_rate(self.read_bytes, self.read_ms)} back, cap {format_bytes(self.cap_bytes)}"
        )
        if not self.direct:
            line += "; through the page cache"
        return f"{line}; refused: {self.write_refusal}" if self.write_refusal else line


def arena_report() -> ArenaReport | None:
    """Returns the arena's figures; None before its first use."""
    if not _native.started():
        return None
    counters = common_fields(_native.arena_statistics(), ArenaReport)
    counters |= {"cap_reason": engine.cap_reason(), "pin_refusal": engine.pin_refusal()}
    return ArenaReport(**counters)


def disk_report() -> DiskReport | None:
    """Returns the disk tier's figures; None where the process has none."""
    if not _native.started() or not (disk := _native.disk_statistics()).cap_bytes:
        return None
    refusal = _native.residency_statistics().write_refusal
    return DiskReport(**common_fields(disk, DiskReport), write_refusal=refusal)


def common_fields(source: object, report_class: type[Any]) -> dict[str, Any]:
    """Reads the fields of a report from the counters that bear the same names."""
    names = [field.name for field in fields(report_class)]
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


def _rate(nbytes: int, milliseconds: float) -> str:
    return f"{nbytes / milliseconds / 1e6:.1f} GB/s" if milliseconds else "-"
