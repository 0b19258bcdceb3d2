"""Compares what the planner predicts with what a step really takes: device, host, and RSS."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import models, table
from bench.environment import begin_record
from bench.methods import METHODS
from bench.processes import WorkerProcess
from bench.runner import write_json
from bench.spec import StepSpec

Row = dict[str, Any]

SMALL = {"hidden": 512, "layers": 6, "heads": 8, "kv_heads": 4, "mlp": 1376, "vocab": 8192}
TINY = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 688, "vocab": 4096}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step that is predicted and measured.

    Args:
        method: A name of `METHODS`.
        spec: What to run.
    """

    method: str
    spec: StepSpec

    @property
    def name(self) -> str:
        """Says what is run, for people."""
        spec = self.spec
        size = f" {spec.hidden}x{spec.layers}" if spec.hidden else ""
        trained = f"LoRA {spec.lora}" if spec.lora else "all weights"
        return f"{spec.model}{size}, {spec.tokens}, {spec.dtype}, {trained}"


def _case(method: str, model: str, tokens: int, **options: Any) -> Case:
    return Case(method, StepSpec(model, tokens, **options))


CASES = (
    _case("offload-tiled", "llama", 2048, tile=512, tier="host", **SMALL),
    _case("offload-tiled", "llama", 8192, tile=1024, tier="host", **SMALL),
    _case("offload-tiled", "llama", 16384, tile=2048, tier="host", lora=8, **TINY),
    _case("offload-tiled", "llama", 5000, tile=768, tier="device", **SMALL),
    _case("offload-tiled", "llama", 2048, tile=512, tier="host", dtype="bfloat16", **TINY),
    _case("offload-checkpoint", "llama", 4096, tier="host", **SMALL),
    _case("plain", "llama", 2048, **SMALL),
    _case("offload-tiled", "opt", 4096, tile=1024, tier="host", **SMALL),
    _case("offload-tiled", "opt", 8192, tile=2048, tier="host", lora=8, **TINY),
    _case("offload-checkpoint", "opt", 2048, tier="device", **SMALL),
    _case("offload-tiled", "qwen2", 4096, tile=512, tier="host", **SMALL),
    _case("offload-tiled", "qwen2", 8192, tile=1024, tier="device", lora=8, **SMALL),
    _case("offload-checkpoint", "qwen2", 2048, tier="host", dtype="bfloat16", **TINY),
    _case("offload-tiled", "smollm2", 2048, tile=512, tier="host", lora=8),
    _case("offload-tiled", "smollm2", 4096, tile=1024, tier="host"),
    _case("plain", "smollm2", 2048, lora=8),
)

