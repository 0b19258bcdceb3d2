"""`wrap` and `unwrap`: put `LayerCall` in place of the layers' forwards, and take it away again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import nn

from offload.adapters.accelerate import weights_are_elsewhere
from offload.discovery import Selection, find_layers
from offload.errors import LayerRefused
from offload.installation import Installation
from offload.installer import install, uninstall
from offload.planner import plan
from offload.policy import Policy
from offload.store import default_store, engine
from offload.store.budget import default_budget

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    model: Model,
    *,
    layers: Selection | None = None,
    policy: Policy | None = None,
    memory: int | str | None = None,
    tokens: int | None = None,
    host: int | str | None = None,
    disk: str | os.PathLike[str] | None = None,
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

    With `memory` and `tokens` the policy is planned (`offload.plan`): the fastest that fits. The
    plan counts on a training step with AdamW, if the model has weights to train; plan with
    `offload.plan` for anything else and give its `policy`.

    Wrapping a wrapped model replaces its policy and selection.

    Args:
        model: changed in place; class, parameters, names, hooks and `state_dict` stay as they are.
        layers: which modules are layers: a class, a name pattern, a list, or a predicate
            `(name, module) -> bool`; None finds them. See `offload.discovery.find_layers`.
        policy: how to run them; None takes the defaults, or plans.
        memory: what the card that the model is on has, in bytes or as `"8GB"`, to plan for; for a
            model on the CPU what the process may take. Needs `tokens`.
        tokens: the longest sequence that will be run.
        host: cap of the host memory for activations, `Policy.host_bytes`; None for 70 % of what is
            left.
        disk: directory on a fast drive for what exceeds it, `Policy.disk`.
        verify: run the first call of each layer a second time in one piece and compare output and
            gradients; needs the memory of one layer's graph over the whole sequence.

    Returns:
        The same model.

    Raises:
        ValueError: if no layer is found, or arguments exclude each other.
        DoesNotFit: if no way to run `tokens` fits `memory`; says what would.
        TypeError: if an argument has the wrong type.
        LayerRefused: if a layer's weights are not there (on meta, or loaded per call by
            accelerate).
    """
    _check_model(model)
    policy = _policy_of(model, layers, policy, _Limits(memory, tokens, host, disk))
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
    install(model, named, Installation(policy, len(named), verify=verify))
    return model


class _Limits(NamedTuple):
    """What `wrap` is told in place of a policy, or for the planner to make one of."""

    memory: int | str | None
    tokens: int | None
    host: int | str | None
    disk: str | os.PathLike[str] | None


def _policy_of(
    model: nn.Module, layers: Selection | None, policy: Policy | None, limits: _Limits
) -> Policy:
    """Returns the policy that the arguments of `wrap` amount to."""
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"wrap: expected an offload.Policy, got {policy!r}.")
    given = [name for name, value in limits._asdict().items() if value is not None]
    if policy is not None and given:
        raise ValueError(
            f"wrap: expected a policy or limits, got a policy and {', '.join(given)}. Put host and "
            "disk into the policy (host_bytes, disk); memory and tokens are for planning one."
        )
    if isinstance(limits.memory, Mapping):
        raise NotImplementedError(
            "wrap: expected the memory of one card, got that of several. offload.plan places a "
            "model on several cards; running it so is not done yet."
        )
    if limits.disk is not None and not Path(limits.disk).is_dir():
        raise ValueError(
            f"wrap: expected a directory for disk, got {limits.disk!r}. Make it first."
        )
    if (limits.memory is None) != (limits.tokens is None):
        raise ValueError(
            f"wrap: expected memory and tokens together, got {', '.join(given)}. Give both to have "
            "the policy planned, or neither."
        )
    if policy is not None:
        return policy
    if limits.tokens is None:
        return Policy(host_bytes=limits.host, disk=limits.disk)
    host = default_budget().cap_bytes if limits.host is None else limits.host
    trains = any(parameter.requires_grad for parameter in model.parameters())
    planned = plan(
        model,
        tokens=limits.tokens,
        memory=limits.memory,
        host=host,
        disk=None if limits.disk is None else Path(limits.disk),
        train=trains,
        layers=layers,
    ).policy
    return planned if limits.host is not None else replace(planned, host_bytes=None)


def _check_model(model: nn.Module) -> None:
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


def unwrap(model: Model) -> Model:
    """Undoes `wrap`; a model that is not wrapped is left alone.

    Graphs that are alive can still run their backward. Host memory goes back to the system as far
    as no graph uses it.

    Args:
        model: changed in place.

    Returns:
        The same model.
    """
    if uninstall(model):
        default_store().trim()
    return model
