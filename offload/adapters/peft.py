"""What knows peft: which adapters of a layer are switched on."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn


def adapter_state(layer: nn.Module) -> Hashable:
    """Returns what changes when adapters inside a layer are activated, switched off or merged."""
    return tuple(
        (str(module._active_adapter), getattr(module, "_disable_adapters", False))
        for module in layer.modules()
        if hasattr(module, "_active_adapter")
    )
