"""Checkpoint mode: run any layer once in forward, once more in backward, from offloaded inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from offload.adapters import transformers as hf
from offload.ambient import Ambient
from offload.snapshots import LayerSnapshot
from offload.store import OffloadHooks, Store
from offload.store.identity import TensorKey, is_held_by_its_owner, is_plain, tensor_key
from offload.store.statistics import Record


class CheckpointRegion:
    """One call of a layer, replayed in backward as it ran in forward.

    The replay sees what the forward saw: the arguments' structure (containers that the layer
    changed are rebuilt, a tensor passed twice is one tensor), the caller's context variables,
    random generators and attention backends, and a key-value cache in its state before the
    call. torch's random state and autocast are `torch.utils.checkpoint`'s.

    Not seen as it was: other Python objects that the layer or its caller changes in between.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_replay: Callable[[], None],
    ) -> None:
        self.forward = forward
        self.first_call: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.snapshot: LayerSnapshot | None = None  # set by whoever runs it
        self.on_replay = on_replay
        leaves, self.structure = pytree.tree_flatten((args, kwargs), is_leaf=hf.is_cache)
        unique = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        index_of = {key: index for index, key in enumerate(unique)}
        self.tensors = list(unique.values())
        self.tensor_index = {
            position: index_of[id(leaf)]
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }
        self.others = _snapshot(
            [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        )
        self.python_random = random.getstate()
        device_type = self.tensors[0].device.type if self.tensors else "cpu"
        self.ambient = Ambient(device_type)

    @property
    def cannot_replay(self) -> str:
        """Why a second run would not repeat the first; empty where it does."""
        for leaf in self.others:
            if isinstance(leaf, Iterator):
                return f"it takes a {type(leaf).__name__}, which can be walked once"
        return hf.cannot_replay(self.others)

    def take_tensors(self) -> list[torch.Tensor]:
        """Hands out the call's tensors and forgets them: only the checkpoint's hooks keep them."""
        tensors, self.tensors = self.tensors, []
        return [tensor.clone() if tensor.is_inference() else tensor for tensor in tensors]

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Runs the layer as called the first time, replays it from `tensors` after that."""
        if self.first_call is not None:
            (args, kwargs), self.first_call = self.first_call, None
            return self.forward(*args, **kwargs)
        leaves = _snapshot(self.others)
        for position, index in self.tensor_index.items():
            leaves[position] = tensors[index]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        self.on_replay()
        return self.ambient.run(self._replay, args, kwargs)

    def _replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ExitStack() as stack:
            if self.snapshot is not None:
                stack.enter_context(self.snapshot.replayed())
            stack.callback(random.setstate, random.getstate())
            random.setstate(self.python_random)
            return self.forward(*args, **kwargs)


def _snapshot(leaves: list[Any]) -> list[Any]:
    """Copies the leaves that a call changes: caches and random generators."""
    return [
        leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf
        for leaf in hf.snapshot_caches(leaves)
    ]


def run_checkpointed(
    region: CheckpointRegion,
    store: Store,
    tier_of: Callable[[torch.Tensor], str],
    record: Record,
    codec_of: Callable[[torch.Tensor], str | None],
) -> Any:
    """Runs a region now and lets autograd replay it in backward.

    Our hooks stand outside `torch.utils.checkpoint`, whose own stand inside: so ours see the
    region's inputs and nothing else. All tensors go in as positional arguments, since the
    checkpoint keeps what it gets by keyword in a closure that no hook sees.

    Args:
        region: the call; its tensors are taken out of it.
        store: where its inputs go.
        tier_of: where each input goes, see `OffloadHooks`.
        record: where to count.
        codec_of: their codecs, likewise.

    Returns:
        Whatever the layer returns.
    """
    with OffloadHooks(store, tier_of, record, codec_of):
        return checkpoint(region, *region.take_tensors(), use_reentrant=False)


def activations_among(tensors: list[torch.Tensor]) -> set[TensorKey]:
    """Picks the layer inputs that are worth offloading: those that die with the call.

    Leaves that require gradients (parameters, a caller's own input) and views of them never die.
    Tensors without gradient that are not the layer's largest input (masks, rotary tables, position
    ids) are held by the caller for all layers. A copy of either would free nothing.
    """
    floating = [t for t in tensors if is_plain(t) and t.is_floating_point()]
    largest = max((t.numel() for t in floating), default=0)
    return {
        tensor_key(t)
        for t in floating
        if (t.requires_grad or t.numel() == largest) and not is_held_by_its_owner(t)
    }
