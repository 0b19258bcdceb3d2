"""`report`: what a wrapped model moved, where it is, and who waited."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import nn

from offload import _native
from offload._wrap import wrapped_layers
from offload.policy import format_bytes
from offload.store import default_store, engine

if TYPE_CHECKING:
    from rich.table import Table

    from offload.installation import Installation
    from offload.layer_call import LayerCall

_COLUMNS = (
    "layer",
    "mode",
    "calls",
    "replays",
    "offloaded",
    "kept",
    "host now",
    "D2H ms",
    "H2D ms",
    "stall ms",
)


@dataclass(frozen=True)
class LayerReport:
    """Figures of one layer, summed over all steps since it was wrapped.

    `host_bytes`, `disk_bytes`, `device_bytes` are where its tickets are now; `offloaded_bytes` and
    `reloaded_bytes` what was copied; times are of finished copies.
    """

    name: str
    mode: str
    forwards: int
    recomputes: int
    offloaded_tensors: int
    offloaded_bytes: int
    reloaded_bytes: int
    kept_bytes: int
    host_bytes: int
    disk_bytes: int
    device_bytes: int
    d2h_ms: float
    h2d_ms: float
    stall_ms: float


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


@dataclass(frozen=True)
class Report:
    """What `offload.report` returns. `print` it, or take `to_dict()`.

    Attributes:
        verdict: one line: active or not, and why.
        layers: one entry a wrapped layer.
        arena: the host arena, None before its first use; all models of the process share it.
        disk: the disk tier, None where the process has none.
        written_bytes_per_step: what all models wrote to the disk since this one was wrapped, by its
            steps.
        steps, elapsed_ms: training steps, and their time from first forward to last replay.
        back_pressure_ms: time the process waited because too many bytes were in flight.
    """

    verdict: str
    layers: tuple[LayerReport, ...]
    arena: ArenaReport | None
    disk: DiskReport | None
    written_bytes_per_step: int
    steps: int
    elapsed_ms: float
    back_pressure_ms: float

    @property
    def moved_bytes(self) -> int:
        """Bytes copied in both directions, all layers."""
        return sum(layer.offloaded_bytes + layer.reloaded_bytes for layer in self.layers)

    @property
    def stall_ms(self) -> float:
        """Time that computation stood still for reloads, all layers."""
        return sum(layer.stall_ms for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, numbers and strings, fit for JSON."""
        fields = asdict(self)
        fields["layers"] = [dict(layer) for layer in fields["layers"]]
        return fields | {"moved_bytes": self.moved_bytes, "stall_ms": self.stall_ms}

    def __str__(self) -> str:
        rows = [_COLUMNS, *(_row(layer) for layer in self.layers)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([self.verdict, *lines, self._memory_lines()])

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=self.verdict, caption=self._memory_lines())
        for column, title in enumerate(_COLUMNS):
            table.add_column(title, justify="left" if column == 0 else "right")
        for layer in self.layers:
            table.add_row(*_row(layer))
        return table

    def _memory_lines(self) -> str:
        if self.disk is None:
            return self._arena_line()
        disk = self.disk
        line = (
            f"disk: {format_bytes(disk.live_bytes)} live (peak {format_bytes(disk.peak_live_bytes)}), "
            f"{format_bytes(self.written_bytes_per_step)} written a step, "
            f"{_rate(disk.written_bytes, disk.write_ms)} out, "
            f"{_rate(disk.read_bytes, disk.read_ms)} back, cap {format_bytes(disk.cap_bytes)}"
        )
        if not disk.direct:
            line += "; through the page cache"
        if disk.write_refusal:
            line += f"; refused: {disk.write_refusal}"
        return f"{self._arena_line()}\n{line}"

    def _arena_line(self) -> str:
        if self.arena is None:
            return "host arena: not used"
        arena = self.arena
        line = (
            f"host arena: {format_bytes(arena.live_bytes)} live "
            f"(peak {format_bytes(arena.peak_live_bytes)}), "
            f"{format_bytes(arena.committed_bytes)} committed, "
            f"{format_bytes(arena.pinned_bytes)} page-locked, "
            f"cap {format_bytes(arena.cap_bytes)} ({arena.cap_reason})"
        )
        return f"{line}\nhost arena: pageable: {arena.pin_refusal}" if arena.pin_refusal else line


