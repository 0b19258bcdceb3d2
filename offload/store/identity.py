"""Which saved tensor is which, and which ones are left alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.devices import type_of


class TensorKey(NamedTuple):
    """The identity of a saved tensor: two tensors with equal keys hold the same values.

    `storage` is the address of a storage's bookkeeping, not of its data. It names one storage for
    as long as somebody holds a `StorageWeakRef` on it, also after the data was freed.
    """

    device: torch.device
    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int


def tensor_key(tensor: torch.Tensor) -> TensorKey:
    """Returns the identity of a strided tensor; cheap, reads no data."""
    return TensorKey(
        tensor.device,
        tensor.untyped_storage()._cdata,
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        0 if tensor.is_inference() else tensor._version,
    )


def storage_reference(tensor: torch.Tensor) -> StorageWeakRef:
    """Reserves the address in the tensor's `TensorKey` without keeping its data."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_held_by_its_owner(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a leaf that requires gradients (a parameter, say) or a view of one.

    Somebody keeps those to read their gradients, so moving them away would free nothing. A view
    such as `weight.t()` is recognised by its base, not by its type.
    """
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad


def nbytes_of(tensor: torch.Tensor) -> int:
    """Returns a tensor's bytes; 0 where torch defines none (sparse layouts)."""
    return tensor.nbytes if tensor.layout == torch.strided else 0


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fully described by its bytes, shape and strides.

    Subclasses (quantised weights, DTensor, fake tensors), sparse and nested layouts, tensors that
    have no data and lazy conjugates are not: they are kept by reference.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and type_of(tensor.device) in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
