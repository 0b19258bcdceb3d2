"""What an optimizer holds, and what its step takes besides: torch's own, run on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.planner.ledger import Ledger, Purpose

_SMALL = 4096
"""Elements below which bitsandbytes keeps a state in float32."""
_BLOCK = 256
"""Elements that share a scale in bitsandbytes' 8-bit states."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters, **options: torch.optim.SGD(
        parameters, momentum=0.9, **options
    ),
}
EIGHT_BIT = "adamw-8bit"
NAMES = (*OPTIMIZERS, EIGHT_BIT, "none")


class OptimizerBytes(NamedTuple):
    """Bytes of an optimizer.

    Attributes:
        state: held between steps.
        step: what a step takes besides parameters, gradients and state, at its peak.
    """

    state: int
    step: int


def check_optimizer(function: str, name: str) -> None:
    """Raises ValueError where there is no optimizer of that name; `function` names the caller."""
    if name not in NAMES:
        raise ValueError(
            f"{function}: expected optimizer in {NAMES}, got {name!r}. Choose one of these; 'none' "
            "counts gradients alone."
        )


def optimizer_bytes(
    name: str, parameters: Iterable[nn.Parameter], *, on_card: bool, rounding: int = 1
) -> OptimizerBytes:
    """Counts what an optimizer holds and takes.

    Args:
        name: one of `NAMES`.
        parameters: those that are trained, on meta.
        on_card: whether the step runs on a card, where torch updates all parameters at once.
        rounding: bytes that the allocator rounds up to.

    Returns:
        State and temporaries.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or name == "none":
        return OptimizerBytes(0, 0)
    if name == EIGHT_BIT:
        return OptimizerBytes(sum(_eight_bit_bytes(p.numel()) for p in trained), 0)
    options: dict[str, Any] = {"lr": 1e-3, "foreach": on_card}
    # Of its own parameters: those of the model must not be left with gradients.
    copies = [nn.Parameter(torch.empty_like(parameter)) for parameter in trained]
    for copy in copies:
        copy.grad = torch.empty_like(copy)
    optimizer = OPTIMIZERS[name](copies, **options)
    ledger = Ledger(rounding)
    ledger.watch([*copies, *(copy.grad for copy in copies if copy.grad is not None)], Purpose.SAVED)
    with ledger:
        ledger.begin("before")
        ledger.begin("first step")
        optimizer.step()
        ledger.begin("step")
        optimizer.step()
        ledger.finish()
    before, first, step = ledger.segments
    held = sum(first.end)
    return OptimizerBytes(held - sum(before.end), sum(step.peak) - held)


def _eight_bit_bytes(elements: int) -> int:
    if elements < _SMALL:
        return 2 * 4 * elements
    return 2 * (elements + 4 * -(-elements // _BLOCK))
