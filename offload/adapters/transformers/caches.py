"""Key-value caches: recognised, and copied for a replay."""

from __future__ import annotations

import copy
from typing import Any

from offload.adapters.transformers.library import class_of

_REPLAYABLE_CACHE_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})
"""Cache layers whose `update` makes new tensors, so that a shallow copy keeps the earlier state."""


def is_cache(value: Any) -> bool:
    """Whether a value is a transformers cache, which a layer updates in place."""
    return isinstance(value, class_of("transformers.cache_utils", "Cache"))


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
