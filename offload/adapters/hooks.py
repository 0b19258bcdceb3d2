"""Which module hooks are a user's, and not a library's own."""

from __future__ import annotations

from torch import nn

_LIBRARIES = ("torch.distributed", "accelerate", "peft", "transformers", "offload")
"""Modules whose hooks are meant to run for any part of a layer's tokens."""


def has_user_hook(module: nn.Module) -> bool:
    """Whether a forward or backward hook that no known library made sits on a module."""
    for hooks in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        for hook in hooks.values():
            origin = getattr(hook, "__module__", "") or type(hook).__module__
            if not any(f"{origin}.".startswith(f"{library}.") for library in _LIBRARIES):
                return True
    return False
