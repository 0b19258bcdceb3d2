"""Are two methods' results the same: loss, and every parameter's gradient."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

# Relative limits of loss and gradients against the reference method. Plain torch differs from
# itself by this much when only the order of attention's sums changes (eager against sdpa, 255
# tokens, 3 layers, hidden 64, four families): loss 0 and 1.3e-5, gradients 6.3e-7 and 6.5e-2 for
# float32 and bfloat16. A wrong gradient shows as far more.
LOSS_LIMIT = {"float32": 1e-5, "bfloat16": 2e-4}
GRADIENT_LIMIT = {"float32": 1e-4, "bfloat16": 0.15}


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one set of gradients is from another.

    Args:
        max_relative: Largest `|a - b| / max(|b|, floor)` over the parameters, in 2-norms; the
            floor is a thousandth of the norm of all gradients, since the gradient of a key bias
            is zero in exact arithmetic and only rounding in practice.
        worst: The parameter where it is largest.
        bit_equal: Whether all gradients are equal bit by bit.
        missing: Parameters with a gradient in one set only.
    """

    max_relative: float
    worst: str
    bit_equal: bool
    missing: tuple[str, ...] = ()


def compare_gradients(path: Path, reference_path: Path) -> Difference:
    """Compares two files of gradients, parameter by parameter.

    Args:
        path: Written by `worker.save_gradients`.
        reference_path: The same of the reference method.

    Returns:
        The difference; NaN anywhere makes it infinite.
    """
    ours = torch.load(path, mmap=True)
    theirs = torch.load(reference_path, mmap=True)
    missing = tuple(sorted(ours.keys() ^ theirs.keys()))
    norms = {name: float(theirs[name].double().norm()) for name in theirs}
    floor = 1e-3 * sum(norm**2 for norm in norms.values()) ** 0.5
    worst, largest, bit_equal = "", 0.0, not missing
    for name in ours.keys() & theirs.keys():
        if torch.equal(ours[name], theirs[name]):
            continue
        bit_equal = False
        distance = float((ours[name].double() - theirs[name].double()).norm())
        relative = distance / max(norms[name], floor, 1e-300)
        if math.isnan(relative):
            relative = math.inf
        if relative > largest:
            worst, largest = name, relative
    return Difference(largest, worst, bit_equal, missing)


def judge(
    row: dict[str, Any], reference: dict[str, Any], difference: Difference, dtype: str
) -> str:
    """Decides whether a method computed the same as the reference.

    Args:
        row: The method's figures.
        reference: Those of the reference method.
        difference: Of their gradients.
        dtype: Name of the model's dtype.

    Returns:
        An empty string when they agree, otherwise what differs.
    """
    loss_difference = abs(row["loss"] - reference["loss"]) / max(abs(reference["loss"]), 1e-12)
    if difference.missing:
        return f"gradient on one side only: {difference.missing[0]}"
    if not loss_difference <= LOSS_LIMIT[dtype]:
        return f"loss differs by {loss_difference:.1e} of {reference['method']}'s"
    if not difference.max_relative <= GRADIENT_LIMIT[dtype]:
        return f"gradient of {difference.worst} differs by {difference.max_relative:.1e}"
    return ""
