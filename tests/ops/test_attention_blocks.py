"""Blocks of keys: continuing and merging, gradients added in place, and any strides."""

import itertools
import math

import pytest
import torch

from offload.ops.attention import attention
from offload.ops.intervals import causal_intervals
from offload.ops.key_blocks import KeyBlock
from offload.ops.merging import merge
from offload.ops.tile_attention import attend, attend_backward
from tests.ops.attention_cases import (
    BACKENDS,
    F64,
    LAYOUTS,
    assert_close,
    cut,
    gradients,
    head_dim_first,
    masks,
    tensors,
    through_blocks,
    tokens_first,
    truth,
)

# Merging and continuing


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_continuing_in_any_order_gives_the_same(order):
    q, k, v, d_out = tensors()
    intervals = masks(63, 100)["left padding"]
    blocks = cut(k, v, 30, 33)
    carry = None
    for index in order:
        carry = attend(q, [blocks[index]], intervals, carry=carry, out_dtype=F64)
    whole = attend(q, cut(k, v), intervals)
    assert_close(carry, whole)
    dq = sum(attend_backward(d_out, q, [blocks[index]], *carry, intervals) for index in order)
    assert_close([dq], [through_blocks(q, k, v, d_out, intervals)[2]])


def test_the_order_of_blocks_in_one_call_does_not_matter():
    q, k, v, _ = tensors()
    intervals = masks(63, 100)["packed documents"]
    blocks = cut(k, v, 30, 33)
    assert_close(attend(q, blocks[::-1], intervals), attend(q, blocks, intervals))


def test_what_is_carried_is_left_as_it_was():
    q, k, v, _ = tensors()
    intervals = masks(63, 100)["causal"]
    blocks = cut(k, v, 30, 33)
    carry = attend(q, blocks[:1], intervals)
    kept = [x.clone() for x in carry]
    result = attend(q, blocks[1:], intervals, carry=carry)
    assert all(torch.equal(x, y) for x, y in zip(carry, kept, strict=True))
    for x in (*result, *attend(q, [], intervals, carry=carry)):
        x.fill_(7.0)
    assert all(torch.equal(x, y) for x, y in zip(carry, kept, strict=True))


def test_blocks_that_no_row_sees_change_nothing():
    q, k, v, _ = tensors()
    intervals = masks(63, 100)["causal"]
    carry = attend(q, cut(k, v), intervals)
    behind = [KeyBlock(k, v, 100)]
    assert all(
        torch.equal(x, y)
        for x, y in zip(attend(q, behind, intervals, carry=carry), carry, strict=True)
    )


def test_merge_is_attention_over_both_and_makes_new_tensors():
    q, k, v, _ = tensors(dtype=torch.float32)
    intervals = masks(63, 100)["blind rows"]
    first, second = ([b] for b in cut(k, v, 37))
    a, b = attend(q, first, intervals), attend(q, second, intervals)
    kept = [x.clone() for x in (*a, *b)]
    assert_close(merge(*a, *b), attend(q, first + second, intervals), 1e-6)
    assert_close(merge(*b, *a), attend(q, first + second, intervals), 1e-6)
    assert all(torch.equal(x, y) for x, y in zip((*a, *b), kept, strict=True))


def test_merging_rows_without_keys_gives_no_nan():
    empty = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -math.inf)
    some = torch.ones(1, 1, 2, 3), torch.tensor([[[-1e30, 1e30]]])
    for a, b in ((empty, some), (some, empty)):
        assert all(torch.equal(x, y) for x, y in zip(merge(*a, *b), some, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(merge(*empty, *empty), empty, strict=True))


def test_half_types_merge_in_float32():
    part = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 1)
    out, lse = merge(*part, part[0] * 2, part[1] + 1)
    assert out.dtype == torch.float32
    weight = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(out, torch.full((1, 1, 1, 4), 1 + weight))
    torch.testing.assert_close(lse, torch.tensor([[[math.log(1 + math.e)]]]))


# Accumulators


