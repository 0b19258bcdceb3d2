"""The arguments and results of a layer's call, by tile."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from offload.adapters import transformers as hf
from offload.errors import OffloadError, TileRefused
from offload.ops.intervals import host_copy, shift, slice_rows
from offload.store.ticket import version_of

SEQUENCE_DIM = {
    "position_ids": -1,
    "cache_position": 0,
    "position_embeddings": -2,
}
"""Which dimension of an argument is the sequence, by the first part of the argument's name."""


class LayerArguments:
    """The arguments of one call, which hands out those of each tile.

    The hidden states `[B, S, E]` are the first floating tensor of three dimensions; they are taken
    out, so that nothing here keeps them alive. Other tensors are sliced where a rule names their
    sequence dimension, or where exactly one dimension has length S; the rest is passed as it is.

    Args:
        forward: the layer's forward; its signature gives positional arguments their names.
        args: positional arguments, as the layer was called.
        kwargs: keyword arguments.

    Raises:
        TileRefused: if there are no hidden states, or an argument cannot be given to tiles.
    """

    def __init__(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        names = _positional_names(forward, len(args))
        hidden_at = _hidden_position([*args, *kwargs.values()])
        self._hidden: torch.Tensor | None = [*args, *kwargs.values()][hidden_at]
        assert self._hidden is not None
        self.shape = self._hidden.shape
        self._args: list[Any] = list(args)
        self._kwargs = dict(kwargs)
        self._hidden_key: int | str = (
            hidden_at if hidden_at < len(args) else list(kwargs)[hidden_at - len(args)]
        )
        self._container_of_hidden()[self._hidden_key] = None
        named = [*zip(names, self._args, strict=True), *self._kwargs.items()]
        leaves, self._structure = pytree.tree_flatten(
            [value for _, value in named], is_leaf=hf.is_cache
        )
        self._leaves = leaves
        leaf_names = [
            name for name, value in named for _ in pytree.tree_leaves(value, is_leaf=hf.is_cache)
        ]
        self._dims = [
            _sequence_dim(name, leaf, self.tokens)
            for name, leaf in zip(leaf_names, leaves, strict=True)
        ]
        self._versions = [version_of(t) if isinstance(t, torch.Tensor) else None for t in leaves]
        self.structure: Hashable = (
            self._hidden_key,
            self.shape[-1],
            str(self._structure),
            tuple(
                (name, dim, _kind(leaf))
                for name, dim, leaf in zip(leaf_names, self._dims, leaves, strict=True)
            ),
        )

    @property
    def tokens(self) -> int:
        """S, the length of the sequence."""
        return int(self.shape[1])

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden states `[B, S, E]`, until they are taken."""
        assert self._hidden is not None
        return self._hidden

    def take_hidden(self) -> torch.Tensor:
        """Hands out the hidden states and forgets them."""
        hidden, self._hidden = self.hidden, None
        return hidden

    def check_unchanged(self) -> None:
        """Called before the arguments serve a second run.

        Raises:
            OffloadError: if a tensor among them was changed in place since the call.
        """
        for leaf, version in zip(self._leaves, self._versions, strict=True):
            if isinstance(leaf, torch.Tensor) and version_of(leaf) != version:
                raise OffloadError(
                    f"offload: expected a layer's argument of shape {tuple(leaf.shape)} unchanged "
                    "between forward and backward, but it was modified in place. Clone it before "
                    "the in-place operation."
                )

    def first_seeing_token(self) -> int:
        """Returns a token from which on no sequence of the batch is padding; 0 without a mask."""
        for leaf in self._leaves:
            if hf.is_interval_mask(leaf) and leaf.shape[1] == self.tokens:
                lo, hi = host_copy(leaf).unbind(-1)
                seeing = lo < hi
                if bool(seeing.any()):
                    first = torch.where(seeing.any(1), seeing.to(torch.uint8).argmax(1), 0)
                    return int(first.max())
        return 0

    def part(self, begin: int, end: int, dtype: torch.dtype | None = None) -> LayerArguments:
        """Returns the arguments of a call with some tokens only, without hidden states.

        Keys before them are out of sight.

        Args:
            begin: position of the first of the tokens.
            end: position behind the last.
            dtype: to cast floating arguments to; None leaves them.

        Returns:
            New arguments, detached from what made them.
        """
        part = copy.copy(self)
        part._hidden = None
        part.shape = torch.Size((self.shape[0], end - begin, *self.shape[2:]))
        part._leaves = [
            _cast(_usable(leaf if dim is None else _narrow(leaf, dim, begin, end), begin), dtype)
            for leaf, dim in zip(self._leaves, self._dims, strict=True)
        ]
        part._versions = [
            version_of(t) if isinstance(t, torch.Tensor) else None for t in part._leaves
        ]
        return part

    def of_tile(
        self, hidden: torch.Tensor, begin: int, end: int
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments of one tile.

        Args:
            hidden: `[B, T, E]`, the tile's hidden states.
            begin: the tile's first position.
            end: the position behind its last.

        Returns:
            Positional and keyword arguments, containers made anew.
        """
        leaves = [
            leaf if dim is None else _narrow(leaf, dim, begin, end)
            for leaf, dim in zip(self._leaves, self._dims, strict=True)
        ]
        values = pytree.tree_unflatten(leaves, self._structure)
        args = values[: len(self._args)]
        kwargs = dict(zip(self._kwargs, values[len(self._args) :], strict=True))
        container: Any = args if isinstance(self._hidden_key, int) else kwargs
        container[self._hidden_key] = hidden
        return args, kwargs

    def cache(self) -> Any:
        """Returns the key-value cache among the arguments; None where there is none."""
        return next((leaf for leaf in self._leaves if hf.is_cache(leaf)), None)

    def _container_of_hidden(self) -> Any:
        return self._args if isinstance(self._hidden_key, int) else self._kwargs


def _positional_names(forward: Callable[..., Any], count: int) -> list[str]:
    """Names the positional arguments; those that land in `*args` have an empty name."""
    names = [
        parameter.name
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.kind
        in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    return (names + [""] * count)[:count]


def _hidden_position(values: list[Any]) -> int:
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.ndim == 3 and value.is_floating_point():
            return position
    raise TileRefused("it takes no hidden states of shape [batch, tokens, features]")


def _sequence_dim(name: str, leaf: Any, tokens: int) -> int | None:
    """Returns the dimension of an argument to slice; None to pass it whole."""
    if isinstance(leaf, torch.Generator):
        raise TileRefused("it is given a random generator, which tiles would use one by one")
    if not isinstance(leaf, torch.Tensor):
        if name in hf.CAPTURE_SWITCHES and leaf:
            raise TileRefused(f"it is asked for more than hidden states: {name} is on")
        return None
    if leaf.requires_grad:
        raise TileRefused(f"its argument '{name}' requires gradients as well")
    if hf.is_interval_mask(leaf) and leaf.shape[1] == tokens:
        return 1
    rule = next((dim for prefix, dim in SEQUENCE_DIM.items() if name.startswith(prefix)), None)
    if rule is not None and -leaf.ndim <= rule < leaf.ndim and leaf.shape[rule] == tokens:
        return rule % leaf.ndim
    candidates = [dim for dim, size in enumerate(leaf.shape) if size == tokens]
    if len(candidates) > 1:
        raise TileRefused(
            f"its argument '{name}' has {len(candidates)} dimensions as long as the sequence"
        )
    return candidates[0] if candidates else None


def _narrow(leaf: torch.Tensor, dim: int, begin: int, end: int) -> torch.Tensor:
    if hf.is_interval_mask(leaf):
        return slice_rows(leaf, begin, end)
    return leaf.narrow(dim, begin, end - begin)


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.to(dtype)


def _usable(leaf: Any, begin: int) -> Any:
    """Makes an argument of some tokens one of a call of its own, which autograd takes."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if hf.is_interval_mask(leaf):
        return shift(leaf, begin)
    return leaf.clone() if leaf.is_inference() else leaf


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.ndim
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__


class LayerResult:
    """How a layer returns its hidden states: alone, or first in a tuple beside empty places.

    Args:
        output: what the layer returned for some tile.

    Raises:
        TileRefused: if it returned anything else.
    """

    def __init__(self, output: Any) -> None:
        self._tuple: type[Any] | None = None
        if isinstance(output, torch.Tensor):
            self._rest: tuple[Any, ...] = ()
            return
        if not isinstance(output, (tuple, list)) or not output:
            raise TileRefused(f"it returns a {type(output).__name__}, not hidden states")
        if any(leaf is not None for leaf in pytree.tree_leaves(list(output[1:]))):
            raise TileRefused("it returns something else besides the hidden states")
        if not isinstance(output[0], torch.Tensor):
            raise TileRefused("what it returns does not begin with hidden states")
        self._tuple = type(output)
        self._rest = tuple(output[1:])

    def hidden_of(self, output: Any) -> torch.Tensor:
        """Picks the hidden states out of what the layer returned for a tile."""
        hidden: torch.Tensor = output if self._tuple is None else output[0]
        return hidden

    def wrap(self, hidden: torch.Tensor) -> Any:
        """Returns the hidden states of the whole sequence as the layer would have."""
        if self._tuple is None:
            return hidden
        values = (hidden, *self._rest)
        return self._tuple(*values) if hasattr(self._tuple, "_fields") else self._tuple(values)
