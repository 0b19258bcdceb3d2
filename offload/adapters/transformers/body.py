"""Model bodies, which make the masks: switched to our attention while they run."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from offload.adapters.transformers.attention import attention_routed, configs_of
from offload.adapters.transformers.caches import is_cache
from offload.adapters.transformers.checkpointing import is_wrapped
from offload.adapters.transformers.library import function_of, pretrained_modules
from offload.stand_in import ForwardStandIn, stand_in_of

CAPTURE_SWITCHES = frozenset({"output_attentions", "output_router_logits"})
"""Arguments that ask for what tiles do not return."""

_reason_in_call: ContextVar[str | None] = ContextVar("offload_body_reason", default=None)
"""Why layers of the body that runs now are not tiled; empty where they are, None outside a body."""


def untiled_reason() -> str:
    """Says why the model body that runs now must not run its layers by tiles; else empty."""
    return _reason_in_call.get() or ""


class BodyCall(ForwardStandIn):
    """Stands in for the forward of a library model: switches the attention for the call.

    Left alone are calls whose attention weights or router logits are wanted, and those without
    gradients that fill a key-value cache, such as `generate`'s.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; a model inside another one follows what the outer one decided."""
        forward = self.__wrapped__
        if _reason_in_call.get() is not None:
            return forward(*args, **kwargs)
        reason = self._reason(_named(forward, args, kwargs))
        token = _reason_in_call.set(reason)
        try:
            own = reason or not _takes_our_masks(self.module)
            configs = [] if own else configs_of(self.module)
            with attention_routed(configs):
                return forward(*args, **kwargs)
        finally:
            _reason_in_call.reset(token)

    def _reason(self, arguments: dict[str, Any]) -> str:
        config = getattr(self.module, "config", None)
        for name in sorted(CAPTURE_SWITCHES):
            value = arguments.get(name)
            configs = configs_of(self.module) if value is None else []
            if value or any(getattr(part, name, False) for part in configs):
                return f"{name} is on"
        if torch.is_grad_enabled():
            return ""
        use_cache = arguments.get("use_cache")
        if use_cache is None:
            use_cache = getattr(config, "use_cache", False)
        if use_cache or any(is_cache(value) for value in arguments.values()):
            return "a key-value cache is filled"
        return ""


def _takes_our_masks(model: nn.Module) -> bool:
    """Whether a model hands masks on to attention that it looks up by name.

    Others work on their masks themselves, or (transformers 4) make S x S masks for attention that
    they do not know. Their attention is switched for the layers alone, which get no mask where none
    is needed.
    """
    if any(hasattr(type(part), "_update_causal_mask") for part in pretrained_modules(model)):
        return False
    layers = [part for part in model.modules() if is_wrapped(part)]
    return all(
        function_of(type(layer).__module__, "ALL_ATTENTION_FUNCTIONS") is not None
        or not type(layer).__module__.startswith("transformers.")
        for layer in layers
    )


def _named(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    parameters = list(inspect.signature(forward).parameters) if args else []
    return dict(zip(parameters, args, strict=False)) | kwargs


def install_bodies(model: nn.Module) -> None:
    """Makes every library model inside a model switch the attention while it runs."""
    for module in pretrained_modules(model):
        if stand_in_of(module, BodyCall) is None:
            BodyCall(module).put()


def uninstall_bodies(model: nn.Module) -> None:
    """Undoes `install_bodies`."""
    for module in pretrained_modules(model):
        if (call := stand_in_of(module, BodyCall)) is not None:
            call.remove()
