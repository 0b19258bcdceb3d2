"""The ledger's books, and the shapes that are remembered for it."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from offload.devices import DeviceKind, capability_of, is_planned, meta_stands_for, type_of
from offload.planner.attention_work import OPERATORS
from offload.planner.ledger import PURPOSES, Ledger, Purpose
from offload.planner.paper_store import PaperStore
from offload.planner.shape_cache import ShapeCache
from offload.planner.whole_attention import fused_on_meta


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


def purposes(values):
    return {p.value: size for p, size in zip(PURPOSES, values, strict=True) if size}


def test_storages_count_once_until_the_last_tensor_goes():
    ledger = Ledger()
    with ledger:
        ledger.begin("a")
        x = meta(100)
        y = x.view(10, 10)
        z = x + 1
        del x
        ledger.begin("b")
        del y
        ledger.begin("c")
        del z
        ledger.finish()
    assert [sum(segment.peak) for segment in ledger.segments] == [800, 800, 400]
    assert [sum(segment.end) for segment in ledger.segments] == [800, 400, 0]


def test_what_a_segment_leaves_behind_is_saved():
    ledger = Ledger()
    with ledger:
        ledger.begin("a")
        kept = meta(10)
        ledger.begin("b")
        ledger.finish()
    assert purposes(ledger.segments[0].peak) == {"working set": 40}
    assert purposes(ledger.segments[1].peak) == {"other kept for backward": 40}
    assert kept.is_meta


def test_sizes_are_rounded_as_the_allocator_rounds():
    ledger = Ledger(rounding=512)
    with ledger:
        ledger.begin("a")
        some = [meta(1), meta(129)]
        ledger.finish()
    assert sum(ledger.segments[0].end) == 512 + 1024
    assert len(some) == 2


def test_only_unnamed_tensors_take_a_name():
    ledger = Ledger()
    with ledger:
        ledger.begin("a")
        weight, other = meta(10), meta(10)
        ledger.watch([weight], Purpose.WEIGHTS)
        for tensor in (weight, other):
            ledger.name(tensor, Purpose.KEYS)
        ledger.finish()
    assert purposes(ledger.segments[0].end) == {"weights": 40, "keys and values": 40}


def test_real_tensors_and_outlines_take_no_device_memory():
    ledger = Ledger()
    with ledger:
        ledger.begin("a")
        real = torch.zeros(1000)
        ledger.finish()
    assert sum(ledger.segments[0].peak) == 0
    assert real.sum() == 0


def test_products_and_what_lies_between_are_counted():
    ledger = Ledger()
    with ledger:
        ledger.begin("a")
        product = meta(8, 16) @ meta(16, 32)
        ledger.begin("b")
        summed = product + product
        ledger.finish()
    assert ledger.segments[0].work.linear_flops == 2 * 8 * 16 * 32
    assert ledger.segments[1].work.touched_bytes == 3 * 8 * 32 * 4
    assert ledger.segments[1].work.operators == 1
    assert summed.shape == (8, 32)


@pytest.mark.parametrize("kind", [DeviceKind("cpu"), DeviceKind("cuda", (8, 9))])
def test_whole_attention_on_meta_is_a_kernel_of_the_device(kind):
    q, k = meta(1, 4, 64, 16, requires_grad=True), meta(1, 2, 64, 16)
    ledger = Ledger()
    original = F.scaled_dot_product_attention
    with meta_stands_for(kind), fused_on_meta(), ledger:
        ledger.begin("a")
        k, v = (x.repeat_interleave(2, 1) for x in (k, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        ledger.begin("b")
        out.sum().backward()
        ledger.finish()
    pairs = 4 * 64 * 64 // 2
    assert ledger.segments[0].work.attention_flops == [2 * 2 * 16 * pairs, 0]
    assert ledger.segments[1].work.attention_flops == [0, 5 * 2 * 16 * pairs]
    assert max(size for size in ledger.segments[0].peak) < 4 * 64 * 64 * 4  # no matrix of scores
    assert F.scaled_dot_product_attention is original
    assert torch.equal(original(*[torch.ones(1, 1, 2, 4)] * 3), torch.ones(1, 1, 2, 4))


def test_every_counted_attention_is_an_operator():
    importlib.import_module("offload.ops.fused.operators")

    for name in OPERATORS:
        library, _, operator = name.partition("::")
        assert hasattr(getattr(torch.ops, library), operator), name


def test_what_meta_stands_for_ends_with_the_context():
    device = torch.device("meta")
    with meta_stands_for(DeviceKind("cuda", (8, 6))):
        assert (type_of(device), capability_of(device), is_planned()) == ("cuda", (8, 6), True)
        assert type_of(torch.device("cpu")) == "cpu"
    assert (type_of(device), is_planned()) == ("meta", False)


def test_a_copy_out_holds_its_source_until_the_store_is_next_called():
    ledger = Ledger()
    store = PaperStore(ledger)
    ledger.at_end = store.enter
    with meta_stands_for(DeviceKind("cpu")), ledger:
        ledger.begin("a")
        first = store.offload(meta(1024))
        ledger.begin("b")
        second = store.offload(meta(2048))
        ledger.begin("c")
        back = first.reload()
        ledger.begin("d")
        first.release()
        second.release()
        del back
        ledger.begin("e")
        ledger.finish()
    a, b, c, _, e = ledger.segments
    assert sum(a.end) == 4096  # the source, while its copy is under way
    assert sum(b.end) == 8192
    assert (a.out_bytes, b.out_bytes, c.back_bytes) == (4096, 8192, 4096)
    assert (a.host_bytes, b.host_bytes, e.host_bytes) == (4096, 12288, 0)
    assert e.host_peak == 0


def test_keeping_what_backward_needs_first_lets_finished_sources_go():
    ledger = Ledger()
    store = PaperStore(ledger)
    with meta_stands_for(DeviceKind("cpu")), ledger:
        ledger.begin("a")
        out = store.offload(meta(1024))
        ledger.begin("b")
        kept = store.keep(meta(16), in_order=True)
        ledger.begin("c")
        ledger.finish()
    assert sum(ledger.segments[0].end) == 4096
    assert sum(ledger.segments[1].end) == 64
    assert out.nbytes == 4096
    assert kept.tier == "device"


class TestShapeCache:
    OPERATORS = [
        lambda x: x + 1,
        lambda x: x + 1.5,
        lambda x: x + True,
        lambda x: (x > 0).sum(1),
        lambda x: x.t().contiguous(),
        lambda x: torch.nn.functional.silu(x.to(torch.bfloat16)),
        lambda x: torch.cat([x, x], 1),
        lambda x: x.topk(2, 1)[1],
        lambda x: x.mul_(2).relu_(),
        lambda x: x.expand(3, *x.shape).sum(0),
        lambda x: torch.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5)[0],
    ]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
    @pytest.mark.parametrize("operator", OPERATORS, ids=range(len(OPERATORS)))
    def test_what_is_remembered_is_what_torch_says(self, operator, dtype):
        def described(x):
            try:
                out = operator(x)
            except RuntimeError as error:
                return type(error)
            return out.shape, out.stride(), out.dtype

        expected = [described(meta(*shape, dtype=dtype)) for shape in ((4, 6), (4, 8))]
        with Ledger():
            for _ in range(2):
                found = [described(meta(*shape, dtype=dtype)) for shape in ((4, 6), (4, 8))]
                assert found == expected

    def test_results_are_never_shared(self):
        cache, add, x = ShapeCache(), torch.ops.aten.add.Tensor, meta(4)
        first, second = (cache.run(add, (x, x), {}) for _ in range(2))
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata

    def test_real_tensors_are_computed_each_time(self):
        cache, add = ShapeCache(), torch.ops.aten.add.Tensor
        for value in (1.0, 2.0):
            x = torch.tensor([value])
            assert cache.run(add, (x, x), {}).item() == 2 * value
