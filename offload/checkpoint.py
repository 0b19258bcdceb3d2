"""Checkpoint mode: run any layer once in forward, once more in backward, from offloaded inputs."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from offload.adapters import transformers as hf
from offload.buffers import BufferSnapshot
from offload.store import OffloadHooks, default_store
from offload.store.identity import TensorKey, is_held_by_its_owner, is_plain, tensor_key
from offload.store.statistics import Record


class CheckpointRegion:
    """One call of a layer, replayed in backward as it ran in forward.

    The replay sees what the forward saw: the arguments' structure (containers that the layer
        changed
    are rebuilt), the caller's context variables, a key-value cache in its state before the call,
    and the buffers before the call; buffers and cache that the model uses are not touched again.
    Random state and autocast are `torch.utils.checkpoint`'s.
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
        self.buffers: BufferSnapshot | None = None  # set by whoever runs the region
        self.on_replay = on_replay
        leaves, self.structure = pytree.tree_flatten((args, kwargs), is_leaf=hf.is_cache)
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.tensor_positions = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
        ]
        self.others = hf.snapshot_caches(
            [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        )
        self.context = contextvars.copy_context()

    @property
    def cannot_replay(self) -> str:
        """Why a second run would not repeat the first; empty where it does."""
        return hf.cannot_replay(self.others)

    def take_tensors(self) -> list[torch.Tensor]:
        """Hands out the call's tensors and forgets them: only the checkpoint's hooks keep them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Runs the layer as called the first time, replays it from `tensors` after that."""
        if self.first_call is not None:
            (args, kwargs), self.first_call = self.first_call, None
            return self.forward(*args, **kwargs)
        leaves = hf.snapshot_caches(self.others)
        for position, tensor in zip(self.tensor_positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        self.on_replay()
        # A context can be entered once at a time, and layers of one call share theirs: copies are
        # free.
        return self.context.copy().run(self._replay, args, kwargs)

    def _replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hf.stop_collecting_outputs()  # in this copy of the context alone
        with self.buffers.replayed() if self.buffers is not None else nullcontext():
            return self.forward(*args, **kwargs)


def run_checkpointed(
    region: CheckpointRegion, tier_of: Callable[[torch.Tensor], str], record: Record
) -> Any:
    """Runs a region now and lets autograd replay it in backward.

    Our hooks stand outside `torch.utils.checkpoint`, whose own stand inside: so ours see the
    region's inputs and nothing else. All tensors go in as positional arguments, since the
    checkpoint keeps what it gets by keyword in a closure that no hook sees.

    Args:
        region: the call; its tensors are taken out of it.
        tier_of: where each input goes, see `OffloadHooks`.
        record: where to count.

    Returns:
        Whatever the layer returns.
    """
    with OffloadHooks(default_store(), tier_of, record):
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
