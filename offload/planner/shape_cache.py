"""Runs operators on meta tensors, each kind of call once; torch computes shapes in Python."""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

_RESIZING = frozenset({"resize_", "resize_as_", "set_", "resize_output_"})


class _Outline(NamedTuple):
    """What a new tensor of an operator looks like."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Kind(enum.Enum):
    """What an operator returns: new tensors, its first argument, or anything else."""

    NEW = enum.auto()
    WRITTEN = enum.auto()
    OTHER = enum.auto()


class ShapeCache:
    """Remembers the shapes, strides and dtypes that operators return for arguments like these.

    A step of tiles calls the same few hundred operators thousands of times, and torch works out
    what most of them return on meta in half a millisecond of Python.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what an operator returns.

        Args:
            func: an overload of `torch.ops`.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            New tensors where it makes new ones.
        """
        kind = _kind_of(func)
        if kind is _Kind.WRITTEN and args[0].is_meta:
            return args[0]  # nothing is there to be written
        if kind is not _Kind.NEW:
            return func(*args, **kwargs)
        try:
            key = (func, *map(_key_of, args), *((name, _key_of(x)) for name, x in kwargs.items()))
            known = self._known.get(key)
        except TypeError:  # a real tensor, whose values may matter, or what has no hash
            return func(*args, **kwargs)
        if known is None:
            out = func(*args, **kwargs)
            known = _outline_of(out)
            if known is not None:
                self._known[key] = known
            return out
        return known.make() if isinstance(known, _Outline) else tuple(x.make() for x in known)


@functools.cache
def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    aliases = [result.alias_info for result in schema.returns]
    if not schema.is_mutable:
        return _Kind.NEW if aliases and not any(aliases) else _Kind.OTHER
    written = len(aliases) == 1 and aliases[0] is not None and aliases[0].is_write
    name = schema.name.rpartition("::")[2]
    first = schema.arguments[0].alias_info if schema.arguments else None
    if written and first is not None and first.is_write and name not in _RESIZING:
        return _Kind.WRITTEN
    return _Kind.OTHER


def _key_of(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key_of, value))
    return type(value), value  # True, 1 and 1.0 are equal


def _outline_of(out: Any) -> Any:
    """Returns the outlines of what was returned; None where it is not only meta tensors."""
    if isinstance(out, torch.Tensor):
        plain = type(out) is torch.Tensor and out.is_meta
        return _Outline(out.shape, out.stride(), out.dtype) if plain else None
    if isinstance(out, tuple):
        outlines = tuple(_outline_of(leaf) for leaf in out)
        return outlines if all(isinstance(leaf, _Outline) for leaf in outlines) else None
    return None
