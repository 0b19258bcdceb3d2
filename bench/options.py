"""Options that `step` and `forward` share, and the spec that they make."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path

from bench import compare, models
from bench.methods import METHODS
from bench.runner import Plan
from bench.spec import StepSpec
from offload.policy import TIERS, parse_bytes

_SIZES = ("hidden", "layers", "heads", "kv_heads", "mlp", "vocab")


def add_run_arguments(parser: argparse.ArgumentParser, methods: Iterable[str], steps: int) -> None:
    """Declares what to run, where, and how it is timed.

    Args:
        parser: Gets the options.
        methods: Names of the methods that can be chosen.
        steps: Default number of timed runs.
    """
    methods = list(methods)
    lines = "; ".join(f"{name}: {METHODS[name].summary}" for name in methods)
    parser.add_argument("--model", choices=models.MODELS, default="smollm2")
    for name in _SIZES:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, help="size of a random-weight model")
    parser.add_argument("--tokens", type=int, required=True, help="length of the one sequence")
    parser.add_argument(
        "--methods", default=",".join(methods), help=f"names with commas between. {lines}"
    )
    parser.add_argument("--dtype", choices=compare.DTYPES, default="float32")
    parser.add_argument(
        "--steps", type=int, default=steps, help="timed runs after the first; 0: time the first"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--tier", choices=TIERS, help="of offload's methods")
    parser.add_argument("--tile", type=int, help="tokens of a tile of offload's methods")
    parser.add_argument("--disk", help="directory of offload-disk; default: build/bench")
    parser.add_argument(
        "--host-bytes",
        type=parse_bytes,
        default=256 << 20,
        help="what offload-disk keeps in host memory",
    )
    parser.add_argument(
        "--memory-limit", type=parse_bytes, help='bytes or "8GiB", weights included'
    )
    parser.add_argument(
        "--interleave",
        action="store_true",
        help="let the timed runs of the methods alternate, so that a noisy machine hits all alike. "
        "The models of all methods are in memory at once",
    )
    parser.add_argument(
        "--base", help="method that --interleave compares the others with; default: the first"
    )
    parser.add_argument(
        "--truth",
        action=argparse.BooleanOptionalAction,
        help="judge methods by one more run in a wider dtype, not by fixed limits; default: only "
        "for bfloat16",
    )
    parser.add_argument("--json", type=Path, help="append one JSON line per method to this file")
    parser.add_argument("--seed", type=int, default=0)


def build_spec(args: argparse.Namespace) -> StepSpec:
    """Turns the command line into a spec and prepares the input.

    Args:
        args: Parsed options.

    Returns:
        The spec that every worker gets.

    Raises:
        ValueError: If tokens, steps or tile are too few, or SmolLM2 is given other sizes.
    """
    if args.tokens < 2 or args.steps < 0 or (args.tile is not None and args.tile < 1):
        raise ValueError(
            "build_spec: expected --tokens >= 2, --steps >= 0 and --tile >= 1, "
            f"got {args.tokens}, {args.steps} and {args.tile}."
        )
    if args.model == "smollm2" and any(getattr(args, name) for name in _SIZES):
        raise ValueError(
            "build_spec: expected no sizes for smollm2, got some. Choose --model llama."
        )
    fields = (field.name for field in dataclasses.fields(StepSpec))
    given = {name: getattr(args, name) for name in fields if hasattr(args, name)}
    directory = str(models.convert_smollm2()) if args.model == "smollm2" else ""
    return StepSpec(**given, input_directory=directory)


def build_plan(task: str, args: argparse.Namespace, names: list[str], truth: str) -> Plan:
    """Turns the command line into a plan.

    Args:
        task: A name of `tasks.TASKS`.
        args: Parsed options.
        names: The chosen methods.
        truth: Method of the truth's run.

    Returns:
        The plan.

    Raises:
        ValueError: If an option is out of range, or --base names no chosen method or stands
            without --interleave.
    """
    if args.base is not None and (not args.interleave or args.base not in names):
        raise ValueError(
            f"--base: expected --interleave and one of {', '.join(names)}, got {args.base!r}."
        )
    with_truth = args.dtype == "bfloat16" if args.truth is None else args.truth
    spec = build_spec(args)
    return Plan(task, names, spec, args.interleave, args.base, truth if with_truth else None)