def test_backward_adds_to_the_accumulators_in_place():
    q, k, v, d_out = tensors(dtype=torch.bfloat16)
    intervals = masks(63, 100)["window"]
    _, _, _, dk, dv = through_blocks(q, k, v, d_out, intervals)
    (block,) = cut(k, v)
    block.dk, block.dv = torch.ones(k.shape), torch.full(v.shape, 2.0)
    before = block.dk, block.dv
    out, lse = attend(q, [block], intervals)
    attend_backward(d_out, q, [block], out, lse, intervals)
    assert block.dk is before[0]
    assert block.dv is before[1]
    assert_close((block.dk, block.dv), (dk + 1, dv + 2), 1e-6)
    attend_backward(d_out, q, [block], out, lse, intervals)
    assert_close((block.dk, block.dv), (2 * dk + 1, 2 * dv + 2), 1e-6)


def test_accumulators_may_be_views_of_one_buffer():
    q, k, v, d_out = tensors()
    intervals = masks(63, 100)["causal"]
    buffer = torch.zeros(2, 100, 2, 16, dtype=F64).transpose(1, 2)
    blocks = cut(k, v, 37)
    for block in blocks:
        block.dk = buffer[:, :, block.start : block.end]
    out, lse = attend(q, blocks, intervals)
    attend_backward(d_out, q, blocks, out, lse, intervals)
    assert_close([buffer], [through_blocks(q, k, v, d_out, intervals)[3]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, F64])
def test_accumulators_appear_where_a_row_sees_the_block(dtype):
    q, k, v, d_out = tensors(dtype=dtype)
    intervals = causal_intervals(37, 63, window_size=20)
    blocks = cut(k, v, 17, 20)
    out, lse = attend(q, blocks, intervals)
    assert all(b.dk is None and b.dv is None for b in blocks)
    attend_backward(d_out, q, blocks, out, lse, intervals)
    assert blocks[0].dk is None
    assert blocks[0].dv is None
    for block in blocks[1:]:
        assert block.dk.shape == block.k.shape
        assert block.dk.dtype == block.dv.dtype == torch.promote_types(dtype, torch.float32)
    assert not blocks[1].dk[:, :, 0].any()  # key 17 is one before the first row's window
    assert blocks[1].dk[:, :, 1].all()


def test_no_argument_is_written_to():
    arguments = [*tensors(), masks(63, 100)["blind rows"]]
    kept = [x.clone() for x in arguments]
    q, k, v, d_out, intervals = arguments
    out, lse = attend(q, cut(k, v, 37), intervals)
    kept_results = out.clone(), lse.clone()
    attend_backward(d_out, q, cut(k, v, 37), out, lse, intervals)
    assert all(torch.equal(x, y) for x, y in zip(arguments, kept, strict=True))
    assert torch.equal(out, kept_results[0])
    assert torch.equal(lse, kept_results[1])


# Layouts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_give_the_same(layout, backend):
    arguments = tensors()
    intervals = masks(63, 100)["left padding"]
    expected = through_blocks(*arguments, intervals, 37, backend=backend)
    actual = through_blocks(*map(layout, arguments), intervals, 37, backend=backend)
    assert_close(actual, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_takes_out_and_lse_in_any_strides(layout):
    q, k, v, d_out = tensors()
    intervals = masks(63, 100)["causal"]
    expected = through_blocks(q, k, v, d_out, intervals, 37)
    out, lse = layout(expected[0]), expected[1].transpose(1, 2).contiguous().transpose(1, 2)
    dq = attend_backward(d_out, q, cut(k, v, 37), out, lse, intervals)
    assert_close([dq], [expected[2]])


def test_a_gradient_expanded_from_one_number():
    q, k, v, _ = tensors()
    q.requires_grad_()
    attention(q, k, v).sum().backward()
    expected = gradients(
        lambda *x: truth(*x, causal_intervals(37, 63))[0], q, k, v, torch.ones_like(q)
    )
    assert_close([q.grad], [expected[1]])


def test_a_block_copies_only_what_no_kernel_can_read():
    _, k, v, _ = tensors()
    block = KeyBlock(tokens_first(k), head_dim_first(v), 5)
    assert block.k.stride() == tokens_first(k).stride()
    assert block.v.stride(-1) == 1
    assert torch.equal(block.v, v)
    assert block.end == 105
