"""Comparison of parameters' gradients, for both tests."""

from __future__ import annotations

import torch

from offload.errors import TileRefused


def compare_parameters(
    expected: list[torch.Tensor | None],
    actual: list[torch.Tensor | None],
    tolerance: float,
    complaint: str,
) -> None:
    """Compares gradients by their norms; those that are next to nothing by the largest of all.

    Args:
        expected: gradients, None where there is none.
        actual: gradients of the same tensors.
        tolerance: largest difference, as a part of the norm.
        complaint: what is wrong about one that differs.

    Raises:
        TileRefused: if they differ.
    """
    norms = [0.0 if g is None else float(g.double().norm()) for g in expected]
    floor = 1e-4 * max(norms, default=0.0)
    for norm, ours, theirs in zip(norms, expected, actual, strict=True):
        if (ours is None) != (theirs is None):
            raise TileRefused("which of its parameters get gradients depends on other tokens")
        if ours is None or theirs is None:
            continue
        if not float((ours.double() - theirs.double()).norm()) <= tolerance * max(norm, floor):
            raise TileRefused(f"the gradient of a parameter {complaint}")
