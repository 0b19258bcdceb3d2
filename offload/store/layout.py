"""Which bytes of a tensor are copied, and how an equal tensor is made of them again."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """How a tensor lies over a compact buffer of `elements` values.

    `gathered` is the shape in which a view with holes was gathered, without its expanded
    dimensions; None where the buffer is the memory that the tensor spans.
    """

    elements: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    gathered: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the compact buffer."""
        return self.elements * self.dtype.itemsize

    def new_buffer(self, device: torch.device) -> torch.Tensor:
        """Allocates the compact buffer on the current stream of `device`."""
        return torch.empty(self.elements, dtype=self.dtype, device=device)

    def restore(self, buffer: torch.Tensor) -> torch.Tensor:
        """Makes the tensor of a filled buffer: over it, or for a view with holes beside it.

        Strides are those of the saved tensor in both cases, since kernels choose their way by them.
        """
        if self.gathered is None:
            return buffer.as_strided(self.shape, self.stride, 0)
        base = torch.empty_strided(
            self.gathered, self.stride, dtype=self.dtype, device=buffer.device
        )
        return base.copy_(buffer.view(self.gathered)).as_strided(self.shape, self.stride, 0)


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
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            base = base.narrow(dim, 0, 1)
    extents = zip(base.shape, base.stride(), strict=True)
    span = 1 + sum((size - 1) * step for size, step in extents)
    shape, stride = tuple(tensor.shape), tensor.stride()
    if span <= base.numel():
        return tensor, Layout(span, shape, stride, tensor.dtype)
    layout = Layout(base.numel(), shape, stride, tensor.dtype, gathered=tuple(base.shape))
    return base.contiguous(), layout
