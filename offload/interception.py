"""Sends a tile's `F.scaled_dot_product_attention` to the executor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from offload.errors import TileRefused
from offload.ops.attention import attention

_SCALED_DOT_PRODUCT = F.scaled_dot_product_attention
"""torch's own, whatever stands in its place later."""

_PARAMETERS = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in (
            ("query", None),
            ("key", None),
            ("value", None),
            ("attn_mask", None),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("scale", None),
            ("enable_gqa", False),
        )
    ]
)
"""torch's own function is a builtin without a signature."""


class RouteScaledDotProduct(TorchFunctionMode):
    """While it is entered, torch's fused attention is the executor's where it is plainly causal.

    It does not see attention inside `nn.MultiheadAttention`, whose functional form switches such
    modes off; the probe finds that tokens mix there and refuses the layer.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls the function, or the executor's attention in its place."""
        if func is not _SCALED_DOT_PRODUCT:
            return func(*args, **(kwargs or {}))
        return _attention(*args, **(kwargs or {}))


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = _PARAMETERS.bind(*args, **kwargs)
    call.apply_defaults()
    values = call.arguments
    if values["attn_mask"] is not None:
        raise TileRefused("its attention gets a mask, whose meaning for a tile is not known")
    if not values["is_causal"]:
        raise TileRefused("its attention is not causal")
    if values["dropout_p"] > 0:
        raise TileRefused("its attention has dropout")
    return attention(values["query"], values["key"], values["value"], softmax_scale=values["scale"])
