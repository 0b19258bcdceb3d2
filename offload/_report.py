"""`report`: what a wrapped model moved, where it is, and who waited."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from offload import _native
from offload.installer import wrapped_layers
from offload.policy import format_bytes
from offload.store import default_store
from offload.tier_report import ArenaReport, DiskReport, arena_report, common_fields, disk_report

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
    `reloaded_bytes` what was copied; times are of finished copies. `codec_errors` is
    `||x - decoded|| / ||x||` of the first tensors of each role that a codec applies to.
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
    codec_errors: dict[str, float]


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
    def codec_errors(self) -> dict[str, float]:
        """The largest relative error of a layer, by role; empty without a codec."""
        largest: dict[str, float] = {}
        for layer in self.layers:
            for role, error in layer.codec_errors.items():
                largest[role] = max(error, largest.get(role, 0.0))
        return largest

    @property
    def stall_ms(self) -> float:
        """Time that computation stood still for reloads, all layers."""
        return sum(layer.stall_ms for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, numbers and strings, fit for JSON."""
        fields = asdict(self)
        fields["layers"] = [dict(layer) for layer in fields["layers"]]
        return fields | {
            "moved_bytes": self.moved_bytes,
            "stall_ms": self.stall_ms,
            "codec_errors": self.codec_errors,
        }

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
        return "\n".join([self.verdict, *lines, self._lines_below()])

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=self.verdict, caption=self._lines_below())
        for column, title in enumerate(_COLUMNS):
            table.add_column(title, justify="left" if column == 0 else "right")
        for layer in self.layers:
            table.add_row(*_row(layer))
        return table

    def _lines_below(self) -> str:
        lines = [str(self.arena) if self.arena else "host arena: not used"]
        if self.disk is not None:
            written = format_bytes(self.written_bytes_per_step)
            lines.append(f"{self.disk}; {written} written a step")
        if errors := self.codec_errors:
            shown = ", ".join(f"{role} {100 * error:.2f} %" for role, error in errors.items())
            lines.append(f"codec: relative error {shown}")
        return "\n".join(lines)


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
    disk = disk_report()
    steps = installation.progress.steps if installation else 0
    written = disk.written_bytes - installation.written_before if disk and installation else 0
    return Report(
        verdict=_verdict(layers, installation),
        layers=layers,
        arena=arena_report(),
        disk=disk,
        written_bytes_per_step=written // max(1, steps),
        steps=steps,
        elapsed_ms=installation.progress.elapsed_ms if installation else 0.0,
        back_pressure_ms=copies.back_pressure_ms if copies else 0.0,
    )


def _layer_report(call: LayerCall) -> LayerReport:
    return LayerReport(
        **common_fields(call.record, LayerReport),
        host_bytes=call.record.live_bytes("host"),
        disk_bytes=call.record.live_bytes("disk"),
        device_bytes=call.record.live_bytes("device"),
        codec_errors=call.record.relative_errors(),
    )


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
