"""Draws memory over a step, stacked by purpose: as it is, checkpointed, offloaded, by tiles."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from offload.planner.composition import Step
from offload.planner.cost import compute_seconds
from offload.planner.dry_run import Situation
from offload.planner.ledger import PURPOSES
from offload.planner.outline import outline_of
from offload.planner.planning import CARD_ROUNDING, device_card
from offload.planner.prediction import Forecast
from offload.planner.result import Plan, describe
from offload.policy import Policy

_COLORS = (
    "#4d4d4d",
    "#b2182b",
    "#ef8a62",
    "#2166ac",
    "#1b7837",
    "#7fbf7b",
    "#9970ab",
    "#fdb863",
    "#dfc27d",
    "#80cdc1",
)
_GIB = 2**30


def draw(args: argparse.Namespace, made: Plan) -> None:
    """Draws four ways to run the step that was planned, each with its own scale.

    Args:
        args: options of `offload plan`.
        made: the plan; its policy is the last of the four.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "expected the package matplotlib for --plot, found none. pip install matplotlib."
        ) from error
    dtype = getattr(torch, args.dtype) if args.dtype else None
    outline = outline_of(args.model, dtype=dtype, lora=args.lora, four_bit=args.four_bit)
    card = device_card(args.card)
    situation = Situation(made.tokens, made.batch, made.train, card.kind, CARD_ROUNDING)
    forecast = Forecast(outline, situation, made.optimizer)
    whole = Policy(mode="checkpoint", tier="device", loss_chunk_tokens=0)
    ways = {
        "as it is": Policy(mode="keep", loss_chunk_tokens=0),
        "checkpointed": whole,
        "checkpointed, inputs on the host": Policy(
            mode="checkpoint", tier="host", loss_chunk_tokens=0
        ),
    }
    steps = {name: forecast.step(policy) for name, policy in ways.items()}
    steps[f"planned: {describe(made.policy)}"] = made.step
    figure, panels = pyplot.subplots(2, 2, figsize=(13, 8), layout="constrained")
    for axes, (name, step) in zip(panels.flat, steps.items(), strict=True):
        _draw_step(axes, step, card, name)
        if made.budget.device is not None:
            limit = made.budget.device - made.budget.reserve
            axes.axhline(limit / _GIB, color="black", linestyle="--", linewidth=1)
    figure.suptitle(made.title)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(args.plot, dpi=120)
    pyplot.close(figure)


def _draw_step(axes: Any, step: Step, card: Any, name: str) -> None:
    times: list[float] = []
    stacks: list[list[float]] = [[] for _ in PURPOSES]
    now = 0.0
    for segment in step.segments:
        seconds = compute_seconds(segment, card)
        for share, found in ((0.0, segment.peak), (0.5, segment.peak), (1.0, segment.end)):
            times.append(now + share * seconds)
            for stack, size in zip(stacks, found, strict=True):
                stack.append(max(0, size) / _GIB)
        now += seconds
    labels = [purpose.value for purpose in PURPOSES]
    axes.stackplot(times, stacks, labels=labels, colors=_COLORS, linewidth=0)
    axes.set_title(f"{name}\npeak {step.peak_bytes / _GIB:.1f} GiB", fontsize=9)
    axes.set_xlabel("predicted seconds", fontsize=8)
    axes.set_ylabel("GiB on the device", fontsize=8)
    axes.margins(x=0)
