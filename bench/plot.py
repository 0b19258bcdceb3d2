"""Draws the memory-over-step curves of a result file as a PNG."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.table import choose_unit, describe_run

_COLORS = {
    "plain": "#7f7f7f",
    "checkpoint": "#e08214",
    "checkpoint+loss": "#8c510a",
    "save_on_cpu": "#5e3c99",
    "offload": "#1b7837",
    "offload-host": "#2166ac",
    "offload-tiled": "#01a08c",
    "offload-checkpoint": "#c51b7d",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench plot`."""
    parser.add_argument("json", type=Path, help="file written by `step --json`; its last run")
    parser.add_argument("png", type=Path, help="picture to write")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: Parsed options.

    Returns:
        0.
    """
    rows = [json.loads(line) for line in args.json.read_text().splitlines()]
    draw_curves([row for row in rows if row["started"] == rows[-1]["started"]], args.png)
    return 0


def _draw_curve(axes: Any, row: dict[str, Any], unit: tuple[float, str], raised: int) -> None:
    times = [point[0] for point in row["curve"]]
    sizes = [point[1] / unit[0] for point in row["curve"]]
    color = _COLORS.get(row["method"], "black")
    label = f"{row['method']}: peak {max(sizes):.4g} {unit[1]}"
    if row.get("tokens_per_s"):
        label += f", {row['tokens_per_s']:.4g} tokens/s"
    if row["status"] != "ok":
        label += f" ({row['status']})"
    axes.plot(times, sizes, label=label, color=color, linewidth=1.3, drawstyle="steps-post")
    index = max(range(len(sizes)), key=sizes.__getitem__)
    marker = "X" if row["status"] == "OOM" else "o"
    axes.plot(times[index], sizes[index], marker, color=color, markersize=6)
    axes.annotate(
        f"{row['method']} {sizes[index]:.4g}",
        (times[index], sizes[index]),
        (7, 5 + 12 * raised),
        textcoords="offset points",
        color=color,
        fontsize=9,
        fontweight="bold",
    )


def _draw_level(axes: Any, size: float, text: str, color: str) -> None:
    axes.axhline(size, color=color, linewidth=0.9, linestyle="--")
    axes.annotate(
        text, (1, size), (-3, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
        ha="right", color=color, fontsize=8,
    )  # fmt: skip


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the live bytes of each method over its first step.

    Args:
        rows: Complete records of one run; those without a curve are left out.
        path: PNG to write.

    Raises:
        ValueError: If no row has a curve.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.get("curve")]
    if not rows:
        raise ValueError("draw_curves: expected a row with a curve, got none. Look at the table.")
    figure, axes = pyplot.subplots(figsize=(10, 5.6), dpi=130)
    unit = choose_unit(rows)
    highest = max(row["peak_live_bytes"] for row in rows)
    longest = max(row["curve"][-1][0] for row in rows)
    placed: list[tuple[float, int]] = []
    for row in rows:  # a peak close to others gets its label above theirs
        peak = max(row["curve"], key=lambda point: point[1])
        near = [
            at
            for at, size in placed
            if abs(size - peak[1]) < 0.08 * highest and abs(at - peak[0]) < 0.2 * longest
        ]
        _draw_curve(axes, row, unit, len(near))
        placed.append((peak[0], peak[1]))
    weights = max(row["weights_bytes"] for row in rows) / unit[0]
    _draw_level(axes, weights, f"weights {weights:.4g}", "black")
    limit = rows[0]["spec"]["memory_limit"]
    if limit:
        _draw_level(axes, limit / unit[0], f"limit {limit / unit[0]:.4g}", "crimson")
    axes.set_xlim(0, 1.08 * longest)  # room for the label of a late peak
    axes.set_xlabel("seconds into the first step, forward and backward, while memory is traced")
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.12)
    axes.set_ylabel(f"live tensor storages on the device, {unit[1]}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    title = describe_run(rows[0]).split("; ")
    axes.set_title("\n".join([title[0], "; ".join(title[1:])]), loc="left", fontsize=9)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