_QUICK = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 344, "vocab": 2048}
QUICK_CASES = (
    _case("offload-tiled", "llama", 2100, tile=512, tier="host", **_QUICK),
    _case("offload-checkpoint", "opt", 2048, tier="device", **_QUICK),
    _case("offload-tiled", "qwen2", 2048, tile=768, tier="device", lora=4, **_QUICK),
)
"""For the tests: seconds each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench plan`."""
    parser.add_argument("--only", help="cases whose name holds this text")
    parser.add_argument("--json", type=Path, help="append one JSON line per case to this file")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: Parsed options.

    Returns:
        0 if every case was measured, else 1.
    """
    cases = [case for case in CASES if not args.only or args.only in case.name]
    rows = []
    shared = begin_record("plan", "cpu")
    with table.show_progress(len(cases)) as advance:
        for row in compare(cases, advance):
            rows.append(shared | row)
            if args.json:
                write_json(args.json, rows[-1:])
    print_rows(rows)
    return int(any(row["status"] != "ok" for row in rows))


def compare(cases: Iterable[Case], advance: Any = lambda name: None) -> Iterator[Row]:
    """Predicts and measures steps on the CPU, each in a process of its own.

    Args:
        cases: What to run.
        advance: Is told what starts now.

    Yields:
        A row for each.
    """
    for case in cases:
        advance(case.name)
        spec = case.spec
        if spec.model == "smollm2":
            directory = str(models.convert_smollm2())
            spec = dataclasses.replace(spec, input_directory=directory)
        row: Row = {"case": case.name, "method": case.method, "tile": spec.tile, "tier": spec.tier}
        row |= predict(case.method, spec)
        row |= measure(case.method, spec)
        if row["status"] == "ok":
            row["device_ratio"] = row["predicted_bytes"] / row["measured_bytes"]
            if row["measured_host_bytes"]:
                row["host_ratio"] = row["predicted_host_bytes"] / row["measured_host_bytes"]
        yield row


def predict(method: str, spec: StepSpec) -> Row:
    """Asks the planner.

    Args:
        method: A name of `METHODS`.
        spec: What is run.

    Returns:
        Bytes of device and host, and the device's by purpose.
    """
    import offload
    from offload.devices import DeviceKind
    from offload.planner.dry_run import Situation
    from offload.planner.ledger import PURPOSES
    from offload.planner.outline import outline_of
    from offload.planner.prediction import Forecast

    models.quiet_transformers()
    config: Any = spec.input_directory if spec.model == "smollm2" else models.build_config(spec)
    outline = outline_of(config, dtype=getattr(torch, spec.dtype), lora=spec.lora)
    made = METHODS[method]
    policy = offload.Policy(mode="keep") if method == "plain" else made.make_policy(spec)
    step = Forecast(outline, Situation(spec.tokens, 1, True, DeviceKind("cpu"))).step(policy)
    purposes = zip(PURPOSES, step.peak, strict=True)
    return {
        "predicted_bytes": step.peak_bytes,
        "predicted_host_bytes": step.host_bytes,
        "predicted_purposes": {purpose.value: size for purpose, size in purposes if size},
    }


def measure(method: str, spec: StepSpec) -> Row:
    """Runs the step under the storage tracker.

    Args:
        method: A name of `METHODS`.
        spec: What is run.

    Returns:
        Bytes of device and host, and how far RSS grew in the step.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        spec_file = Path(directory) / "spec.json"
        spec_file.write_text(json.dumps(spec.to_dict()))
        result = Path(directory) / "result.pt"
        arguments = ["step", method, str(spec_file), str(result)]
        with WorkerProcess(arguments, Path(directory) / "errors") as worker:
            figures = worker.ask("measure")
            if figures["status"] == "ok":
                figures = worker.ask("finish")
    if figures["status"] != "ok":
        return {"status": figures["status"], "message": figures["message"]}
    return {
        "status": "ok",
        "measured_bytes": figures["peak_live_bytes"],
        "measured_host_bytes": figures.get("arena_peak_live_bytes", 0),
        "weights_bytes": figures["weights_bytes"],
        "rss_growth_bytes": figures["peak_rss_bytes"] - figures["rss_before_bytes"],
        "tracked_step_s": figures["tracked_step_s"],
    }


def print_rows(rows: list[Row]) -> None:
    """Prints the table.

    Args:
        rows: Complete records.
    """
    shown = Table(title="predicted and measured peaks, MiB", title_justify="left")
    columns = ("step", "method", "tile", "tier", "device: predicted", "measured", "ratio")
    for column in (*columns, "arena: predicted", "measured", "ratio", "live + arena", "RSS"):
        shown.add_column(column, justify="left" if column in columns[:2] else "right")
    for row in rows:
        if row["status"] != "ok":
            shown.add_row(row["case"], row["method"], row["status"], row["message"])
            continue
        growth = row["predicted_bytes"] - row["weights_bytes"] + row["predicted_host_bytes"]
        shown.add_row(
            row["case"],
            row["method"],
            str(row["tile"] or ""),
            row["tier"] or "",
            *(_mib(row[key]) for key in ("predicted_bytes", "measured_bytes")),
            f"{row['device_ratio']:.3f}",
            *(_mib(row[key]) for key in ("predicted_host_bytes", "measured_host_bytes")),
            f"{row['host_ratio']:.4f}" if "host_ratio" in row else "",
            f"+{_mib(growth)}",
            f"+{_mib(row['rss_growth_bytes'])}",
        )
    table.console().print(shown)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
