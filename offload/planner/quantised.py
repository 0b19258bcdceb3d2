"""Linear layers with quantised weights, as far as memory and work are concerned.

What bitsandbytes and torchao compute is not needed for a plan, and does not run on meta: their
layers are replaced by one that holds as many bytes and makes the same temporary, the weight in the
dtype of the products, once in forward and once in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BLOCK, SUPER_BLOCK = 64, 256
"""Values that share a scale in NF4, and scales that share a scale in turn."""


def nf4_bytes(elements: int) -> int:
    """Returns the bytes of a weight in bitsandbytes' NF4 with double quantisation."""
    scales = -(-elements // BLOCK)
    return -(-elements // 2) + scales + 4 * -(-scales // SUPER_BLOCK)


class QuantisedLinear(nn.Linear):
    """A frozen linear layer that holds its weight in other bytes than it multiplies with.

    Args:
        in_features: of the layer.
        out_features: of the layer.
        stored_bytes: of the weight with its scales.
        dtype: of the products.
        bias: the layer's, or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        stored_bytes: int,
        dtype: torch.dtype,
        bias: nn.Parameter | None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype
        stored = torch.empty(stored_bytes, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.register_parameter("bias", bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the product with the weight in `dtype`, `[..., out_features]`."""
        shape = (self.out_features, self.in_features)
        output: torch.Tensor = _Product.apply(input, self.weight, self.bias, shape, self.dtype)  # type: ignore[no-untyped-call]
        return output


class _Product(torch.autograd.Function):
    """A product that makes the weight anew whenever it needs it."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        stored: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.stored, ctx.shape, ctx.dtype = stored, shape, dtype
        weight = torch.empty(shape, dtype=dtype, device=stored.device)
        return F.linear(input, weight.to(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, d_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.stored.device)
        return d_output @ weight.to(d_output.dtype), None, None, None, None


def is_quantised(module: nn.Module) -> bool:
    """Whether a linear layer's weight is not a plain floating-point tensor."""
    weight = module._parameters.get("weight")  # not one that is computed from others
    if not isinstance(module, nn.Linear) or weight is None:
        return False
    plain = type(weight) is nn.Parameter and type(weight.data) is torch.Tensor
    return not (plain and weight.is_floating_point())


def quantise(within: list[nn.Module]) -> None:
    """Makes frozen linear layers on meta as if loaded in 4 bits.

    Args:
        within: modules whose linear layers are replaced, such as the layers.
    """
    for part in within:
        for parent in list(part.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and not child.weight.requires_grad:
                    stored = nf4_bytes(child.weight.numel())
                    setattr(parent, name, _replacement(child, stored, child.weight.dtype))


def replace_quantised(model: nn.Module, stored_bytes: dict[str, int]) -> None:
    """Replaces the quantised linear layers of a copied model by such that run on meta.

    Args:
        model: on meta; changed in place.
        stored_bytes: of the weights of its quantised layers, by the layer's name.
    """
    for name, stored in stored_bytes.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        child: Any = model.get_submodule(name)
        dtype = getattr(child, "compute_dtype", None) or torch.bfloat16
        setattr(parent, name.rpartition(".")[2], _replacement(child, stored, dtype))


def _replacement(child: nn.Linear, stored: int, dtype: torch.dtype) -> QuantisedLinear:
    return QuantisedLinear(child.in_features, child.out_features, stored, dtype, child.bias)
