"""Saved-tensor hooks that hand what autograd saves to the store."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.store.identity import is_plain
from offload.store.statistics import Record
from offload.store.store import Store
from offload.store.ticket import Ticket


class OffloadHooks(torch.autograd.graph.saved_tensors_hooks):
    """Within this context, tensors saved for backward become tickets of a store.

    The tickets live in the autograd graph: backward may run outside the context, later, twice
    (`retain_graph=True`) or never.

    Args:
        store: where the tensors go.
        tier_of: says for a saved tensor `"host"` (copy it), `"disk"` (copy it and let it leave the
            host at once), `"ordered"` (keep it by reference, but let its reload start those of the
            tensors stored before it) or `"device"` (keep it).
            Hooks get a detached alias of the tensor; recognise it by its `tensor_key`. Tensors that
            are not plain are kept whatever it says.
        record: where to count.
        codec_of: names the codec of a tensor that is copied, as `tier_of` does its place.
    """

    def __init__(
        self,
        store: Store,
        tier_of: Callable[[torch.Tensor], str],
        record: Record | None = None,
        codec_of: Callable[[torch.Tensor], str | None] = lambda tensor: None,
    ) -> None:
        def pack(tensor: torch.Tensor) -> Ticket:
            tier = tier_of(tensor) if is_plain(tensor) else "device"
            if tier in ("host", "disk"):
                leaves = tier == "disk"
                return store.offload(
                    tensor, record, leaves=leaves, codec=codec_of(tensor), role="input"
                )
            is_input = tier == "ordered"
            return store.keep(tensor, record, in_order=is_input, role="input" if is_input else "")

        super().__init__(pack, Ticket.reload)
