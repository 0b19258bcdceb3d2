"""`wrap` and `unwrap`: put `LayerCall` in place of the layers' forwards, and take it away again."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from offload.adapters import transformers as hf
from offload.adapters.accelerate import weights_are_elsewhere
from offload.discovery import NamedLayers, Selection, find_layers, find_tokenwise
from offload.errors import LayerRefused
from offload.installation import Installation
from offload.layer_call import LayerCall, TokenwiseCall
from offload.policy import Policy
from offload.stand_in import stand_in_of
from offload.store import default_store, engine

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    model: Model,
    *,
    layers: Selection | None = None,
    policy: Policy | None = None,
    verify: bool = False,
) -> Model:
    """Makes a model train long inputs in less device memory; nothing else in your code changes.

    Layers run tile by tile along the sequence, and a second time in backward; what that needs is
    moved asynchronously to page-locked host memory. Attention is never computed twice, and the loss
    of a transformers model never forms all its logits. Gradients are exact: they differ from those
    of the model as it was (with `use_cache=False`) by rounding, as those of another attention
    kernel would. With dropout, tiles draw other masks than the whole sequence would.

    A layer is run so only after a proof on the first tokens it sees (`offload.probe`), which cannot
    see what happens only beyond 256 tokens; `verify` compares the first call whole. Other layers
    run as with `Policy(mode="checkpoint")`, recomputed whole, and a warning says which and why.

    Without gradients, long inputs run tile by tile as well, unless a key-value cache is filled. In
    transformers models that train, the library's cache is switched off (as its own gradient
    checkpointing does), and `gradient_checkpointing_enable()` keeps working without a second
    recomputation.

    Wrapping a wrapped model replaces its policy and selection.

    Args:
        model: changed in place; class, parameters, names, hooks and `state_dict` stay as they are.
        layers: which modules are layers: a class, a name pattern, a list, or a predicate
            `(name, module) -> bool`; None finds them. See `offload.discovery.find_layers`.
        policy: how to run them; None takes the defaults.
        verify: run the first call of each layer a second time in one piece and compare output and
            gradients; needs the memory of one layer's graph over the whole sequence.

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
    if policy.disk is not None:
        limit = None if policy.disk_bytes is None else int(policy.disk_bytes)
        engine.set_disk(str(policy.disk), limit)
    if policy.debug:
        default_store().set_debug(True)
    unwrap(model)
    _install(model, named, Installation(policy, len(named), verify=verify))
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


def _install(model: nn.Module, named: NamedLayers, installation: Installation) -> None:
    policy = installation.policy
    for index, (name, layer) in enumerate(named):
        LayerCall(layer, name, len(named) - index, installation).put()
    if policy.mode in ("auto", "tiled"):
        for name, module in find_tokenwise(model, named):
            TokenwiseCall(module, name, 0, installation).put()
        hf.install_bodies(model)
        hf.install_head(model, policy.loss_chunk_tokens)
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
        call.remove()
    hf.uninstall_head(model)
    hf.uninstall_bodies(model)
    hf.uninstall(model)
    if wrapped:
        default_store().trim()
    return model


def wrapped_layers(model: nn.Module) -> list[LayerCall]:
    """Returns the calls of a model's wrapped layers, in the order of `modules()`."""
    calls = (stand_in_of(module, LayerCall) for module in model.modules())
    return [call for call in calls if call is not None]
