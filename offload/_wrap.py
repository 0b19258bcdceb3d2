"""`wrap` and `unwrap`: put `LayerCall` in place of the layers' forwards, and take it away again."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from offload.adapters import transformers as hf
from offload.adapters.accelerate import weights_are_elsewhere
from offload.discovery import NamedLayers, Selection, find_layers
from offload.errors import LayerRefused
from offload.layer_call import Installation, LayerCall
from offload.policy import Policy
from offload.store import default_store, engine

Model = TypeVar("Model", bound=nn.Module)


def wrap(model: Model, *, layers: Selection | None = None, policy: Policy | None = None) -> Model:
    """Makes a model train long inputs in less device memory; nothing else in your code changes.

    Each repeated layer keeps only its inputs for backward, moved asynchronously to page-locked host
    memory, and is run a second time in backward. Loss and gradients are those of the model as it
    was, bit for bit. The cost is one more forward of each layer, as with `torch.utils.checkpoint`;
    the copies hide behind computation.

    Passes without gradients run the layers untouched, key-value cache included. In transformers
    models that train, the library's cache is switched off (as its own gradient checkpointing does),
    and `gradient_checkpointing_enable()` keeps working without a second recomputation.

    Wrapping a wrapped model replaces its policy and selection.

    Args:
        model: changed in place; class, parameters, names, hooks and `state_dict` stay as they are.
        layers: which modules are layers: a class, a name pattern, a list, or a predicate
            `(name, module) -> bool`; None finds them. See `offload.discovery.find_layers`.
        policy: how to run them; None takes the defaults.

    Returns:
        The same model.

    Raises:
        ValueError: if no layer is found.
        TypeError: if an argument has the wrong type.
        LayerRefused: if a layer's weights are not there (on meta, or loaded per call by
            accelerate).
    """
    policy = _checked(model, policy)
    named = find_layers(model, layers)
    for name, layer in named:
        if reason := weights_are_elsewhere(layer):
            raise LayerRefused(
                f"wrap: expected layer '{name}' to hold its weights, but {reason}, so its "
                "gradients would be lost. Load the model onto a device first, without disk or CPU "
                "offload of weights."
            )
    if policy.host_bytes is not None:
        engine.set_host_cap(int(policy.host_bytes))
    unwrap(model)
    _install(model, named, policy)
    return model


def _checked(model: nn.Module, policy: Policy | None) -> Policy:
    if not isinstance(model, nn.Module):
        raise TypeError(f"wrap: expected a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, nn.DataParallel):
        raise TypeError(
            "wrap: expected a model of one process, got nn.DataParallel, which copies layers. "
            "Use DistributedDataParallel and wrap the model inside it."
        )
    if type(model).__name__ == "OptimizedModule":
        raise TypeError(
            "wrap: expected an eager model, got a compiled one. Wrap the model first and compile "
            "modules inside its layers, such as `layer.mlp.compile()`."
        )
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"wrap: expected an offload.Policy, got {policy!r}.")
    return policy if policy is not None else Policy()


def _install(model: nn.Module, named: NamedLayers, policy: Policy) -> None:
    installation = Installation(policy, len(named))
    for index, (name, layer) in enumerate(named):
        layer.forward = LayerCall(layer, name, len(named) - index, installation)
    if policy.mode != "keep":
        hf.install(model)


def unwrap(model: Model) -> Model:
    """Undoes `wrap`; a model that is not wrapped is left alone.

    Graphs that are alive can still run their backward. Host memory goes back to the system as far
    as no graph uses it.

    Args:
        model: changed in place.

    Returns:
        The same model.
    """
    wrapped = wrapped_layers(model)
    for call in wrapped:
        if call.instance_forward is not None:
            call.layer.forward = call.instance_forward
        else:
            del call.layer.forward
    hf.uninstall(model)
    if wrapped:
        default_store().trim()
    return model


def wrapped_layers(model: nn.Module) -> list[LayerCall]:
    """Returns the calls of a model's wrapped layers, in the order of `modules()`."""
    return [module.__dict__["forward"] for module in model.modules() if hf.is_wrapped(module)]
