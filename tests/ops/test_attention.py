import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from offload.ops import _torch
from offload.ops.attention import (
    TILE_TOKENS,
    KeyBlock,
    attend,
    attend_backward,
    attention,
    merge,
)
from offload.ops.intervals import causal_intervals, full_intervals, with_host_copy
from offload.ops.routing import AttentionCall, routed

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


def plain_torch(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


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


# Meta tensors


@pytest.mark.parametrize(
    "intervals", [causal_intervals(37, 63), causal_intervals(37, 63).to("meta")]
)
def test_meta_tensors_give_shapes_and_dtypes(intervals):
    q, k, v, d_out = (x.to("meta") for x in tensors(dtype=torch.bfloat16, value_dim=24))
    blocks = cut(k, v, 37)
    out, lse = attend(q, blocks, intervals)
    assert (out.shape, out.dtype) == (d_out.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert attend(q, blocks, intervals, out_dtype=torch.float32)[0].dtype == torch.float32
    dq = attend_backward(d_out, q, blocks, out, lse, intervals)
    assert (dq.shape, dq.dtype, dq.device.type) == (q.shape, torch.bfloat16, "meta")
    for block in blocks:
        assert (block.dk.shape, block.dk.dtype) == (block.k.shape, torch.float32)
        assert (block.dv.shape, block.dv.dtype) == (block.v.shape, torch.float32)


def test_attention_of_meta_tensors_has_shapes_of_gradients():
    inputs = [x.to("meta").requires_grad_() for x in tensors(rows=63, keys=63)[:3]]
    out = attention(*inputs)
    out.sum().backward()
    assert out.shape == inputs[0].shape
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]


def test_device_intervals_with_a_host_copy_are_never_read():
    q, k, v, _ = tensors(rows=63, keys=63)
    host = causal_intervals(0, 63)

    class Unreadable(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function in (torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist):
                raise AssertionError("read the device")
            return super().__torch_function__(function, types, args, kwargs or {})

    device = with_host_copy(host.clone().as_subclass(Unreadable), host)
    assert_close(attend(q, cut(k, v), device), attend(q, cut(k, v), host))


# attention


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window_size", [None, 10])
def test_attention_is_exact_over_tiles_and_chunks(monkeypatch, backend, window_size):
    monkeypatch.setattr("offload.ops.attention.TILE_TOKENS", 25)
    for rows, keys in ((63, 63), (63, 100), (1, 100), (25, 50)):
        q, k, v, d_out = tensors(rows=rows, keys=keys)
        intervals = causal_intervals(keys - rows, rows, window_size=window_size)
        actual = gradients(
            lambda *x: attention(*x, window_size=window_size, backend=backend), q, k, v, d_out
        )
        exact = functools.partial(truth, intervals=intervals)
        assert_close(actual, gradients(lambda *x, f=exact: f(*x)[0], q, k, v, d_out))


@pytest.mark.parametrize(("rows", "keys"), [(63, 63), (63, 100), (50, 60)])
def test_a_tile_meets_its_own_chunk_as_a_square_and_no_mask_elsewhere(monkeypatch, rows, keys):
    monkeypatch.setattr("offload.ops.attention.TILE_TOKENS", 25)
    q, k, v, _ = tensors(rows=rows, keys=keys)
    masked = []
    bias = _torch._bias
    monkeypatch.setattr(_torch, "_bias", lambda *a, **b: masked.append(bias(*a, **b)) or masked[-1])
    attention(q, k, v)
    assert len(masked) > 1
    assert all(x is None for x in masked)


def test_attention_agrees_with_torchs_at_real_tile_sizes():
    q, k, v, d_out = tensors(
        batch=1, heads=2, kv_heads=1, rows=TILE_TOKENS + 63, keys=TILE_TOKENS + 63, head_dim=8
    )
    actual = gradients(attention, q, k, v, d_out)
    expected = gradients(
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True),
        q,
        k,
        v,
        d_out,
    )
    assert_close(actual, expected)


def test_attention_takes_intervals_in_place_of_causal():
    q, k, v, d_out = tensors()
    for intervals in masks(63, 100).values():
        actual = gradients(lambda *x: attention(*x, intervals=intervals), q, k, v, d_out)  # noqa: B023
        expected = gradients(lambda *x: truth(*x, intervals)[0], q, k, v, d_out)  # noqa: B023
        assert_close(actual, expected)


def test_a_window_narrows_given_intervals():
    q, k, v, _ = tensors()
    limited = causal_intervals(37, 63, window_size=10)
    actual = attention(q, k, v, intervals=causal_intervals(37, 63), window_size=10)
    assert_close([actual], [truth(q, k, v, limited)[0]])


def test_attention_without_causal_sees_every_key():
    q, k, v, _ = tensors(rows=100, keys=63)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_close([attention(q, k, v, causal=False)], [expected])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_takes_any_strides(layout):
    q, k, v, d_out = tensors()
    expected = gradients(attention, q, k, v, d_out)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*map(layout, leaves)) if layout is not LAYOUTS[2] else attention(*leaves)
    grads = torch.autograd.grad(out, leaves, layout(d_out))
    assert_close([out.detach(), *grads], expected)


def test_the_output_lies_as_the_output_projection_reads_it():
    q, k, v, _ = tensors()
    assert attention(q, k, v).transpose(1, 2).is_contiguous()


def test_a_graph_kept_is_walked_twice_and_gradients_have_no_gradients():
    q, k, v, _ = tensors()
    q.requires_grad_()
    out = attention(q, k, v).pow(2).sum()
    (first,) = torch.autograd.grad(out, q, retain_graph=True)
    (again,) = torch.autograd.grad(out, q, create_graph=True)
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        again.sum().backward()


