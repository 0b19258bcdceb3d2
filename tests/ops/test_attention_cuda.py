"""The kernels of a card, against the plain formula in float64 on the CPU.

Without a card the calls are checked all the same, with stand-ins that compute by the plain formula
and insist on the layouts that the kernels need.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from offload.ops import _torch
from offload.ops.attention import attention
from offload.ops.intervals import Rows, Visibility, causal_intervals, full_intervals
from offload.ops.tile_attention import attend, attend_backward
from tests.ops.attention_cases import (
    F64,
    LAYOUTS,
    MASKS,
    assert_close,
    cut,
    gradients,
    masks,
    plain_torch,
    tensors,
    through_blocks,
    truth,
    visible,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ON_A_CARD = ["torch", "triton"]
EPS = 16 * torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _float32_is_float32():
    """The error of a product in TF32 would hide ours."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


class StandIns:
    """`torch.ops.aten` of a card."""

    def _flash_attention_forward(
        self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale
    ):
        assert (cum_q, cum_k, dropout, debug) == (None, None, 0.0, False)
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        out, lse = truth(*heads_first(q, k, v), square_or_all(q, k, causal), scale=scale)
        return out.transpose(1, 2).contiguous(), lse, None, None, None

    def _flash_attention_backward(
        self, d_out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused,
        *, scale
    ):  # fmt: skip
        assert (cum_q, cum_k, dropout) == (None, None, 0.0)
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        assert (rng.shape, unused.shape) == ((2,), ())
        assert rng.dtype == unused.dtype == torch.uint64
        assert lse.is_contiguous()
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        mask = dense_bias(square_or_all(q, k, causal), q, k)
        return by_hand(d_out, q, k, v, out, lse, mask, scale)

    def _efficient_attention_forward(
        self, q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, mask_type, with_lse, *, scale
    ):
        assert (cu_q, cu_k, max_q, max_k, dropout, with_lse) == (None, None, None, None, 0.0, True)
        mask = self.mask(q, k, v, bias, mask_type)
        q, k, v = heads_first(q, k, v)
        scores = q @ k.transpose(-1, -2) * scale + mask
        lse = torch.logsumexp(scores, -1)
        out = torch.softmax(scores, -1) @ v  # NaN in rows without keys
        padded = torch.full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), math.nan).to(lse)
        padded[..., : lse.shape[2]] = lse.masked_fill(lse == -math.inf, math.inf)
        return out.transpose(1, 2).contiguous(), padded, None, None, max_q, max_k

    def _efficient_attention_backward(
        self, d_out, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout, seed, offset,
        mask_type, bias_requires_grad, *, scale
    ):  # fmt: skip
        assert (cu_q, cu_k, dropout, bias_requires_grad) == (None, None, 0.0, False)
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        assert out.is_contiguous()  # aten reads no stride of its rows
        assert lse.shape[2] == -(-q.shape[1] // 32) * 32
        assert (lse[..., q.shape[1] :] == math.inf).all()
        mask = self.mask(q, k, v, bias, mask_type)
        return *by_hand(d_out, q, k, v, out, lse[..., : q.shape[1]], mask, scale), None

    @staticmethod
    def mask(q, k, v, bias, mask_type):
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        assert q.shape[2] == k.shape[2] == v.shape[2]
        if bias is None:
            return dense_bias(square_or_all(q, k, mask_type == 1), q, k)
        assert mask_type == 0
        assert bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        assert bias.dtype == q.dtype
        assert bias.stride(3) == 1
        assert all(stride % 16 == 0 for stride in bias.stride()[:3])
        return bias


def heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def square_or_all(q, k, causal):
    rows, keys = q.shape[1], k.shape[1]
    assert not causal or rows == keys
    return causal_intervals(0, rows) if causal else full_intervals(rows, keys)


def dense_bias(intervals, q, k):
    seen = visible(intervals, k.shape[1]).unsqueeze(1)
    return torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -math.inf)


def by_hand(d_out, q, k, v, out, lse, mask, scale):
    """The gradients, all `[B, S, H, D]`, with KV heads repeated and summed over."""
    groups = q.shape[2] // k.shape[2]
    d_out, q, k, v, out = heads_first(d_out, q, k, v, out)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    weights = torch.exp(q @ k.transpose(-1, -2) * scale + mask - lse.unsqueeze(-1))
    delta = (d_out * out).sum(-1, keepdim=True)
    d_scores = weights * (d_out @ v.transpose(-1, -2) - delta) * scale
    dk, dv = d_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ d_out
    dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
    return heads_first(d_scores @ k, dk, dv)


