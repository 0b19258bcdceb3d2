"""Encodes tensors into fewer bytes and back, on the tensor's own device.

| codec | takes | bytes a value | error |
|---|---|---|---|
| `fp8` | float32, float16, bfloat16 | 1 + 1/32 | up to 1/16 of a value, if not tiny |
| `int8` | the same | 1 + 1/32 | up to 1/254 of the largest of 128 values |
| `bits` | bool | 1/8 | none |

The format, and what becomes of Inf, NaN and tiny values, is in `csrc/codec.h`;
`offload.store.reference_codec` is the same in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload import _native
from offload.store.engine import compute_stream, native_errors

MAX_DIMS = 8
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_DTYPES = {"fp8": _FLOATS, "int8": _FLOATS, "bits": (torch.bool,)}


def takes(codec: str, dtype: torch.dtype) -> bool:
    """Whether a codec takes tensors of a dtype."""
    return dtype in _DTYPES[codec]


def encoded_bytes(codec: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Returns how many bytes a tensor of this dtype and shape is encoded into.

    Args:
        codec: `"fp8"`, `"int8"` or `"bits"`.
        dtype: the tensor's dtype, one that the codec takes.
        shape: the tensor's shape, at most 8 dimensions.

    Returns:
        The number of bytes; 0 for a tensor without elements.

    Raises:
        ValueError: the codec does not exist.
        TypeError: the codec does not take the dtype.
        OffloadError: there are more than 8 dimensions.
    """
    _check("encoded_bytes", codec, dtype)
    with native_errors():
        return _native.encoded_bytes(codec, _name_of(dtype), tuple(shape))


def encode(tensor: torch.Tensor, codec: str, seed: int | None = None) -> torch.Tensor:
    """Encodes a tensor into a new buffer on its device.

    On a card this is one kernel on the current stream; on meta nothing is computed. On the CPU it
    runs on the calling thread, for large tensors on up to `torch.get_num_threads()`, and returns
    when it is done. An expanded dimension is written out: encode what lies below it instead.

    Args:
        tensor: `[..., L]`, any strides, at most 8 dimensions. Every 128 values along `L` share a
            scale; a 0-dim tensor is one value.
        codec: `"fp8"`, `"int8"` or `"bits"`.
        seed: rounds stochastically, reproducibly for a seed; None rounds to nearest.

    Returns:
        `[encoded_bytes(...)]` uint8.

    Raises:
        ValueError: the codec does not exist, or a seed was given to `bits`.
        TypeError: the codec does not take the tensor's dtype.
        OffloadError: there are more than 8 dimensions, or the build has no CUDA.
    """
    _check("encode", codec, tensor.dtype)
    if seed is not None and codec == "bits":
        raise ValueError("encode: expected no seed for codec bits, got one. It is lossless.")
    nbytes = encoded_bytes(codec, tensor.dtype, tensor.shape)
    encoded = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
    if encoded.is_meta:
        return encoded
    with native_errors():
        _native.encode(
            _index_of(tensor.device),
            codec,
            _name_of(tensor.dtype),
            tensor.data_ptr(),
            tuple(tensor.shape),
            tensor.stride(),
            encoded.data_ptr(),
            compute_stream(tensor.device),
            None if seed is None else seed & (1 << 64) - 1,
            torch.get_num_threads(),
        )
    return encoded


def decode(
    encoded: torch.Tensor,
    codec: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> torch.Tensor:
    """Decodes what `encode` made into a new tensor on the buffer's device.

    Args:
        encoded: `[encoded_bytes(...)]` uint8, contiguous, aligned to 16 bytes.
        codec: the codec that it was encoded with.
        dtype: dtype of the result; it may differ from that of the encoded tensor.
        shape: shape of the encoded tensor.
        stride: strides of the result, without overlap; None is contiguous.

    Returns:
        A tensor of that dtype, shape and stride.

    Raises:
        ValueError: the codec does not exist, or the buffer is not one of that many bytes.
        TypeError: the codec does not give that dtype.
        OffloadError: the strides overlap, or the build has no CUDA.
    """
    nbytes = encoded_bytes(codec, dtype, shape)
    if encoded.dtype != torch.uint8 or encoded.numel() != nbytes or not encoded.is_contiguous():
        raise ValueError(
            f"decode: expected {nbytes} contiguous uint8 for shape {tuple(shape)}, got "
            f"{encoded.numel()} {encoded.dtype}. Pass what encode returned, and its shape."
        )
    if stride is None:
        result = torch.empty(tuple(shape), dtype=dtype, device=encoded.device)
    else:
        result = torch.empty_strided(
            tuple(shape), tuple(stride), dtype=dtype, device=encoded.device
        )
    if result.is_meta:
        return result
    with native_errors():
        _native.decode(
            _index_of(encoded.device),
            codec,
            _name_of(dtype),
            encoded.data_ptr(),
            result.data_ptr(),
            tuple(result.shape),
            result.stride(),
            compute_stream(encoded.device),
            torch.get_num_threads(),
        )
    return result


def relative_error(tensor: torch.Tensor, codec: str, seed: int | None = None) -> float:
    """Measures what a codec loses of a tensor.

    Reads the tensor several times and synchronizes with a card: for tests and reports.

    Args:
        tensor: what `encode` takes, float.
        codec: a codec for floats.
        seed: as for `encode`.

    Returns:
        `||x - decode(encode(x))|| / ||x||`, computed in float64; 0 for a tensor of zeros.
    """
    back = decode(encode(tensor, codec, seed), codec, tensor.dtype, tensor.shape)
    exact = tensor.double()
    norm = exact.norm().item()
    return (exact - back.double()).norm().item() / norm if norm else 0.0


def _check(function: str, codec: str, dtype: torch.dtype) -> None:
    if codec not in _DTYPES:
        raise ValueError(
            f"{function}: expected codec {', '.join(_DTYPES)}, got {codec!r}. Choose one of these."
        )
    if dtype not in _DTYPES[codec]:
        names = ", ".join(map(_name_of, _DTYPES[codec]))
        raise TypeError(
            f"{function}: expected {names} for codec {codec}, got {_name_of(dtype)}. "
            "Choose another codec, or none."
        )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _index_of(device: torch.device) -> int:
    return device.index if device.type == "cuda" else -1
