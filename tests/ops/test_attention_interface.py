"""`offload.attention` itself: tiles, autograd, autocast, meta tensors, routes and errors."""

import functools

import pytest
import torch
import torch.nn.functional as F

from offload.ops import _torch
from offload.ops.attention import TILE_TOKENS, attention
from offload.ops.intervals import causal_intervals, with_host_copy
from offload.ops.key_blocks import KeyBlock
from offload.ops.routing import AttentionCall, routed
from offload.ops.tile_attention import attend, attend_backward
from tests.ops.attention_cases import (
    BACKENDS,
    LAYOUTS,
    assert_close,
    cut,
    gradients,
    masks,
    tensors,
    truth,
)

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
        ({"backend": "flash"}, ValueError, "expected backend 'auto', 'triton', 'torch' or 'ref"),
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
