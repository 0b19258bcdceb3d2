"""Measures what a codec does to training: gradients layer by layer, and the loss over steps."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import offload
from bench import models, table, tasks
from bench.environment import begin_record
from bench.runner import write_json
from bench.spec import StepSpec
from offload.policy import CODECS

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench codec`."""
    parser.add_argument("--codec", choices=CODECS, default="fp8")
    parser.add_argument("--roles", default="input,kv,attention", help="what is encoded")
    parser.add_argument("--tokens", type=int, default=2048, help="of the gradients' one step")
    parser.add_argument("--steps", type=int, default=50, help="LoRA steps of the loss curve")
    parser.add_argument("--step-tokens", type=int, default=512, help="of each, the text's next")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW rate")
    parser.add_argument("--tile", type=int, default=512, help="tokens of a tile")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="append one JSON line to this file")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: Parsed options.

    Returns:
        0.
    """
    codec = dict.fromkeys(args.roles.split(","), args.codec)
    directory = str(models.convert_smollm2())
    spec = StepSpec(
        "smollm2", args.tokens, dtype=args.dtype, device=args.device, input_directory=directory
    )
    row: Row = {
        **begin_record("codec", args.device),
        "codec": codec,
        "tile_tokens": args.tile,
        "tokens": args.tokens,
    }
    if args.tokens:
        row |= compare_gradients(spec, codec, args.tile)
    if args.steps:
        lora = StepSpec(**(spec.to_dict() | {"lora": 8, "tokens": args.step_tokens * args.steps}))
        row |= {"step_tokens": args.step_tokens, "lr": args.lr}
        row |= compare_losses(lora, codec, args)
    print_row(row)
    if args.json:
        write_json(args.json, [row])
    return 0


def _wrapped(spec: StepSpec, codec: dict[str, str] | None, tile: int) -> Any:
    policy = offload.Policy(
        mode="tiled", tier="host", tile_tokens=tile, min_bytes=0, keep_last=0, codec=codec
    )
    return offload.wrap(models.build_model(spec), policy=policy)


def compare_gradients(spec: StepSpec, codec: dict[str, str], tile: int) -> Row:
    """Runs one step of all weights with a codec and one without.

    Args:
        spec: Model and tokens.
        codec: As `Policy` takes it.
        tile: Tokens of a tile.

    Returns:
        For each layer the cosine between both gradients and the relative errors of what was
        encoded, the loss of both steps, and the bytes that moved to the host.
    """
    gradients, losses, moved, errors = [], [], [], []
    ids = models.build_batch(spec)
    for used in (None, codec):
        model = _wrapped(spec, used, tile)
        losses.append(tasks.train_step(model, ids))
        report = offload.report(model)
        moved.append(sum(layer.offloaded_bytes for layer in report.layers))
        errors = [layer.codec_errors for layer in report.layers if layer.codec_errors]
        gradients.append([_flat_gradient(layer) for layer in model.model.layers])
        del model
    cosines = [
        torch.nn.functional.cosine_similarity(exact, lossy, dim=0).item()
        for exact, lossy in zip(*gradients, strict=True)
    ]
    return {
        "gradient_cosines": cosines,
        "codec_errors": errors,
        "losses_of_one_step": losses,
        "offloaded_bytes": moved,
    }


def _flat_gradient(layer: torch.nn.Module) -> torch.Tensor:
    gradients = [p.grad.flatten() for p in layer.parameters() if p.grad is not None]
    return torch.cat(gradients).double().cpu()


def compare_losses(spec: StepSpec, codec: dict[str, str], args: argparse.Namespace) -> Row:
    """Trains LoRA from the same start with a codec and without.

    Args:
        spec: Model, and the tokens of all steps together.
        codec: As `Policy` takes it.
        args: `step_tokens`, `lr` and `tile`.

    Returns:
        The losses of both trainings.
    """
    curves = {
        name: list(train(_wrapped(spec, used, args.tile), spec, args.step_tokens, args.lr))
        for name, used in (("lossless", None), ("lossy", codec))
    }
    return {"loss_curves": curves}


def train(model: Any, spec: StepSpec, step_tokens: int, lr: float) -> Iterator[float]:
    """Trains on a text from its beginning to its end.

    Args:
        model: A causal language model.
        spec: Names the text and its length.
        step_tokens: Tokens of a step.
        lr: AdamW rate.

    Yields:
        The loss of each step.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    for ids in models.build_batch(spec).split(step_tokens, dim=1):
        yield tasks.train_step(model, ids, optimizer)


def print_row(row: Row) -> None:
    """Prints a summary: extremes over the layers, and both losses at some of the steps.

    Args:
        row: A complete record.
    """
    title = f"codec {row['codec']}, {row['device']}, commit {row['commit'][:12]}"
    shown = Table(title=title, title_justify="left")
    for column in ("", "least", "median", "most"):
        shown.add_column(column, justify="left" if column == "" else "right")
    if "gradient_cosines" in row:
        _add_extremes(shown, "gradient cosine of a layer", row["gradient_cosines"], ".6f")
        for role in row["codec_errors"][0]:  # the final norm has an input alone
            errors = [100 * layer[role] for layer in row["codec_errors"] if role in layer]
            _add_extremes(shown, f"relative error of {role}, %", errors, ".3f")
    screen = table.console()
    screen.print(shown)
    if "gradient_cosines" in row:
        exact, lossy = row["offloaded_bytes"]
        screen.print(f"moved to the host: {lossy:,} of {exact:,} bytes, {lossy / exact:.3f}")
    if "loss_curves" in row:
        curves = row["loss_curves"]
        count = len(curves["lossless"])
        for step in sorted({0, count // 4, count // 2, 3 * count // 4, count - 1}):
            exact, lossy = curves["lossless"][step], curves["lossy"][step]
            screen.print(f"loss at step {step + 1}: {exact:.4f} lossless, {lossy:.4f} lossy")


def _add_extremes(shown: Table, name: str, values: list[float], form: str) -> None:
    shown.add_row(name, *(format(pick(values), form) for pick in (min, statistics.median, max)))
