"""A trial that leaves nothing behind, and a layer that is refused where it would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offload.errors import TileRefused
from offload.snapshots import BufferSnapshot

_SLOTS = frozenset({"_parameters", "_buffers", "_modules", "training", "_compiled_call_impl"})
"""Attributes that a trial replaces itself, or that torch fills by itself."""
_CONTAINERS = (list, dict, set)


@contextmanager
def without_traces(layer: nn.Module) -> Iterator[None]:
    """Gives a layer copies of its buffers, and refuses it if it writes to them or to itself.

    What is written at every call would be written once a tile, or be of one tile only.

    Args:
        layer: the layer on trial.

    Yields:
        Nothing.

    Raises:
        TileRefused: if the layer wrote to a buffer or an attribute, which are put back.
    """
    attributes = [(name, module, _attributes(module)) for name, module in layer.named_modules()]
    if any(buffer.requires_grad for buffer in layer.buffers()):
        raise TileRefused("it has a buffer that requires gradients")
    with BufferSnapshot(layer, None).replayed():
        buffers = {name: (b, b.detach().clone()) for name, b in layer.named_buffers()}
        try:
            yield
        finally:
            changed = [
                f"{name}.{key}".lstrip(".")
                for name, module, before in attributes
                for key in _put_back(module, before)
            ]
        if changed:
            raise TileRefused(f"it writes to its attribute '{changed[0]}'")
        after = dict(layer.named_buffers())
        for name, (buffer, values) in buffers.items():
            if after.get(name) is not buffer or not _same(buffer, values):
                raise TileRefused(f"it writes to its buffer '{name}'")


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Returns a module's attributes, each with a copy of what is in it if it is a container."""
    return {
        key: (value, value.copy() if type(value) in _CONTAINERS else None)
        for key, value in module.__dict__.items()
        if key not in _SLOTS
    }


def _put_back(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> list[str]:
    """Restores attributes that were set, deleted or filled; returns their names."""
    now = module.__dict__
    changed = [key for key in now if key not in before and key not in _SLOTS]
    for key in changed:
        del now[key]
    for key, (value, content) in before.items():
        if key not in now or now[key] is not value:
            now[key] = value
            changed.append(key)
        if content is not None and not _same_content(value, content):
            changed.append(key)
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
    return changed


def _same_content(value: Any, content: Any) -> bool:
    if len(value) != len(content):
        return False
    if isinstance(value, dict):
        return all(key in content and content[key] is entry for key, entry in value.items())
    return all(one is other for one, other in zip(value, content, strict=True))


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.nan_to_num(), second.nan_to_num())
