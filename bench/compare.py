"""Are two methods' results the same: loss and every gradient, or the last hidden state.

NOTE: What counts as the same
-----------------------------
Methods sum in other orders, so they differ by rounding; none is asked to be equal bit by bit, save
where both it and the reference promise that (`methods.Method.exact`).

- By truth: the step is run once more with the same weights in a wider type. A method may be at most
  twice as far from that as the reference is, tensor by tensor, plus one rounding of the tensor
  itself. bfloat16 is judged so, since its rounding is so large that a fixed limit would hide bugs;
  float32 with `--truth`.
- By fixed limits against the reference: float32, and where a truth did not fit or was not wanted
  (`--no-truth`). Such rows have no `truth_error`.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from bench.methods import METHODS


@dataclasses.dataclass(frozen=True)
class Limits:
    """Largest relative differences that pass as rounding.

    Args:
        tensors: Of each gradient, or of the last hidden state, in 2-norms.
        loss: Of the loss.
        floor: The share of all tensors' norm below which a single one's norm does not matter.
    """

    tensors: float
    loss: float
    floor: float = 1e-3


# Plain torch differs from itself by this much when only the order of attention's sums changes
# (eager against sdpa, 255 tokens, 3 layers, hidden 64, four families): loss 0 and 1.3e-5,
# gradients 6.3e-7 and 6.5e-2 for float32 and bfloat16. Over a large vocabulary it is off from a
# float64 truth by more: SmolLM2-135M, float32, 128 tokens, CPU: loss 8.4e-6, gradients 5.5e-4,
# while a loss by chunks is off by 3.2e-7 and 1.3e-5 and would be called wrong by tighter limits.
LIMITS: dict[str, dict[str, Limits]] = {
    "step": {
        "float32": Limits(tensors=2e-3, loss=3e-5),
        "bfloat16": Limits(tensors=0.15, loss=2e-4),
    },
    "forward": {
        "float32": Limits(tensors=2e-5, loss=0.0),  # SmolLM2, 256 tokens in tiles of 96: 1.3e-6
        "bfloat16": Limits(tensors=0.15, loss=0.0),
    },
}
DTYPES = ("float32", "bfloat16")
TRUTH_DTYPE = {"bfloat16": "float32", "float32": "float64"}
"""The type that judges another. Models compute some norms in float32 whatever their own type is, so
that a float64 truth is about 1e-5 off itself."""

_BLOCK_ELEMENTS = 1 << 22


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one set of named tensors is from another.

    Args:
        relative: For each name `|a - b| / max(|b|, floor)` in 2-norms; the floor is a share of the
            norm of all tensors, since the gradient of a key bias is zero in exact arithmetic and
            only rounding in practice. Infinite for NaN and for other shapes.
        max_abs: Largest difference of single elements.
        bit_equal: Whether all tensors are equal bit by bit.
        missing: Names in one set only.
    """

    relative: dict[str, float]
    max_abs: float
    bit_equal: bool
    missing: tuple[str, ...] = ()

    @property
    def worst(self) -> str:
        """The name where the relative difference is largest."""
        return max(self.relative, key=self.relative.__getitem__, default="")

    @property
    def max_relative(self) -> float:
        """The largest relative difference."""
        return max(self.relative.values(), default=0.0)


def compare_tensors(path: Path, reference_path: Path, floor: float = 1e-3) -> Difference:
    """Compares two files of named tensors, block by block, so that they need not fit in memory.

    Args:
        path: Written by `Task.save`.
        reference_path: The same of another method.
        floor: See `Limits`.

    Returns:
        The difference.
    """
    ours = torch.load(path, mmap=True)
    theirs = torch.load(reference_path, mmap=True)
    norms = {name: _norm(theirs[name]) for name in theirs}
    least = max(floor * math.hypot(*norms.values()), 1e-300)
    relative, max_abs = {}, 0.0
    missing = tuple(sorted(ours.keys() ^ theirs.keys()))
    for name in sorted(ours.keys() & theirs.keys()):
        distance, largest = _distance(ours[name], theirs[name])
        relative[name] = distance / max(norms[name], least)
        if math.isnan(relative[name]):
            relative[name] = math.inf
        max_abs = max(max_abs, math.inf if math.isnan(largest) else largest)
    return Difference(relative, max_abs, not missing and max_abs == 0, missing)


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.reshape(-1).split(_BLOCK_ELEMENTS)


