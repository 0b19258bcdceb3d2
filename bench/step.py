"""Compares methods on one training step: speed, memory, host traffic and correctness together."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import compare, models, plot, table
from bench.environment import describe_device, describe_environment
from bench.methods import METHODS, select_methods
from bench.spec import REPOSITORY, StepSpec
from offload.policy import parse_bytes

_SIZES = ("hidden", "layers", "heads", "kv_heads", "mlp", "vocab")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench step`."""
    parser.add_argument("--model", choices=models.MODELS, default="smollm2")
    for name in _SIZES:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, help="size of a random-weight model")
    parser.add_argument("--tokens", type=int, required=True, help="length of the one sequence")
    parser.add_argument("--methods", default=",".join(METHODS), help="names with commas between")
    parser.add_argument("--dtype", choices=sorted(compare.LOSS_LIMIT), default="float32")
    parser.add_argument("--lora", type=int, default=0, help="LoRA rank; 0 trains all weights")
    parser.add_argument(
        "--steps", type=int, default=2, help="timed steps after the first one; 0: time that one"
    )
    parser.add_argument("--lr", type=float, default=0.0, help="AdamW rate; 0 leaves weights alone")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--tier", choices=("auto", "device", "host"))
    parser.add_argument(
        "--memory-limit", type=parse_bytes, help='bytes or "8GiB", weights included'
    )
    parser.add_argument("--json", type=Path, help="append one JSON line per method to this file")
    parser.add_argument("--plot", type=Path, help="write memory over the step as a PNG")
    parser.add_argument("--seed", type=int, default=0)


def build_spec(args: argparse.Namespace) -> StepSpec:
    """Turns the command line into a spec and prepares the input.

    Args:
        args: Parsed options.

    Returns:
        The spec that every worker gets.

    Raises:
        ValueError: If tokens or steps are too few, or SmolLM2 is given other sizes.
    """
    if args.tokens < 2 or args.steps < 0:
        raise ValueError(
            f"step: expected --tokens >= 2 and --steps >= 0, got {args.tokens} and {args.steps}."
        )
    sizes = {name: getattr(args, name) for name in _SIZES}
    if args.model == "smollm2" and any(sizes.values()):
        raise ValueError("step: expected no sizes for smollm2, got some. Choose --model llama.")
    return StepSpec(
        **sizes,
        **{
            name: getattr(args, name)
            for name in (
                *("model", "tokens", "dtype", "lora", "steps", "lr", "device"),
                *("tier", "memory_limit", "seed"),
            )
        },
        input_directory=str(models.convert_smollm2()) if args.model == "smollm2" else "",
    )


def run_worker(name: str, spec_file: Path, gradients: Path) -> dict[str, Any]:
    """Runs one method in a process of its own.

    Args:
        name: Method.
        spec_file: The spec as JSON.
        gradients: Where the worker writes its gradients.

    Returns:
        The worker's figures; status "failed" with a message when it died without a result.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "bench.worker", name, str(spec_file), str(gradients)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = run.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        row = json.loads(lines[-1])
    else:
        row = {"method": name, "status": "failed", "message": _death(run)}
    if row["status"] == "failed":
        row["traceback"] = run.stderr[-4000:]
    return row


def _death(run: subprocess.CompletedProcess[str]) -> str:
    if run.returncode == -9:
        return "killed by signal 9, mostly by a system out of memory"
    last = run.stderr.strip().splitlines()[-1:] or ["no output"]
    return f"exit status {run.returncode}: {last[0]}"


def mark_wrong(rows: list[dict[str, Any]], files: dict[str, Path], dtype: str) -> None:
    """Compares every finished method with the first finished one, in place.

    Args:
        rows: Figures of each method; gain `reference`, `max_relative_difference`, `bit_equal`,
            and status "wrong" with a message where they differ.
        files: Gradients of each method.
        dtype: Name of the model's dtype.
    """
    finished = [row for row in rows if row["status"] == "ok"]
    order = {name: index for index, name in enumerate(METHODS)}
    finished.sort(key=lambda row: order[row["method"]])
    for row in finished:
        difference = compare.compare_gradients(files[row["method"]], files[finished[0]["method"]])
        row["reference"] = finished[0]["method"]
        row["max_relative_difference"] = difference.max_relative
        row["worst_parameter"] = difference.worst
        row["bit_equal"] = difference.bit_equal and row["loss"] == finished[0]["loss"]
        message = compare.judge(row, finished[0], difference, dtype)
        if message:
            row |= {"status": "wrong", "message": message}


def run_methods(names: list[str], spec: StepSpec) -> list[dict[str, Any]]:
    """Runs all methods one after another and compares them.

    Args:
        names: Methods.
        spec: What to run.

    Returns:
        One row of figures for each method, in the order of `names`.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        spec_file = Path(directory) / "spec.json"
        spec_file.write_text(json.dumps(spec.to_dict()))
        files = {name: Path(directory) / f"{name}.pt" for name in names}
        with table.show_progress(len(names)) as advance:
            for name in names:
                advance(name)
                rows.append(run_worker(name, spec_file, files[name]))
        mark_wrong(rows, files, spec.dtype)
    return rows


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    """Appends one JSON line per row.

    Args:
        path: File to append to.
        rows: Complete records.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: Parsed options.

    Returns:
        0 if every method finished right or ran out of memory, 1 if one failed or was wrong.
    """
    names = select_methods(args.methods)
    spec = build_spec(args)
    shared = {
        "bench": "step",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **describe_environment(),
        "device": describe_device(spec.device),
        "spec": {k: v for k, v in spec.to_dict().items() if k != "input_directory"},
    }
    if spec.model != "smollm2":
        shared["spec"] |= {k: shared["spec"][k] or v for k, v in models.SHAPES[spec.model].items()}
    rows = [shared | row for row in run_methods(names, spec)]
    table.print_rows(rows)
    if args.json:
        write_json(args.json, rows)
    if args.plot:
        plot.draw_curves(rows, args.plot)
    return int(any(row["status"] in ("failed", "wrong") for row in rows))
