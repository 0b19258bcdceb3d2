"""Finds classes of transformers and its layers, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn


def class_of(module: str, name: str) -> type | tuple[()]:
    """Returns a class of transformers, or what nothing is an instance of."""
    found = getattr(sys.modules.get(module), name, ())
    return found if isinstance(found, type) else ()


def function_of(module: str, name: str) -> Callable[..., Any] | None:
    """Returns a function of transformers, or None."""
    found: Callable[..., Any] | None = getattr(sys.modules.get(module), name, None)
    return found


def checkpointing_layer_class() -> type | tuple[()]:
    """Returns the base class of the layers that transformers itself would checkpoint."""
    return class_of("transformers.modeling_layers", "GradientCheckpointingLayer")


def pretrained_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the model bodies and heads that are transformers' own, outer ones first."""
    pretrained = class_of("transformers.modeling_utils", "PreTrainedModel")
    return [module for module in model.modules() if isinstance(module, pretrained)]


def find_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the named layers that transformers itself would checkpoint or not split; maybe none.

    A layer inside another one is left out.
    """
    layer_class = checkpointing_layer_class()
    found = _outermost(model, lambda module: isinstance(module, layer_class))
    if found:
        return found
    unsplit = {
        name
        for module in pretrained_modules(model)
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    return _outermost(model, lambda module: type(module).__name__ in unsplit)


def _outermost(
    model: nn.Module, matches: Callable[[nn.Module], bool]
) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():  # parents come right before what is inside them
        inside = found and name.startswith(f"{found[-1][0]}.")
        if name and not inside and matches(module):
            found.append((name, module))
    return found
