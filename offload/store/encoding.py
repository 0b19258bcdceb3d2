"""Which tensors are stored encoded, and how they are made again."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from offload.store.codec import MAX_DIMS, decode, encode, takes

PACKED_BOOL_BYTES = 1 << 16
"""Tensors of bool from this size on are packed, eight values a byte: masks of S x S, mainly."""


class Encoding(NamedTuple):
    """How an encoded tensor is made again.

    Attributes:
        codec: as `codec.encode` takes it.
        dtype, shape, stride: of the tensor.
        dense: whether it fills its memory. It is then encoded in the order in which it lies there,
            which is fastest, and whole blocks share a scale also where its last dimension is short.
    """

    codec: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dense: bool

    @property
    def loses(self) -> bool:
        """Whether values change on the way."""
        return self.codec != "bits"

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the bytes of the tensor that this was made for, uint8 on its device."""
        flat = tensor.as_strided((tensor.numel(),), (1,)) if self.dense else tensor
        return encode(flat, self.codec)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Makes a new tensor of that dtype, shape and stride from `encode`'s bytes."""
        if self.dense:
            flat = decode(stored, self.codec, self.dtype, (math.prod(self.shape),))
            return flat.as_strided(self.shape, self.stride)
        return decode(stored, self.codec, self.dtype, self.shape, self.stride)


def encoding_of(tensor: torch.Tensor, codec: str | None) -> Encoding | None:
    """Decides how a tensor is stored.

    Args:
        tensor: a plain strided tensor with at least one element.
        codec: what the policy says of it.

    Returns:
        The encoding; None where the bytes are copied as they are: without a codec (bool excepted,
        whose packing loses nothing), for dtypes that the codec does not take, and for tensors whose
        elements overlap, which cost less as they lie.
    """
    if tensor.dtype == torch.bool:
        codec = "bits" if tensor.nbytes >= PACKED_BOOL_BYTES else None
    overlaps = any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if codec is None or overlaps or tensor.dim() > MAX_DIMS or not takes(codec, tensor.dtype):
        return None
    return Encoding(codec, tensor.dtype, tuple(tensor.shape), tensor.stride(), _is_dense(tensor))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are all of the memory that it spans, in any order."""
    steps = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    expected = 1
    for step, size in steps:
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True
