"""Takes over the library's own checkpointing switch, so that layers are not checkpointed twice."""

from __future__ import annotations

from typing import Any

from torch import nn

from offload.adapters.transformers.library import checkpointing_layer_class, pretrained_modules
from offload.stand_in import ForwardStandIn, stand_in_of

_SWITCHES = ("_set_gradient_checkpointing", "enable_input_require_grads")


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
                body = not isinstance(module, checkpointing_layer_class())
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
    call = stand_in_of(module, ForwardStandIn)
    return call is not None and call.stands_for_layer


def install(model: nn.Module) -> None:
    """Puts a wrapped model in charge of its checkpointing switch; twice is harmless."""
    modules = [
        module
        for module in pretrained_modules(model)
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
    for module in pretrained_modules(model):
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
