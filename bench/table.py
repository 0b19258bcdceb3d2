"""Results as a table on the terminal, and the progress bar while workers run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

GIB = 2**30
_WIDTH_WITHOUT_TERMINAL = 230


def console() -> Console:
    """Returns a console as wide as the terminal, or as wide tables are where there is none."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)


@contextlib.contextmanager
def show_progress(total: int) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar, run by run; silent where the output is no terminal.

    Args:
        total: Number of runs.

    Yields:
        A function to call with a method's name when a run of it starts.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description:<18}"), BarColumn())
    disabled = not sys.stderr.isatty()
    started = 0
    with Progress(
        *columns,
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=disabled,
        transient=True,
    ) as progress:
        task = progress.add_task("", total=total)

        def advance(name: str) -> None:
            nonlocal started
            progress.update(task, description=name, completed=started)
            started += 1

        yield advance


def choose_unit(rows: list[dict[str, Any]]) -> tuple[int, str]:
    """Returns the unit of memory that suits a run: its bytes and its name.

    Args:
        rows: Records of one run.

    Returns:
        GiB from a peak of 2 GiB on, MiB below.
    """
    highest = max((row.get("peak_live_bytes", 0) for row in rows), default=0)
    return (GIB, "GiB") if highest >= 2 * GIB else (2**20, "MiB")


def _number(row: dict[str, Any], key: str, form: str) -> str | None:
    return format(row[key], form) if row.get(key) is not None else None


def _last_loss(row: dict[str, Any]) -> str | None:
    trained = row["spec"].get("lr") and row.get("losses")
    return f"{row['losses'][-1]:.6f}" if trained else None


def _layer_modes(row: dict[str, Any]) -> str | None:
    modes = row.get("layer_modes", {})
    return "\n".join(f"{count} {mode}" for mode, count in modes.items())


def _time_ratio(row: dict[str, Any]) -> str | None:
    ratio = row.get("time_ratio")
    return ratio and f"{ratio['median']:.3f}\n{ratio['min']:.2f}-{ratio['max']:.2f}"


def _max_abs(row: dict[str, Any]) -> str | None:
    # Of gradients it says nothing: their scales differ from tensor to tensor.
    return _number(row, "max_abs_difference", ".1e") if row["bench"] == "forward" else None


def _equal(row: dict[str, Any]) -> str | None:
    if row.get("reference") == row["method"]:
        return "ref"
    return {True: "yes", False: "no"}.get(row.get("bit_equal"))  # type: ignore[arg-type]


# Titles in which a U stands are sizes in bytes.
_COLUMNS: dict[str, Callable[[dict[str, Any]], str | None] | str] = {
    "\ntokens/s": lambda row: _number(row, "tokens_per_s", ".1f"),
    "step\ns": lambda row: _number(row, "step_s", ".3f"),
    "first\ncall s": lambda row: _number(row, "first_call_s", ".1f"),
    "time\n/base": _time_ratio,
    "peak live\nU": "peak_live_bytes",
    "over\nweights U": "peak_live_delta_bytes",
    "activa-\ntions U": "peak_activation_bytes",
    "allocated\nU": "peak_allocated_bytes",
    "reserved\nU": "peak_reserved_bytes",
    "peak RSS\nU": "peak_rss_bytes",
    "page cache\n+U": "page_cache_growth_bytes",
    "arena\nlive U": "arena_peak_live_bytes",
    "arena\ntaken U": "arena_peak_committed_bytes",
    "moved\nU/step": "moved_bytes_per_step",
    "written\nU/step": "written_bytes_per_step",
    "layer\nmodes": _layer_modes,
    "tile\ntokens": lambda row: _number(row, "tile_tokens", "d"),
    "stall\nms/step": lambda row: _number(row, "stall_ms_per_step", ".1f"),
    "\nloss": lambda row: _number(row, "loss", ".6f"),
    "last\nloss": _last_loss,
    "\ngrad norm": lambda row: _number(row, "gradient_norm", ".6g"),
    "hidden\nnorm": lambda row: _number(row, "hidden_norm", ".6g"),
    "max rel\ndiff": lambda row: _number(row, "max_relative_difference", ".1e"),
    "max abs\ndiff": _max_abs,
    "error to\ntruth": lambda row: _number(row, "truth_error", ".1e"),
    "bit-\nequal": _equal,
}
_STATUS_STYLE = {"ok": "green", "wrong": "bold red", "OOM": "yellow", "failed": "red"}


def _read_cell(
    row: dict[str, Any], read: Callable[[dict[str, Any]], str | None] | str, unit: tuple[int, str]
) -> str | None:
    if callable(read):
        return read(row)
    digits = 3 if unit[0] == GIB else 1
    return f"{row[read] / unit[0]:.{digits}f}" if row.get(read) is not None else None


def rank_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Orders methods: the right ones by speed, the others after them in their given order.

    Args:
        rows: Figures of each method.

    Returns:
        The rows, those with status "ok" with their `rank` from 1.
    """
    right = sorted(
        (row for row in rows if row["status"] == "ok"), key=lambda row: -row["tokens_per_s"]
    )
    ranked = [row | {"rank": index} for index, row in enumerate(right, 1)]
    return ranked + [row for row in rows if row["status"] != "ok"]


def describe_run(row: dict[str, Any]) -> str:
    """Returns one line that names shapes, machine and commit of a result."""
    spec = row["spec"]
    shape = ", ".join(
        f"{key} {spec[key]}"
        for key in ("hidden", "layers", "heads", "kv_heads", "mlp", "vocab")
        if spec.get(key)
    )
    what = f"LoRA r={spec['lora']}" if spec["lora"] else "all weights"
    what = "forward only" if row["bench"] == "forward" else what
    timed = ", timed under the memory tracker" if row.get("timed_under_tracker") else ""
    limit = f", limit {spec['memory_limit'] / GIB:.2f} GiB" if spec["memory_limit"] else ""
    base = row.get("time_ratio", {}).get("base")
    turns = f", in turns with {base} as base" if base else ""
    changed = " + changes" if row["dirty"] else ""
    return (
        f"{spec['model']}{f' ({shape})' if shape else ''}, {spec['tokens']} tokens, "
        f"{spec['dtype']}, {what}{limit}; {row['device']}, {row['machine']['cores']} cores; "
        f"torch {row['torch']}; commit {row['commit'][:12]}{changed}{timed}{turns}"
    )


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Prints all methods of one run, and below the table why some are not ranked.

    Args:
        rows: Complete records of one run.
    """
    rows = rank_rows(rows)
    unit = choose_unit(rows)
    shown = {
        title: cells
        for title, read in _COLUMNS.items()
        if any(cells := [_read_cell(row, read, unit) for row in rows])
    }
    table = Table(title=describe_run(rows[0]), title_justify="left")
    table.add_column("\n#")
    table.add_column("\nmethod", no_wrap=True)
    table.add_column("\nstatus", no_wrap=True)
    for title in shown:
        table.add_column(title.replace("U", unit[1]), justify="right")
    for index, row in enumerate(rows):
        style = _STATUS_STYLE[row["status"]]
        status = f"[{style}]{row['status']}[/{style}]"
        cells = [column[index] or "-" for column in shown.values()]
        table.add_row(str(row.get("rank", "-")), row["method"], status, *cells)
    screen = console()
    screen.print(table)
    for row in rows:
        if row.get("message"):
            screen.print(f"{row['method']}: {row['status']}: {row['message']}", markup=False)
