"""Puts the stand-ins of a wrapped model in place, and takes them away again."""

from __future__ import annotations

from torch import nn

from offload.adapters import transformers as hf
from offload.discovery import NamedLayers, find_tokenwise
from offload.installation import Installation
from offload.layer_call import LayerCall, TokenwiseCall
from offload.stand_in import stand_in_of


def install(model: nn.Module, named: NamedLayers, installation: Installation) -> None:
    """Makes a model run its layers as a policy says.

    Args:
        model: changed in place: instance attributes only.
        named: its layers, first to last.
        installation: the policy, and what the layers share.
    """
    policy = installation.policy
    for index, (name, layer) in enumerate(named):
        LayerCall(layer, name, len(named) - index, installation).put()
    if policy.mode in ("auto", "tiled"):
        for name, module in find_tokenwise(model, named):
            TokenwiseCall(module, name, 0, installation).put()
        hf.install_bodies(model)
    if policy.mode in ("auto", "tiled") or policy.loss_chunk_tokens is not None:
        hf.install_head(model, policy.loss_chunk_tokens)
    if policy.mode != "keep":
        hf.install(model)


def uninstall(model: nn.Module) -> list[LayerCall]:
    """Undoes `install`; a model without it is left alone.

    Args:
        model: changed in place.

    Returns:
        The calls that stood in for its layers.
    """
    wrapped = wrapped_layers(model)
    for call in wrapped:
        call.remove()
    hf.uninstall_head(model)
    hf.uninstall_bodies(model)
    hf.uninstall(model)
    return wrapped


def wrapped_layers(model: nn.Module) -> list[LayerCall]:
    """Returns the calls of a model's wrapped layers, in the order of `modules()`."""
    calls = (stand_in_of(module, LayerCall) for module in model.modules())
    return [call for call in calls if call is not None]
