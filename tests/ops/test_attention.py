"""Attention over blocks of keys is exact: for any mask, head dim, block size, dtype, row."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from offload.ops import _torch
from offload.ops.attention import attention
from offload.ops.intervals import causal_intervals
from offload.ops.tile_attention import attend, attend_backward
from tests.ops.attention_cases import (
    BACKENDS,
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


def assert_exact(q, k, v, d_out, intervals, *sizes, scale=None, softcap=0.0, backend="torch"):
    actual = through_blocks(
        q, k, v, d_out, intervals, *sizes, softmax_scale=scale, softcap=softcap, backend=backend
    )
    formula = functools.partial(truth, intervals=intervals, scale=scale, softcap=softcap)
    out, dq, dk, dv = gradients(lambda *x: formula(*x)[0], q, k, v, d_out)
    assert_close(actual, (out, formula(q, k, v)[1], dq, dk, dv))


# The reference


@pytest.mark.parametrize("mask", MASKS)
def test_reference_agrees_with_the_formula_under_autograd(mask):
    assert_exact(*tensors(), masks(63, 100)[mask], backend="reference")


@pytest.mark.parametrize("name", ["causal", "all", "window", "packed documents"])
def test_reference_agrees_with_torchs_attention(name):
    q, k, v, d_out = tensors()
    mask = visible(masks(63, 100)[name], 100).unsqueeze(1)
    expected = gradients(
        lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask, enable_gqa=True),
        q,
        k,
        v,
        d_out,
    )
    out, _, *grads = through_blocks(q, k, v, d_out, masks(63, 100)[name], backend="reference")
    assert_close((out, *grads), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_gradcheck(backend, softcap):
    q, k, v, _ = tensors(batch=2, heads=2, kv_heads=1, rows=5, keys=7, head_dim=3)
    intervals = torch.tensor([[[0, 3], [2, 6], [0, 0], [0, 7], [6, 7]], [[1, 2]] * 5])
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, intervals=intervals, softcap=softcap, backend=backend), inputs
    )


# Exactness of the torch backend, in float64


@pytest.mark.parametrize("sizes", [(), (37,), (1, 30, 8)])
@pytest.mark.parametrize("mask", MASKS)
def test_blocks_of_any_sizes_are_exact_for_every_mask(mask, sizes):
    assert_exact(*tensors(), masks(63, 100)[mask], *sizes)


@pytest.mark.parametrize("head_dim", [1, 16, 24, 32, 64, 80, 128, 256, 320])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
def test_head_dims_and_shared_kv_heads_are_exact(head_dim, heads, kv_heads):
    arguments = tensors(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    for mask in ("causal", "blind rows"):
        assert_exact(*arguments, masks(63, 100)[mask], 37)


def test_a_thousand_rows_in_unequal_blocks_are_exact():
    q, k, v, d_out = tensors(batch=1, heads=2, kv_heads=1, rows=1000, keys=1300, head_dim=8)
    assert_exact(q, k, v, d_out, causal_intervals(300, 1000), 300, 513)
    assert_exact(q, k, v, d_out, causal_intervals(300, 1000, window_size=129), 300)


def test_a_square_block_is_exact_where_rows_and_keys_match():
    q, k, v, d_out = tensors(rows=40, keys=100)
    assert_exact(q, k, v, d_out, causal_intervals(60, 40), 30, 30)


@pytest.mark.parametrize("mask", ["causal", "blind rows"])
def test_softcap_and_scale_are_exact(mask):
    intervals = masks(63, 100)[mask]
    assert_exact(*tensors(), intervals, 37, scale=0.7, softcap=2.0)
    assert_exact(*tensors(), intervals, 37, scale=0.7)


def test_the_plain_formula_in_pieces_of_a_few_rows_is_exact(monkeypatch):
    monkeypatch.setattr(_torch, "SCORE_BYTES", 2 * 4 * 37 * 8 * 10)
    arguments = tensors()
    assert len(list(_torch._row_slices(arguments[0], arguments[1][:, :, :37]))) == 7
    assert_exact(*arguments, masks(63, 100)["blind rows"], 37, softcap=2.0)


def test_values_of_another_head_dim_than_the_keys():
    assert_exact(*tensors(value_dim=24), masks(63, 100)["left padding"], 37)


def test_rows_before_the_first_key_and_keys_behind_the_last_row():
    q, k, v, d_out = tensors(rows=20, keys=50)
    assert_exact(q, k, v, d_out, causal_intervals(10, 20), 25)
    assert_exact(q, k, v, d_out, torch.tensor([[[30, 10**6]] * 20]), 25)


# Real dtypes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "window", "packed documents"])
def test_errors_stay_within_twice_torchs_own(dtype, name, backend):
    intervals = masks(63, 100)[name]
    mask = visible(intervals, 100).unsqueeze(1)
    inputs = tensors(head_dim=64, dtype=dtype)
    exact = gradients(lambda *x: truth(*x, intervals)[0], *(x.double() for x in inputs))
    torchs = gradients(lambda *x: plain_torch(*x, mask), *inputs)
    out, lse, *grads = through_blocks(*inputs, intervals, 37, 20, backend=backend)
    assert out.dtype == grads[0].dtype == dtype
    assert lse.dtype == grads[1].dtype == grads[2].dtype == torch.float32
    for ours, theirs, right in zip((out, *grads), torchs, exact, strict=True):
        error = (ours.double() - right).norm() / right.norm()
        allowed = 2 * (theirs.double() - right).norm() / right.norm()
        assert error <= allowed + 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_blocks_lose_nothing_against_one_call(dtype):
    inputs = tensors(batch=1, rows=128, keys=512, head_dim=32, dtype=dtype)
    intervals = causal_intervals(384, 128)
    exact = gradients(lambda *x: truth(*x, intervals)[0], *(x.double() for x in inputs))
    torchs = gradients(lambda *x: plain_torch(*x, visible(intervals, 512).unsqueeze(1)), *inputs)
    out, _, *grads = through_blocks(*inputs, intervals, *[16] * 31)
    for ours, theirs, right in zip((out, *grads), torchs, exact, strict=True):
        error = (ours.double() - right).norm() / right.norm()
        allowed = 2 * (theirs.double() - right).norm() / right.norm()
        assert error <= allowed + 4 * torch.finfo(torch.float32).eps


def test_out_dtype_is_what_was_asked_for_and_backward_takes_it():
    q, k, v, d_out = tensors(dtype=torch.bfloat16)
    intervals = masks(63, 100)["left padding"]
    out, lse = attend(q, cut(k, v, 37), intervals, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    blocks = cut(k, v, 37)
    dq = attend_backward(d_out.float(), q, blocks, out, lse, intervals)
    assert dq.dtype == torch.bfloat16
    assert torch.equal(attend(q, cut(k, v, 37), intervals)[0], out.bfloat16())


# Rows without keys


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_keys_are_zero_and_their_gradients_finite(dtype, softcap, backend):
    q, k, v, d_out = tensors(dtype=dtype, rows=80, keys=1300)
    intervals = causal_intervals(1220, 80).repeat(2, 1, 1)
    intervals[0, ::2] = 0
    intervals[1, :40, 0] = 1400
    intervals[1, 40:, 0] = 1100  # the first kernel tiles of the last rows hold no visible key
    out, lse, *grads = through_blocks(
        q, k, v, d_out, intervals, 600, softcap=softcap, backend=backend
    )
    blind = intervals[..., 0] >= intervals[..., 1]
    assert not out.transpose(1, 2)[blind].any()
    assert (lse.transpose(1, 2)[blind] == -math.inf).all()
    assert lse.transpose(1, 2)[~blind].isfinite().all()
    assert all(x.isfinite().all() for x in (out, *grads))
    assert not grads[0].transpose(1, 2)[blind].any()


def test_an_empty_list_of_blocks_is_a_sequence_without_keys():
    q = tensors(dtype=torch.bfloat16)[0]
    intervals = causal_intervals(0, 63)
    out, lse = attend(q, [], intervals)
    assert out.dtype == torch.bfloat16
    assert not out.any()
    assert lse.dtype == torch.float32
    assert (lse == -math.inf).all()
    assert not attend_backward(out, q, [], out, lse, intervals).any()


@pytest.mark.parametrize("empty", [{"batch": 0}, {"rows": 0}])
def test_nothing_to_do_is_no_error(empty):
    q, k, v, d_out = tensors(**{"batch": 2, "rows": 63, "keys": 63} | empty)
    out, lse, dq, *_ = through_blocks(q, k, v, d_out, causal_intervals(0, q.shape[2]))
    assert out.shape == dq.shape == q.shape
    assert lse.shape == q.shape[:3]