def report(model: nn.Module) -> Report:
    """Says what a wrapped model has moved so far, where it is now and what it waited for.

    Reads counters only; does not wait for copies in flight, whose times are not counted yet.

    Args:
        model: any model; one that is not wrapped gets a report that says so.

    Returns:
        A `Report`; printing it shows a table, with rich's `print` a prettier one.
    """
    default_store().retire()
    calls = wrapped_layers(model)
    layers = tuple(_layer_report(call) for call in calls)
    installation = calls[0].installation if calls else None
    copies = _native.engine_statistics() if _native.started() else None
    disk = _disk_report()
    steps = installation.progress.steps if installation else 0
    written = disk.written_bytes - installation.written_before if disk and installation else 0
    return Report(
        verdict=_verdict(layers, installation),
        layers=layers,
        arena=_arena_report(),
        disk=disk,
        written_bytes_per_step=written // max(1, steps),
        steps=steps,
        elapsed_ms=installation.progress.elapsed_ms if installation else 0.0,
        back_pressure_ms=copies.back_pressure_ms if copies else 0.0,
    )


def _layer_report(call: LayerCall) -> LayerReport:
    return LayerReport(
        **_common_fields(call.record, LayerReport),
        host_bytes=call.record.live_bytes("host"),
        disk_bytes=call.record.live_bytes("disk"),
        device_bytes=call.record.live_bytes("device"),
    )


def _arena_report() -> ArenaReport | None:
    if not _native.started():
        return None
    statistics = _common_fields(_native.arena_statistics(), ArenaReport)
    statistics |= {"cap_reason": engine.cap_reason(), "pin_refusal": engine.pin_refusal()}
    return ArenaReport(**statistics)


def _disk_report() -> DiskReport | None:
    if not _native.started() or not (disk := _native.disk_statistics()).cap_bytes:
        return None
    refusal = _native.residency_statistics().write_refusal
    return DiskReport(**_common_fields(disk, DiskReport), write_refusal=refusal)


def _common_fields(
    source: object, report_class: type[LayerReport] | type[ArenaReport] | type[DiskReport]
) -> Any:
    """Reads the fields of a report from the counters that bear the same names."""
    names = [field.name for field in fields(report_class)]
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


def _verdict(layers: tuple[LayerReport, ...], installation: Installation | None) -> str:
    if installation is None:
        return "not wrapped: call offload.wrap(model)"
    active = sum(1 for layer in layers if layer.forwards)
    head = f"{active}/{len(layers)} layers"
    if reason := installation.idle_reason():
        state = "recomputing only" if active else "not active"
        return f"{state}: {head}, nothing moved: {reason}"
    moved = sum(layer.offloaded_bytes + layer.reloaded_bytes for layer in layers)
    elapsed = installation.progress.elapsed_ms
    stalled = 100 * sum(layer.stall_ms for layer in layers) / elapsed if elapsed else 0.0
    return f"active: {head}, {format_bytes(moved)} moved, {stalled:.1f} % stalled"


def _row(layer: LayerReport) -> tuple[str, ...]:
    return (
        layer.name,
        layer.mode or "-",
        str(layer.forwards),
        str(layer.recomputes),
        format_bytes(layer.offloaded_bytes),
        format_bytes(layer.kept_bytes),
        format_bytes(layer.host_bytes),
        f"{layer.d2h_ms:.1f}",
        f"{layer.h2d_ms:.1f}",
        f"{layer.stall_ms:.1f}",
    )


def _rate(nbytes: int, milliseconds: float) -> str:
    return f"{nbytes / milliseconds / 1e6:.1f} GB/s" if milliseconds else "-"
