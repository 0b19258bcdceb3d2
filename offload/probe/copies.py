"""A layer's weights and flags replaced for a comparison, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def holds_quantised_weights(layer: nn.Module) -> bool:
    """Whether a layer has weights that cannot be cast."""
    return any(
        not parameter.is_floating_point() or type(parameter) not in (nn.Parameter, torch.Tensor)
        for parameter in layer.parameters()
    )


@contextmanager
def evaluating(layer: nn.Module) -> Iterator[None]:
    """Switches dropout off: tiles draw other masks than the whole sequence."""
    flags = [(module, module.training) for module in layer.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def in_float32(layer: nn.Module, dtype: torch.dtype) -> Iterator[torch.dtype]:
    """Puts copies of weights and buffers in at least float32 in place, without autocast."""
    wide = torch.promote_types(dtype, torch.float32)
    slots: list[tuple[dict[str, Any], str, Any]] = []
    copies: dict[int, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for kind in {_device_type(layer), "cpu"}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            for module in layer.modules():
                for place in (module._parameters, module._buffers):
                    for key, tensor in list(place.items()):
                        if tensor is None or not tensor.is_floating_point():
                            continue
                        slots.append((place, key, tensor))
                        if id(tensor) not in copies:
                            copies[id(tensor)] = _cast(tensor, wide)
                        place[key] = copies[id(tensor)]  # type: ignore[assignment]
            yield wide
        finally:
            for place, key, tensor in slots:
                place[key] = tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = tensor.detach().to(dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)


def _device_type(layer: nn.Module) -> str:
    first = next(layer.parameters(), None)
    return "cpu" if first is None else first.device.type