def _norm(tensor: torch.Tensor) -> float:
    return math.hypot(*(float(block.double().norm()) for block in _blocks(tensor)))


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Returns the 2-norm and the largest element of a difference."""
    if ours.shape != theirs.shape:
        return math.inf, math.inf
    square, largest = 0.0, torch.zeros((), dtype=torch.float64)
    for a, b in zip(_blocks(ours), _blocks(theirs), strict=True):
        difference = (a.double() - b.double()).abs()
        square += float(difference.square().sum())
        if difference.numel():
            largest = torch.maximum(largest, difference.max())  # keeps a NaN
    return math.sqrt(square), float(largest)


def judge(
    row: dict[str, Any], reference: dict[str, Any], difference: Difference, limits: Limits
) -> str:
    """Decides by fixed limits whether a method computed the same as the reference.

    Args:
        row: The method's figures.
        reference: Those of the reference method.
        difference: Of their tensors.
        limits: What passes as rounding.

    Returns:
        An empty string when they agree, otherwise what differs.
    """
    if difference.missing:
        return f"tensor on one side only: {difference.missing[0]}"
    if not _loss_distance(row, reference) <= limits.loss:
        distance = _loss_distance(row, reference)
        return f"loss differs by {distance:.1e} of {reference['method']}'s"
    if not difference.max_relative <= limits.tensors:
        return f"{difference.worst} differs by {difference.max_relative:.1e}"
    return ""


def judge_by_truth(
    row: dict[str, Any],
    reference: dict[str, Any],
    error: Difference,
    reference_error: Difference,
    truth: dict[str, Any],
    limits: Limits,
    rounding: float,
) -> str:
    """Decides whether a method is at most twice as far from the truth as the reference is.

    Args:
        row: The method's figures.
        reference: Those of the reference method.
        error: Difference of the method's tensors from the truth's.
        reference_error: The same of the reference method.
        truth: The truth's figures.
        limits: `loss` is added to what the loss may differ, since a single number can be right by
            luck.
        rounding: Relative rounding of the dtype, added to what a tensor may differ.

    Returns:
        An empty string when it is, otherwise what is not.
    """
    if error.missing:
        return f"tensor on one side only: {error.missing[0]}"
    ours, theirs = _loss_distance(row, truth), _loss_distance(reference, truth)
    if not ours <= 2 * theirs + limits.loss:
        return f"loss is off by {ours:.1e}, {reference['method']}'s by {theirs:.1e}"
    excess = {
        name: distance - 2 * reference_error.relative.get(name, 0.0)
        for name, distance in error.relative.items()
    }
    worst = max(excess, key=excess.__getitem__)
    if not excess[worst] <= rounding:
        return (
            f"{worst} is off by {error.relative[worst]:.1e}, {reference['method']}'s by "
            f"{reference_error.relative.get(worst, 0.0):.1e}"
        )
    return ""


def _loss_distance(row: dict[str, Any], reference: dict[str, Any]) -> float:
    if "loss" not in reference:
        return 0.0
    return abs(row["loss"] - reference["loss"]) / max(abs(reference["loss"]), 1e-12)


def _judge_bits(row: dict[str, Any], reference: dict[str, Any], device: str) -> str:
    promised = METHODS[row["method"]].exact and METHODS[reference["method"]].exact
    # Attention's backward on a card adds in an order of its own each time.
    if device != "cpu" or not promised or row["bit_equal"]:
        return ""
    return f"expected the bits of {reference['method']}, got others"


def mark_wrong(
    rows: list[dict[str, Any]],
    files: dict[str, Path],
    limits: Limits,
    device: str,
    truth: dict[str, Any] | None = None,
    dtype: str = "float32",
) -> None:
    """Compares every finished method with the first finished one, in place.

    Args:
        rows: Figures of each method, the reference first; gain `reference`,
            `max_relative_difference`, `max_abs_difference`, `bit_equal`, with a truth
            `truth_error`, and status "wrong" with a message where they differ.
        files: Tensors of each method, and of the truth under "truth".
        limits: What passes as rounding where there is no truth.
        device: Where they ran.
        truth: Figures of the truth, if there is one.
        dtype: Name of the methods' dtype.
    """
    finished = [row for row in rows if row["status"] == "ok"]
    if not finished:
        return
    reference = finished[0]

    def error_of(row: dict[str, Any]) -> Difference:
        return compare_tensors(files[row["method"]], files["truth"], limits.floor)

    reference_error = error_of(reference) if truth else None
    for row in finished:
        difference = compare_tensors(files[row["method"]], files[reference["method"]], limits.floor)
        row["reference"] = reference["method"]
        row["max_relative_difference"] = difference.max_relative
        row["max_abs_difference"] = difference.max_abs
        row["worst_tensor"] = difference.worst
        row["bit_equal"] = difference.bit_equal and row.get("loss") == reference.get("loss")
        if truth is not None and reference_error is not None:
            error = error_of(row)
            row["truth_error"] = error.max_relative
            rounding = torch.finfo(getattr(torch, dtype)).eps
            message = judge_by_truth(
                row, reference, error, reference_error, truth, limits, rounding
            )
        else:
            message = judge(row, reference, difference, limits)
        message = message or _judge_bits(row, reference, device)
        if message:
            row |= {"status": "wrong", "message": message}
