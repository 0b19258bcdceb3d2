"""What only a card can show: real streams, page-locked memory, the caching allocator."""

import copy

import pytest
import torch

import offload
from offload import _native
from tests.models import Block, Stack, assert_same_step, blocks, calls_of, step

pytestmark = pytest.mark.needs_cuda

ALL = offload.Policy(mode="checkpoint", min_bytes=0)


def twins(model, policy=ALL):
    model = model.cuda()
    return model, offload.wrap(copy.deepcopy(model), policy=policy)


def test_the_build_has_cuda():
    assert _native.built_with_cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradients_equal_the_plain_models(store, dtype):
    plain, wrapped = twins(blocks(6, 256, dropout=0.1).to(dtype))
    inputs = torch.randn(2, 1000, 256, device="cuda", dtype=dtype)
    assert_same_step(plain, wrapped, lambda m: m(inputs).float().pow(2).mean(), steps=5)
    assert all(call.record.offloaded_tensors == 5 for call in calls_of(wrapped)[:-1])
    assert _native.arena_statistics().pinned_bytes > 0


def test_fifty_steps_with_bursts_of_short_lived_allocations(store):
    class Bursts(Block):
        def forward(self, hidden):
            for size in (1 << 10, 1 << 16, 1 << 20):
                torch.full((size,), float("nan"), device=hidden.device)
            hidden = torch.where(hidden > -10, hidden.double().float(), 0.0)
            return super().forward(hidden)

    plain, wrapped = twins(Stack([Bursts(512) for _ in range(12)]))
    inputs = torch.randn(2, 2048, 512, device="cuda")
    assert_same_step(plain, wrapped, lambda m: m(inputs).pow(2).mean(), steps=50)


def test_a_slow_device_and_a_side_stream(store):
    plain, wrapped = twins(blocks(8, 256))
    inputs = torch.randn(2, 2048, 256, device="cuda")
    stream = torch.cuda.Stream()

    def loss_of(model):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            loss = model(inputs).pow(2).mean()
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    assert_same_step(plain, wrapped, loss_of, steps=10)


def test_a_copy_held_up_behind_the_producing_kernel_is_not_read_early(store):
    for _ in range(20):
        torch.cuda._sleep(20_000_000)
        tensor = torch.full((1 << 20,), 3.0, device="cuda")
        ticket = store.offload(tensor)
        del tensor
        torch.full((1 << 20,), float("nan"), device="cuda")
        assert bool((ticket.reload() == 3.0).all())


def test_after_forward_the_layers_hold_at_most_two_inputs(store):
    depth, nbytes = 16, 8192 * 1024 * 2
    model = offload.wrap(blocks(depth, 1024).to("cuda", torch.bfloat16), policy=ALL)
    inputs = torch.randn(1, 8192, 1024, device="cuda", dtype=torch.bfloat16)
    step(model, lambda m: m(inputs).float().mean())
    model.zero_grad()
    torch.cuda.synchronize()
    store.synchronize()
    before = torch.cuda.memory_allocated()
    output = model(inputs)
    torch.cuda.synchronize()
    store.synchronize()
    assert torch.cuda.memory_allocated() - before <= 2 * nbytes + output.nbytes + (1 << 20)
    assert _native.arena_statistics().live_bytes >= (depth - 2) * nbytes


def test_device_memory_does_not_grow_over_steps(store):
    model = offload.wrap(blocks(8, 512).cuda(), policy=ALL)
    peaks = []
    for index in range(30):
        torch.cuda.reset_peak_memory_stats()
        length = 1024 + 512 * (index % 3)
        step(model, lambda m, n=length: m(torch.randn(2, n, 512, device="cuda")).pow(2).mean())
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[-3:] == peaks[9:12]


def test_offloading_while_a_graph_is_captured_is_refused(store):
    tensor = torch.ones(1 << 20, device="cuda")
    store.offload(tensor.clone()).reload()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(offload.OffloadError, match="captur"), torch.cuda.graph(graph):
        store.offload(tensor * 2)


def test_stalls_and_copy_times_are_measured(store):
    model = offload.wrap(blocks(8, 512).cuda(), policy=ALL)
    for seed in range(3):
        step(model, lambda m: m(torch.randn(2, 4096, 512, device="cuda")).pow(2).mean(), seed)
    torch.cuda.synchronize()
    store.synchronize()
    layers = offload.report(model).layers
    assert all(layer.d2h_ms > 0 and layer.h2d_ms > 0 for layer in layers[:-1])
