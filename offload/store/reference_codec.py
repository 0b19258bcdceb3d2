"""The codecs of `offload.store.codec` in plain torch: slow, short, equal to them bit for bit.

Rounding is to nearest only. The format is described in `csrc/codec.h`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 128
LIMITS = {"fp8": 448.0, "int8": 127.0}
_SMALLEST_AMAX = 2.0**-100
_LARGEST_AMAX = float.fromhex("0x1.fffffcp127")
_NAN_CODE = -128  # of int8


def encode(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    """Encodes like `offload.store.codec.encode` without a seed.

    Args:
        tensor: `[..., L]` of a dtype that the codec takes.
        codec: `"fp8"`, `"int8"` or `"bits"`.

    Returns:
        The encoded bytes, uint8, on the tensor's device.
    """
    if codec == "bits":
        return _pack(tensor.reshape(-1))
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    length = tensor.shape[-1] if tensor.dim() else 1
    rows = tensor.numel() // length
    values = tensor.reshape(rows, length).float()
    blocks = -(-length // BLOCK)
    padded = torch.nn.functional.pad(values, (0, blocks * BLOCK - length))
    padded = padded.reshape(rows, blocks, BLOCK)
    finite = torch.where(padded.isfinite(), padded.abs(), 0.0)
    amax = finite.amax(-1, keepdim=True).clamp(_SMALLEST_AMAX, _LARGEST_AMAX)
    limit = torch.full_like(amax, LIMITS[codec])
    codes = _round(padded * (limit / amax), codec).reshape(rows, blocks * BLOCK)[:, :length]
    payload = codes.contiguous().view(torch.uint8).reshape(-1)
    gap = payload.new_zeros(-payload.numel() % 16)
    scales = (amax / limit).reshape(-1)
    return torch.cat([payload, gap, scales.view(torch.uint8)])


def decode(
    encoded: torch.Tensor, codec: str, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Decodes into a contiguous tensor of any float dtype, or bool for `"bits"`.

    Args:
        encoded: what `encode` returned.
        codec: the codec that it was encoded with.
        dtype: dtype of the result.
        shape: shape of the encoded tensor.

    Returns:
        A contiguous tensor.
    """
    elements = torch.Size(shape).numel()
    if codec == "bits":
        bits = encoded[:, None] >> torch.arange(8, dtype=torch.uint8, device=encoded.device)
        return (bits & 1).bool().reshape(-1)[:elements].reshape(tuple(shape))
    if elements == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=encoded.device)
    length = shape[-1] if shape else 1
    rows = elements // length
    blocks = -(-length // BLOCK)
    start = elements + -elements % 16
    codes, scales = encoded[:elements], encoded[start:].view(torch.float32).reshape(rows, blocks)
    if codec == "int8":
        signed = codes.view(torch.int8)
        values = torch.where(signed == _NAN_CODE, torch.nan, signed.float())
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    scale = scales.repeat_interleave(BLOCK, dim=1)[:, :length]
    return (values.reshape(rows, length) * scale).to(dtype).reshape(tuple(shape))


def _round(scaled: torch.Tensor, codec: str) -> torch.Tensor:
    if codec == "fp8":
        return scaled.to(torch.float8_e4m3fn)
    codes = scaled.clamp(-LIMITS[codec], LIMITS[codec]).round()
    return torch.where(scaled.isnan(), float(_NAN_CODE), codes).to(torch.int8)


def _pack(bools: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(bools.to(torch.uint8), (0, -bools.numel() % 8)).reshape(-1, 8)
    weights = 1 << torch.arange(8, device=bools.device)
    return (padded * weights).sum(-1).to(torch.uint8)