def test_a_saved_tensor_changed_in_place_is_noticed():
    q, k, v, _ = tensors()
    q.requires_grad_()
    out = attention(q, k, v)
    k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_attention_without_gradients_keeps_nothing():
    q, k, v, _ = tensors()
    assert attention(q, k, v).grad_fn is None
    with torch.no_grad():
        assert attention(q.requires_grad_(), k, v).grad_fn is None


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_autocast_computes_in_its_dtype_as_torchs_attention_does(softcap):
    inputs = [x.requires_grad_() for x in tensors(dtype=torch.float32)[:3]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*inputs, softcap=softcap)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(x.grad.dtype == torch.float32 for x in inputs)
    plain = attention(*(x.detach().bfloat16() for x in inputs), softcap=softcap)
    assert torch.equal(out, plain)


# Routing


class Recorder:
    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return call.q * 2


def test_a_route_gets_the_call_as_it_was_made():
    q, k, v, _ = tensors()
    route = Recorder()
    intervals = masks(63, 100)["packed documents"]
    with routed(route):
        out = attention(q, k, v, intervals=intervals, window_size=5, softmax_scale=0.3, softcap=2.0)
    assert torch.equal(out, q * 2)
    (call,) = route.calls
    assert all(a is b for a, b in zip((call.q, call.k, call.v), (q, k, v), strict=True))
    assert call.intervals is intervals
    assert (call.window_size, call.softmax_scale, call.softcap) == (5, 0.3, 2.0)


def test_a_route_gets_no_intervals_where_the_call_is_causal():
    q, k, v, _ = tensors()
    route = Recorder()
    with routed(route):
        attention(q, k, v)
    call = route.calls[0]
    assert (call.intervals, call.window_size, call.softmax_scale) == (None, None, None)
    assert call.softcap == 0.0
    attention(q, k, v)
    assert len(route.calls) == 1


def test_a_route_refuses_attention_that_is_not_causal():
    q, k, v, _ = tensors()
    with routed(Recorder()), pytest.raises(NotImplementedError, match="expected causal attention"):
        attention(q, k, v, causal=False)


# Errors


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(2, 3, 100, 16)}, ValueError, "Hk dividing H"),
        ({"k": torch.zeros(1, 2, 100, 16)}, ValueError, "expected q .* got shapes"),
        ({"k": torch.zeros(2, 2, 100, 8)}, ValueError, "expected q .* got shapes"),
        ({"v": torch.zeros(2, 2, 99, 16)}, ValueError, "expected q .* got shapes"),
        ({"q": torch.zeros(4, 63, 16)}, ValueError, "expected q .* got shapes"),
        (
            {"q": torch.zeros(2, 4, 63, 16).half()},
            TypeError,
            "one floating dtype, got torch.float16",
        ),
        ({"q": torch.zeros(2, 4, 63, 16, device="meta")}, ValueError, "on one device, got meta"),
        ({"intervals": torch.zeros(1, 63, 2)}, TypeError, "expected int64 intervals"),
        ({"intervals": torch.zeros(3, 63, 2).long()}, ValueError, "expected intervals of shape"),
        ({"intervals": torch.zeros(1, 62, 2).long()}, ValueError, "expected intervals of shape"),
        ({"intervals": torch.zeros(1, 63, 2, device="meta").long()}, ValueError, "or the CPU, got"),
        ({"softcap": -1.0}, ValueError, "expected softcap of at least 0, got -1.0"),
        ({"backend": "triton"}, NotImplementedError, "expected a backend that exists"),
        ({"backend": "flash"}, ValueError, "expected backend 'auto', 'torch' or 'reference'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, error, message):
    q, k, v, d_out = tensors(dtype=torch.float32)
    arguments = {"q": q, "k": k, "v": v, "intervals": causal_intervals(37, 63)} | change
    with pytest.raises(error, match=f"attention: .*{message}|attend: .*{message}"):
        attention(**arguments)
    q, k, v, intervals = (arguments.pop(name) for name in ("q", "k", "v", "intervals"))
    with pytest.raises(error, match=f"attend: .*{message}"):
        attend(q, [KeyBlock(k, v, 0)], intervals, **arguments)
    with pytest.raises(error, match=f"attend_backward: .*{message}"):
        attend_backward(d_out, q, [KeyBlock(k, v, 0)], d_out, d_out[..., 0], intervals, **arguments)


def test_results_of_another_tile_are_named():
    q, k, v, d_out = tensors()
    blocks, intervals = cut(k, v), causal_intervals(37, 63)
    out, lse = attend(q, blocks, intervals)
    other = out[:, :, :60], lse[:, :, :60]
    with pytest.raises(ValueError, match=r"attend: expected carry\[0\] of shape \(2, 4, 63, 16\)"):
        attend(q, blocks, intervals, carry=other)
    with pytest.raises(ValueError, match=r"attend: expected carry\[1\] of shape \(2, 4, 63\)"):
        attend(q, blocks, intervals, carry=(out, other[1]))
    for name, arguments in (
        ("d_out", (other[0], out, lse)),
        ("out", (d_out, other[0], lse)),
        ("lse", (d_out, out, other[1])),
    ):
        grad, result, logsumexp = arguments
        with pytest.raises(ValueError, match=f"attend_backward: expected {name} of shape"):
            attend_backward(grad, q, blocks, result, logsumexp, intervals)


def test_more_queries_than_keys_are_refused_where_causal():
    q, k, v, _ = tensors(rows=100, keys=63)
    with pytest.raises(ValueError, match="attention: expected at least as many keys as queries"):
        attention(q, k, v)


def test_a_window_without_causal_is_refused():
    q, k, v, _ = tensors()
    with pytest.raises(ValueError, match="attention: expected no window_size with causal=False"):
        attention(q, k, v, causal=False, window_size=5)
