"""Tensors, masks and the plain formula that the tests of attention compare with.

Legend of `offload.ops.tile_attention`: `B` batch, `H` heads, `T` queries, `N` keys, `D` head dim.
"""

import itertools
import math

import torch
import torch.nn.functional as F

from offload.ops.intervals import causal_intervals, full_intervals
from offload.ops.key_blocks import KeyBlock
from offload.ops.tile_attention import attend, attend_backward

F64 = torch.float64
BACKENDS = ["torch", "reference"]


def tensors(
    *, batch=2, heads=4, kv_heads=2, rows=63, keys=100, head_dim=16, dtype=F64, value_dim=None
):
    """q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(heads * 1000 + rows + keys + head_dim)
    value_dim = head_dim if value_dim is None else value_dim
    shapes = [
        (batch, heads, rows, head_dim),
        (batch, kv_heads, keys, head_dim),
        (batch, kv_heads, keys, value_dim),
        (batch, heads, rows, value_dim),
    ]
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in shapes]


def cut(k, v, *sizes):
    """Key blocks of the given sizes; the last takes the rest."""
    ends = [*itertools.accumulate(sizes), k.shape[2]]
    return [
        KeyBlock(k[:, :, a:b], v[:, :, a:b], a) for a, b in zip([0, *ends[:-1]], ends, strict=True)
    ]


def packed(rows, *lengths):
    """Causal attention inside documents that lie one after another."""
    lo = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])[:rows]
    return torch.stack((lo, torch.arange(1, rows + 1)), -1).unsqueeze(0)


def masks(rows, keys):
    """Masks of every kind for `rows` queries at the end of `keys` keys, a batch of 2."""
    start = keys - rows
    causal = causal_intervals(start, rows).repeat(2, 1, 1)
    left, right, blind = causal.clone(), causal.clone(), causal.clone()
    left[1, :, 0] = start + rows // 3  # the first third of the rows then sees nothing
    right[1, rows // 2 :] = 0
    blind[0, ::3] = 0
    blind[1, 5:20, 0] = keys
    packs = torch.cat((packed(keys, 7, 1, keys), packed(keys, 41, 2, keys)))[:, start:]
    return {
        "causal": causal[:1],
        "all": full_intervals(rows, keys),
        "left padding": left,
        "right padding": right,
        "packed documents": packs,
        "window": causal_intervals(start, rows, window_size=10),
        "window of one": causal_intervals(start, rows, window_size=1),
        "wide window": causal_intervals(start, rows, window_size=rows + 3).repeat(2, 1, 1),
        "blind rows": blind,
        "nothing": torch.zeros(2, rows, 2, dtype=torch.int64),
    }


MASKS = list(masks(63, 100))


def visible(intervals, keys):
    position = torch.arange(keys, device=intervals.device)
    return (intervals[..., :1] <= position) & (position < intervals[..., 1:])  # [B, T, N]


def truth(q, k, v, intervals, *, scale=None, softcap=0.0):
    """The formula under autograd: out, lse. A row without keys has out 0 and lse -inf."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(intervals, k.shape[2]).unsqueeze(1)
    seeing = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & seeing, -math.inf)
    out = (torch.softmax(scores, -1) @ v).masked_fill(~seeing, 0.0)
    return out, torch.logsumexp(scores, -1).masked_fill(~seeing.squeeze(-1), -math.inf)


def gradients(function, q, k, v, d_out):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def through_blocks(q, k, v, d_out, intervals, *sizes, **kwargs):
    """out, lse, dq, dk, dv by way of key blocks."""
    blocks = cut(k, v, *sizes)
    out, lse = attend(q, blocks, intervals, **kwargs)
    dq = attend_backward(d_out, q, blocks, out, lse, intervals, **kwargs)
    dk, dv = (
        torch.cat([g(b) if g(b) is not None else torch.zeros_like(x(b)) for b in blocks], 2)
        for g, x in ((lambda b: b.dk, lambda b: b.k), (lambda b: b.dv, lambda b: b.v))
    )
    return out, lse, dq, dk, dv


def assert_close(actual, expected, tolerance=1e-12):
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        torch.testing.assert_close(a, e.to(a.dtype), rtol=0, atol=tolerance)


def plain_torch(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def tokens_first(x):
    """The same values as a view of `[B, S, H, D]`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def head_dim_first(x):
    """The same values with a last stride that is not 1."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def within_something_larger(x):
    """The same values as a slice of a fused projection."""
    batch, heads, tokens, dim = x.shape
    fused = torch.full((batch, tokens, heads, 3 * dim + 1), math.nan, dtype=x.dtype)
    view = fused[..., dim : 2 * dim].transpose(1, 2)
    return view.copy_(x)


LAYOUTS = [tokens_first, head_dim_first, within_something_larger]
