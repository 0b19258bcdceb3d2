"""How much work a call of attention is, from the shapes of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from offload.ops.flops import product_flops


class AttentionOperator(NamedTuple):
    """An operator of attention.

    Attributes:
        query_at: position of q among its arguments; k and v follow.
        heads_first: whether they are `[B, H, S, D]`, else `[B, S, H, D]`.
        of_keys: matrix products along the head dim.
        of_values: matrix products along the values' head dim.
        is_square_causal: whether a call, by its arguments, spares half of the products.
    """

    query_at: int
    heads_first: bool
    of_keys: int
    of_values: int
    is_square_causal: Callable[[tuple[Any, ...]], bool]

    @property
    def is_backward(self) -> bool:
        """Whether it computes gradients."""
        return self.of_keys > 1

    def flops(self, args: tuple[Any, ...]) -> int:
        """Returns the FLOPs of a call.

        Args:
            args: its positional arguments.

        Returns:
            FLOPs, two for each multiplication and addition.
        """
        q, k, v = (self._shape_of(x) for x in args[self.query_at : self.query_at + 3])
        flops = product_flops(q, k, v, of_keys=self.of_keys, of_values=self.of_values)
        return flops // 2 if self.is_square_causal(args) else flops

    def _shape_of(self, x: torch.Tensor) -> tuple[int, ...]:
        batch, second, third, head_dim = x.shape
        heads, rows = (second, third) if self.heads_first else (third, second)
        return batch, heads, rows, head_dim


def _flag(position: int) -> Callable[[tuple[Any, ...]], bool]:
    return lambda args: len(args) > position and bool(args[position])  # left out where False


def _starts_at(block_at: int) -> Callable[[tuple[Any, ...]], bool]:
    """Whether a causal tile begins where the key block does."""
    return lambda args: args[block_at - 1] is None and args[block_at] == args[block_at + 1]


_FORWARD, _BACKWARD = (1, 1), (3, 2)

OPERATORS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": AttentionOperator(
        0, True, *_FORWARD, _flag(4)
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": AttentionOperator(
        1, True, *_BACKWARD, _flag(7)
    ),
    "aten::_scaled_dot_product_flash_attention": AttentionOperator(0, True, *_FORWARD, _flag(4)),
    "aten::_scaled_dot_product_flash_attention_backward": AttentionOperator(
        1, True, *_BACKWARD, _flag(11)
    ),
    "aten::_flash_attention_forward": AttentionOperator(0, False, *_FORWARD, _flag(8)),
    "aten::_flash_attention_backward": AttentionOperator(1, False, *_BACKWARD, _flag(11)),
    "aten::_efficient_attention_forward": AttentionOperator(0, False, *_FORWARD, _flag(9)),
    "offload::attention": AttentionOperator(0, True, *_FORWARD, _flag(4)),
    "offload::attention_backward": AttentionOperator(1, True, *_BACKWARD, _flag(7)),
    "offload::fused_forward": AttentionOperator(0, True, *_FORWARD, _starts_at(4)),
    "offload::fused_backward_queries": AttentionOperator(1, True, 2, 1, _starts_at(7)),
    "offload::fused_backward_keys": AttentionOperator(1, True, 2, 2, _starts_at(7)),
}
"""By name. torch's own formulas take `[B, S, H, D]` for `[B, H, S, D]`, and count what a causal
mask spares."""