@pytest.fixture
def stand_ins(monkeypatch):
    def choose(q, v, part, softcap):
        if part.visibility is Visibility.PARTIAL or q.dtype == torch.float32:
            return _torch._EFFICIENT
        return _torch._FLASH

    monkeypatch.setattr(_torch, "_aten", StandIns())
    monkeypatch.setattr(_torch, "_choose", choose)
    # a card's kernels may leave anything in rows without keys
    monkeypatch.setattr(_torch, "_is_cpu", lambda x: False)


@pytest.mark.parametrize("layout", [lambda x: x, *LAYOUTS])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_calls_keep_to_the_kernels_layouts(stand_ins, dtype, heads, kv_heads, layout):
    inputs = [layout(x) for x in tensors(heads=heads, kv_heads=kv_heads, dtype=dtype)]
    for intervals in masks(63, 100).values():
        out, _, *grads = through_blocks(*inputs, intervals, 37, 20)
        expected = gradients(lambda *x, i=intervals: truth(*x, i)[0], *inputs)
        assert_close((out, *grads), expected, 1e-12 if dtype == F64 else 2e-5)


def test_the_kernels_get_lse_in_rows(stand_ins):
    q, k, v, d_out = tensors()
    intervals = causal_intervals(37, 63)
    out, lse, dq, *_ = through_blocks(q, k, v, d_out, intervals, 37)
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    assert_close([attend_backward(d_out, q, cut(k, v, 37), out, strided, intervals)], [dq])


@pytest.mark.parametrize("causal", [True, False])
def test_torchs_own_schemas_take_the_calls(causal):
    # torch 2.13's meta function of the memory-efficient backward lacks an argument: not called
    intervals = causal_intervals(0, 63) if causal else full_intervals(63, 63)
    part = Rows(intervals).part(0, 63)
    q, k, v, _ = (x.to("meta") for x in tensors(keys=63, dtype=torch.float16))
    out, lse = _torch._FLASH.forward(q, k, v, part, 0.1)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    grads = _torch._FLASH.backward(out, q, k, v, out, lse, part, 0.1)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    out, lse = _torch._EFFICIENT.forward(q, k, v, part, 0.1)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])


def on_card(intervals):
    return intervals.cuda()


def error(ours, right):
    return (ours.double().cpu() - right).norm() / right.norm().clamp(min=1e-30)


