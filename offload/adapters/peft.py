"""What knows peft: which adapters of a layer are switched on, and how adapters are added."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn

PREFIX = "base_model.model."
"""Before the names of a model's modules once it has adapters."""


def adapter_state(layer: nn.Module) -> Hashable:
    """Returns what changes when adapters inside a layer are activated, switched off or merged."""
    return tuple(
        (str(module._active_adapter), getattr(module, "_disable_adapters", False))
        for module in layer.modules()
        if hasattr(module, "_active_adapter")
    )


def add_lora(model: Any, rank: int) -> nn.Module:
    """Freezes a causal language model and puts LoRA adapters on all its linear layers.

    Args:
        model: of transformers.
        rank: of the adapters.

    Returns:
        The model of peft around it.

    Raises:
        ModuleNotFoundError: if peft is not installed.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plan: expected the package peft for lora, found none. Install it: pip install peft."
        ) from error
    config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted
