"""Attention as an operator of torch: compilers, fake tensors, counters of FLOPs."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from offload.ops.attention import attention
from offload.ops.intervals import causal_intervals, with_host_copy
from offload.ops.routing import AttentionCall, routed
from offload.ops.tile_attention import attend, attend_backward
from tests.ops.attention_cases import assert_close, cut, gradients, masks, tensors

operator = torch.ops.offload.attention.default


@pytest.mark.parametrize("form", ["causal", "window", "intervals"])
def test_torch_finds_nothing_wrong_with_the_operator(form):
    q, k, v, _ = (x.float() for x in tensors(batch=2, rows=12, keys=20))
    intervals = masks(12, 20)["left padding"] if form == "intervals" else None
    window_size = 5 if form == "window" else None
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(operator, (*leaves, intervals, True, window_size, None, 0.0, "torch"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_layer_is_compiled_whole(dynamic):
    def layer(q, k, v):
        return attention(q * 2, k, v, softmax_scale=0.3).sin()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (20, 33):
        q, k, v, d_out = tensors(rows=rows, keys=rows)
        assert_close(gradients(compiled, q, k, v, d_out), gradients(layer, q, k, v, d_out))


def test_a_compiled_layer_still_sends_its_attention_to_the_tile():
    compiled = torch.compile(lambda q, k, v: attention(q, k, v) + 1, backend="aot_eager")
    q, k, v, _ = tensors(rows=20, keys=20)
    outside = compiled(q, k, v)
    calls = []

    def route(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return torch.zeros_like(call.q)

    with routed(route):
        assert torch.equal(compiled(q, k, v), torch.ones_like(q))
    assert len(calls) == 1
    assert torch.equal(compiled(q, k, v), outside)


def test_a_layer_is_compiled_whole_after_a_tile_has_run():
    q, k, v, _ = tensors(rows=20, keys=20)
    with routed(lambda call: call.q):
        attention(q, k, v)
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v) - 1, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q, k, v), attention(q, k, v) - 1)


def test_fake_tensors_have_shapes_strides_and_gradients():
    with FakeTensorMode():
        q, k, v, d_out = (x.bfloat16().requires_grad_() for x in tensors(value_dim=24))
        out = attention(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), d_out)
    assert (out.shape, out.dtype) == (d_out.shape, torch.bfloat16)
    assert out.transpose(1, 2).is_contiguous()
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_the_host_copy_of_intervals_comes_through_the_operator(monkeypatch):
    q, k, v, d_out = tensors(rows=20, keys=20)
    q.requires_grad_()
    host = causal_intervals(0, 20)
    seen = []

    def spy(function):
        def spied(*arguments, **options):
            seen.extend(x for x in arguments if hasattr(x, "_offload_host"))
            return function(*arguments, **options)

        return spied

    monkeypatch.setattr("offload.ops.attention.attend", spy(attend))
    monkeypatch.setattr("offload.ops.attention.attend_backward", spy(attend_backward))
    out = attention(q, k, v, intervals=with_host_copy(host.clone(), host))
    out.backward(d_out)
    assert len(seen) == 2  # one tile, forward and backward


def counted(function) -> dict:
    with FlopCounterMode(display=False) as counter:
        function()
    counts = counter.get_flop_counts()["Global"]
    return {str(name).removeprefix("offload."): count for name, count in counts.items()}


def test_flops_are_counted_as_those_of_torchs_own_attention():
    q, k, v, d_out = (x.float() for x in tensors(heads=4, kv_heads=4, rows=64, keys=64))
    q_shape, k_shape, v_shape, d_shape = (x.shape for x in (q, k, v, d_out))
    assert counted(lambda: gradients(attention, q, k, v, d_out)) == {
        "attention": sdpa_flop_count(q_shape, k_shape, v_shape),
        "attention_backward": sdpa_backward_flop_count(d_shape, q_shape, k_shape, v_shape),
    }


def test_flops_of_the_triton_kernels_are_counted():
    operators = pytest.importorskip("offload.ops.fused.operators")
    if not operators.INTERPRETED:
        pytest.skip("counts tensors of the CPU")
    q, k, v, d_out = (x.float() for x in tensors(batch=1, heads=2, kv_heads=1, rows=10, keys=30))
    blocks, intervals = cut(k, v, 12), causal_intervals(20, 10)
    options = {"backend": "triton"}
    out, lse = attend(q, blocks, intervals, **options)
    counts = counted(lambda: attend(q, blocks, intervals, **options))
    product = 2 * 2 * 10 * 30 * 16
    assert counts == {"fused_forward": 2 * product}
    counts = counted(lambda: attend_backward(d_out, q, blocks, out, lse, intervals, **options))
    assert counts == {"fused_backward_queries": 3 * product, "fused_backward_keys": 4 * product}


def test_a_counter_that_is_imported_after_us_knows_attention():
    script = (
        "import sys, offload, torch\n"
        "assert 'torch.utils.flop_counter' not in sys.modules\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "q = torch.ones(1, 1, 8, 16)\n"
        "with FlopCounterMode(display=False) as counter: offload.attention(q, q, q)\n"
        "assert counter.get_total_flops() == 4 * 8 * 8 * 16\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