def assert_within_twice_torchs_own(inputs, intervals, *sizes, backend="torch", **kwargs):
    """Errors of out, dq, dk, dv against a float64 truth, beside those of torch's attention."""
    q, k, v, _ = inputs
    exact = gradients(lambda *x: truth(*x, intervals, **kwargs)[0], *(x.double() for x in inputs))
    lse_exact = truth(q.double(), k.double(), v.double(), intervals, **kwargs)[1]
    cards = [x.cuda() for x in inputs]
    softcap, scale = kwargs.get("softcap", 0.0), kwargs.get("scale")
    out, lse, *grads = through_blocks(
        *cards, on_card(intervals), *sizes, softcap=softcap, softmax_scale=scale, backend=backend
    )
    mask = visible(intervals, k.shape[2]).unsqueeze(1).cuda()
    seeing = mask.any(-1, keepdim=True)

    def torchs(q, k, v):
        if softcap:
            return truth(q, k, v, on_card(intervals), **kwargs)[0]
        return plain_torch(q, k, v, mask | ~seeing).masked_fill(~seeing, 0.0)

    for ours, theirs, right in zip((out, *grads), gradients(torchs, *cards), exact, strict=True):
        assert ours.isfinite().all()
        assert error(ours, right) <= 2 * error(theirs, right) + EPS
    seen = lse_exact.isfinite()
    assert torch.equal(lse.isfinite().cpu(), seen)
    torch.testing.assert_close(lse.cpu()[seen].double(), lse_exact[seen], rtol=1e-3, atol=2e-3)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("backend", ON_A_CARD)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mask_over_unequal_blocks(dtype, mask, backend):
    inputs = tensors(head_dim=64, dtype=dtype)
    assert_within_twice_torchs_own(inputs, masks(63, 100)[mask], 37, 20, backend=backend)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128, 200, 256, 264, 20])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims_and_shared_kv_heads(dtype, heads, kv_heads, head_dim):
    inputs = tensors(heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    assert_within_twice_torchs_own(inputs, masks(63, 100)["causal"], 37)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("backend", ON_A_CARD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_real_size(dtype, backend):
    inputs = tensors(batch=1, rows=1000, keys=3000, head_dim=128, dtype=dtype)
    causal, window = (causal_intervals(2000, 1000, window_size=size) for size in (None, 129))
    assert_within_twice_torchs_own(inputs, causal, 1000, 1000, backend=backend)
    assert_within_twice_torchs_own(inputs, window, 1000, backend=backend)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("backend", ON_A_CARD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_as_in_decoding(dtype, backend):
    inputs = tensors(rows=1, keys=300, head_dim=64, dtype=dtype)
    assert_within_twice_torchs_own(inputs, causal_intervals(299, 1), 128, backend=backend)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("dtype", [*DTYPES, F64])
@pytest.mark.parametrize("mask", ["causal", "blind rows"])
def test_softcap_takes_the_plain_formula(dtype, mask):
    inputs = tensors(head_dim=64, dtype=dtype)
    assert_within_twice_torchs_own(inputs, masks(63, 100)[mask], 37, softcap=2.0, scale=0.3)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_in_triton(dtype):
    inputs, options = tensors(head_dim=64, dtype=dtype), {"softcap": 2.0, "scale": 0.3}
    intervals = masks(63, 100)["blind rows"]
    assert_within_twice_torchs_own(inputs, intervals, 37, backend="triton", **options)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(dtype, layout):
    inputs = tensors(head_dim=64, dtype=dtype)
    for mask in ("causal", "blind rows"):
        intervals = on_card(masks(63, 100)[mask])
        plain = through_blocks(*(x.cuda() for x in inputs), intervals, 37, backend="torch")
        moved = (layout(x.cuda()) for x in inputs)
        strided = through_blocks(*moved, intervals, 37, backend="torch")
        for a, b in zip(strided, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.needs_cuda
def test_which_kernel_runs():
    major, _ = torch.cuda.get_device_capability()
    q, _, v, _ = (x.cuda() for x in tensors(head_dim=64, dtype=torch.float16))
    rows = Rows(causal_intervals(37, 63))
    seen, square = rows.part(0, 37), rows.part(37, 100)
    partial = rows.part(20, 100)
    flash = _torch._FLASH if major >= 8 else _torch._EFFICIENT
    assert _torch._choose(q, v, seen, 0.0) is flash
    assert _torch._choose(q, v, square, 0.0) is flash
    assert _torch._choose(q, v, partial, 0.0) is _torch._EFFICIENT
    assert _torch._choose(q.float(), v.float(), square, 0.0) is _torch._EFFICIENT
    assert _torch._choose(q.double(), v.double(), square, 0.0) is None
    assert _torch._choose(q, v, square, 1.0) is None


@pytest.mark.needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_against_torchs(dtype):
    inputs = [x.cuda() for x in tensors(rows=3000, keys=3000, head_dim=64, dtype=dtype)]
    exact = gradients(
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True),
        *(x.double() for x in inputs),
    )
    torchs = gradients(
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True), *inputs
    )
    for ours, theirs, right in zip(gradients(attention, *inputs), torchs, exact, strict=True):
        assert error(ours, right.cpu()) <= 2 * error(theirs, right.cpu()) + EPS


@pytest.mark.needs_cuda
@pytest.mark.parametrize("backend", ON_A_CARD)
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_a_tile_never_waits_on_the_device(backend, where):
    if (backend, where) == ("torch", "cpu"):
        pytest.skip("its masks are made on the device, from intervals that the caller brings there")
    q, k, v, _ = (x.cuda() for x in tensors(head_dim=64, dtype=torch.float16))
    blocks = cut(k, v, 37, 20)
    causal = causal_intervals(37, 63, window_size=30, device=where)
    other = full_intervals(63, 90, device=where)
    for intervals in (causal, other):
        attend(q, blocks, intervals, backend=backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for intervals in (causal, other):
            attend(q, blocks, intervals, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
