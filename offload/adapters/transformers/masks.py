"""Interval masks from the library's mask functions.

Legend: `B` batch, `S` queries, `N` keys. The library describes a mask by a function of batch, head,
query and key index; windows and packed documents exist only inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from offload.adapters.transformers.caches import is_cache
from offload.adapters.transformers.library import function_of
from offload.errors import TileRefused
from offload.ops.intervals import causal_intervals, with_host_copy

BLOCK_ELEMENTS = 1 << 24
"""Entries of the mask that exist at once while it is read: 16 MiB of bool."""

MaskFunction = Callable[[Any, Any, Any, Any], torch.Tensor]


def is_interval_mask(value: Any) -> bool:
    """Whether a value is a mask that `interval_mask` made, or a slice of one."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.int64
        and value.ndim == 3
        and value.shape[-1] == 2
    )


def with_own_mask(intervals: torch.Tensor, make: Callable[[], torch.Tensor | None]) -> torch.Tensor:
    """Notes on an interval mask how the model's own attention would have its mask."""
    intervals._offload_make_own_mask = make  # type: ignore[attr-defined]
    return intervals


def own_mask(intervals: torch.Tensor) -> torch.Tensor | None:
    """Returns the mask that the model's own attention takes, made once for all layers.

    Args:
        intervals: as `with_own_mask` returned it.

    Returns:
        Usually `[B, 1, S, N]`; None where the model's attention needs none.

    Raises:
        TileRefused: if the tensor was copied on its way, and does not know any more.
    """
    if not hasattr(intervals, "_offload_own_mask"):
        make = getattr(intervals, "_offload_make_own_mask", None)
        if make is None:
            raise TileRefused("its mask was copied on the way from the model to the layer")
        intervals._offload_own_mask = make()  # type: ignore[attr-defined]
    own: torch.Tensor | None = intervals._offload_own_mask  # type: ignore[attr-defined]
    return own


def with_own_masks(values: Any) -> Any:
    """Returns arguments with every interval mask replaced by the model's own.

    Containers are made anew only where there is one, since a layer may write to the caller's.
    """
    leaves, structure = pytree.tree_flatten(values, is_leaf=is_cache)
    if not any(hasattr(leaf, "_offload_make_own_mask") for leaf in leaves):
        return values
    own = [own_mask(leaf) if hasattr(leaf, "_offload_make_own_mask") else leaf for leaf in leaves]
    return pytree.tree_unflatten(own, structure)


def interval_mask(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    cache_position: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> torch.Tensor | None:
    """Turns a mask into the range of keys that each query sees.

    Plain causal masks cost nothing. Others are evaluated in blocks of rows, once for each kind of
    mask and forward: time grows with S x N, memory does not.

    Args:
        batch_size: B.
        kv_length: N.
        mask_function: of batch, head, query and key index; None for causal.
        attention_mask: `[B, N]`, True or 1 for real tokens; None for all.
        q_length: S (transformers 5).
        q_offset: position of the first query (transformers 5).
        kv_offset: position of the first key.
        cache_position: `[S]` positions of the queries (transformers 4, in place of the former).
        device: of the mask.
        **options: others of the library's mask functions.

    Returns:
        `[B or 1, S, 2]` int64, bounds in indices of the keys; None where a row is not one range of
        keys up to itself.
    """
    if cache_position is not None:
        q_length, q_offset = len(cache_position), int(cache_position[0])
        device = cache_position.device
    assert q_length is not None
    offset = int(q_offset) - kv_offset
    causal = function_of("transformers.masking_utils", "causal_mask_function")
    padded = attention_mask is not None and not bool(attention_mask.all())
    window_size = _window_of(mask_function)
    inside = 0 <= offset <= kv_length - q_length
    if not padded and mask_function in (None, causal) and not inside:
        return None
    if not padded and inside and (mask_function in (None, causal) or window_size is not None):
        host = causal_intervals(offset, q_length, window_size=window_size)
        return with_host_copy(host.to(device), host)
    if options.get("use_vmap") or mask_function is None:
        return None  # a user's own function, which may not work on many indices at once
    visible = _and_padding(mask_function, attention_mask if padded else None, kv_offset)
    bounds = _evaluate(visible, batch_size, q_length, kv_length, int(q_offset), kv_offset, device)
    if bounds is None:
        return None
    return with_host_copy(bounds, bounds.cpu())


def _window_of(mask_function: MaskFunction | None) -> int | None:
    """Recognises the library's own causal sliding window, which need not be evaluated.

    Args:
        mask_function: what the library passes.

    Returns:
        How many keys a token sees at most, itself included; None for any other function.
    """
    parts = _captured(mask_function, "and_masks.<locals>.and_mask", "mask_functions")
    causal = function_of("transformers.masking_utils", "causal_mask_function")
    if not isinstance(parts, tuple) or len(parts) != 2 or parts[1] is not causal:
        return None
    window = _captured(parts[0], "sliding_window_overlay.<locals>.inner_mask", "sliding_window")
    return window if isinstance(window, int) and window > 0 else None


def _captured(function: Any, name: str, variable: str) -> Any:
    """Returns a variable that a function of the library's masks holds; None for another one."""
    code = getattr(function, "__code__", None)
    ours = getattr(function, "__module__", "") == "transformers.masking_utils"
    if code is None or not ours or function.__qualname__ != name:
        return None
    if variable not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(variable)].cell_contents


def _and_padding(
    mask_function: MaskFunction, padding: torch.Tensor | None, kv_offset: int
) -> MaskFunction:
    if padding is None:
        return mask_function
    real = padding.bool()

    def visible(batch: Any, head: Any, q: Any, k: Any) -> torch.Tensor:
        return mask_function(batch, head, q, k) & real[batch, k - kv_offset]

    return visible


def _evaluate(
    visible: MaskFunction,
    batch_size: int,
    rows: int,
    keys: int,
    q_offset: int,
    kv_offset: int,
    device: torch.device | str,
) -> torch.Tensor | None:
    """Reads a mask function row block by row block; None where a row is not an interval."""
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    key = torch.arange(keys, device=device)
    step = max(1, BLOCK_ELEMENTS // max(1, keys * batch_size))
    blocks = []
    for begin in range(0, rows, step):
        row = torch.arange(begin, min(begin + step, rows), device=device) + q_offset
        seen = visible(batch, head, row[None, None, :, None], (key + kv_offset)[None, None, None])
        seen = seen[:, 0].expand(batch_size, len(row), keys)
        count = seen.sum(-1)
        first = seen.to(torch.uint8).argmax(-1)
        last = keys - 1 - seen.to(torch.uint8).flip(-1).argmax(-1)
        own = row - kv_offset
        if not bool(((count == 0) | ((last - first + 1 == count) & (last <= own))).all()):
            return None
        blocks.append(torch.stack([first, first + count], dim=-1))
    return torch.cat(blocks, dim=1)
