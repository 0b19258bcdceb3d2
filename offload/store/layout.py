"""Which bytes of a tensor are copied, and how an equal tensor is made of them again."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """How a tensor lies over a compact buffer of `elements` values."""

    elements: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the compact buffer."""
        return self.elements * self.dtype.itemsize

    def new_buffer(self, device: torch.device) -> torch.Tensor:
        """Allocates the compact buffer on the current stream of `device`."""
        return torch.empty(self.elements, dtype=self.dtype, device=device)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the tensor of this layout over a filled buffer, without a copy."""
        return buffer.as_strided(self.shape, self.stride, 0)


def compact(tensor: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """Finds or makes the fewest bytes that hold a tensor's values.

    Dense tensors (also transposed ones) and overlapping ones (an expanded tensor, a sliding window)
    are read where they lie, since the memory they span is no larger than they are; so an expanded
    tensor costs its base. A view with holes (`x[:, ::2]`) is gathered into a new tensor on the
    current stream, so that its base can go free.

    Args:
        tensor: any strided tensor with at least one element.

    Returns:
        A tensor whose memory starts at `data_ptr()` and spans `layout.nbytes`, and the layout. The
        first is `tensor` itself unless it had to be gathered.
    """
    base = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            base = base.narrow(dim, 0, 1)
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(base.shape, base.stride(), strict=True)
    )
    shape = tuple(tensor.shape)
    if span <= base.numel():
        return tensor, Layout(span, shape, tensor.stride(), tensor.dtype)
    gathered = base.contiguous()
    stride_of_base = gathered.expand(shape).stride()
    return gathered, Layout(gathered.numel(), shape, stride_of_base, tensor.dtype)
