"""Everything that knows transformers: its layers, switches, caches and output capturing.

Nothing here imports transformers; where the program has not, there is nothing to adapt to.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

_SWITCHES = ("_set_gradient_checkpointing", "enable_input_require_grads")
_REPLAYABLE_CACHE_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})
"""Cache layers whose `update` makes new tensors, so that a shallow copy keeps the earlier state."""


def _class(module: str, name: str) -> type | tuple[()]:
    """Returns a class of transformers, or what nothing is an instance of."""
    found = getattr(sys.modules.get(module), name, ())
    return found if isinstance(found, type) else ()


def _checkpointing_layer_class() -> type | tuple[()]:
    return _class("transformers.modeling_layers", "GradientCheckpointingLayer")


def find_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the named layers that transformers itself would checkpoint or not split; maybe none.

    A layer inside another one is left out.
    """
    layer_class = _checkpointing_layer_class()
    found = _outermost(model, lambda module: isinstance(module, layer_class))
    if found:
        return found
    unsplit = {
        name
        for module in _pretrained_modules(model)
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


def _pretrained_modules(model: nn.Module) -> list[nn.Module]:
    pretrained = _class("transformers.modeling_utils", "PreTrainedModel")
    return [module for module in model.modules() if isinstance(module, pretrained)]


# -- the library's own checkpointing switch
# ------------------------------------------------------------


class CheckpointingSwitch:
    """Stands in for `PreTrainedModel._set_gradient_checkpointing` of one wrapped model.

    It sets the flag on the model's bodies, so that the library switches its key-value cache off
    while it trains, and leaves it off on wrapped layers, which would be checkpointed a second time.
    Layers that are not wrapped get the library's own checkpointing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, **_options: Any
    ) -> None:
        """Sets or clears the flags; other options of the library's method have no meaning here."""
        wrapped_part: set[int] = set()
        for module in self.model.modules():
            if is_wrapped(module):
                wrapped_part.update(id(part) for part in module.modules())
        for module in self.model.modules():
            if hasattr(module, "gradient_checkpointing"):
                body = not isinstance(module, _checkpointing_layer_class())
                part: Any = module
                part.gradient_checkpointing = enable and id(module) not in wrapped_part
                part._gradient_checkpointing_func = (
                    call_directly
                    if body or gradient_checkpointing_func is None
                    else gradient_checkpointing_func
                )


class NoInputGradients:
    """Stands in for `enable_input_require_grads`, which offload does not need.

    The library's version makes the embedding's output require gradients. That keeps one hidden
    state and its gradient alive, and makes every frozen layer below the first adapter compute
    gradients.
    """

    def __call__(self) -> None:
        """Does nothing."""


def call_directly(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a layer for old model bodies that call a checkpoint function themselves."""
    return function(*args, **kwargs)


def is_wrapped(module: nn.Module) -> bool:
    """Whether `offload.wrap` has taken over the module's forward."""
    return getattr(module.__dict__.get("forward"), "is_offload_layer_call", False)


def install(model: nn.Module) -> None:
    """Puts a wrapped model in charge of its checkpointing switch; twice is harmless."""
    modules = [
        module
        for module in _pretrained_modules(model)
        if "_set_gradient_checkpointing" not in module.__dict__
    ]
    for module in modules:  # all flags are noted before any is set: models lie inside models
        module._offload_flags = {  # type: ignore[assignment]
            name: part.gradient_checkpointing
            for name, part in module.named_modules()
            if "gradient_checkpointing" in part.__dict__
        }
    for module in modules:
        switch = CheckpointingSwitch(module)
        module._set_gradient_checkpointing = switch  # type: ignore[assignment]
        module.enable_input_require_grads = NoInputGradients()  # type: ignore[assignment]
        if getattr(module, "supports_gradient_checkpointing", False):
            switch(enable=True)


def uninstall(model: nn.Module) -> None:
    """Undoes `install`: deletes the attributes and gives the flags their earlier values."""
    for module in _pretrained_modules(model):
        flags = module.__dict__.pop("_offload_flags", None)
        if flags is None:
            continue
        for attribute in _SWITCHES:
            module.__dict__.pop(attribute, None)
        for name, part in module.named_modules():
            part.__dict__.pop("gradient_checkpointing", None)
            if name in flags:
                part.gradient_checkpointing = flags[name]
            if part.__dict__.get("_gradient_checkpointing_func") is call_directly:
                del part._gradient_checkpointing_func


# -- key-value caches
# ------------------------------------------------------------------------------------


def is_cache(value: Any) -> bool:
    """Whether a value is a transformers cache, which a layer updates in place."""
    return isinstance(value, _class("transformers.cache_utils", "Cache"))


def snapshot_caches(leaves: list[Any]) -> list[Any]:
    """Returns the leaves with every cache replaced by one that has its present state.

    A layer that is replayed with the caller's own cache would append its keys a second time.
    """
    return [_copy_cache(leaf) if is_cache(leaf) else leaf for leaf in leaves]


def _copy_cache(cache: Any) -> Any:
    copied = copy.copy(cache)
    for name, value in vars(cache).items():
        if is_cache(value):
            setattr(copied, name, _copy_cache(value))
        elif name == "layers":
            copied.layers = [copy.copy(layer) for layer in value]
        elif isinstance(value, (dict, list)):
            setattr(copied, name, copy.copy(value))
    return copied


def cannot_replay(leaves: list[Any]) -> str:
    """Names the cache that writes into its tensors, so that a copy keeps no state; else ''."""
    for leaf in leaves:
        if is_cache(leaf):
            parts = [leaf, *(value for value in vars(leaf).values() if is_cache(value))]
            for layer in (layer for part in parts for layer in getattr(part, "layers", ())):
                if type(layer).__name__ not in _REPLAYABLE_CACHE_LAYERS:
                    return f"the {type(leaf).__name__} it updates is made of {type(layer).__name__}"
    return ""


# -- output capturing
# ------------------------------------------------------------------------------------


def stop_collecting_outputs() -> None:
    """Empties the collector of hidden states and attentions in the current context.

    The library's forward hooks on modules inside a layer would record a replay as a second call.
    """
    collector = getattr(
        sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None
    )
    if collector is not None:
        collector.set(None)
