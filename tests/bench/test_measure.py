"""The storage tracker against allocations whose bytes are known."""

import gc
import mmap
import threading

import pytest
import torch

from bench.measure import (
    MemoryLimitExceeded,
    StorageTracker,
    pair_ratios,
    read_peak_rss,
    reduce_series,
    reset_peak_rss,
    summarize_times,
)

KIB = 1024


def test_a_new_tensor_counts_until_it_is_freed():
    with StorageTracker() as tracker:
        x = torch.empty(63, 1000)
        assert tracker.live_bytes == 63 * 1000 * 4
        del x
        assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 63 * 1000 * 4


def test_views_of_one_storage_count_once_and_keep_it_alive():
    with StorageTracker() as tracker:
        x = torch.empty(256, KIB, dtype=torch.uint8)
        views = [x[3:5], x.t(), x.view(-1), x.expand(2, 256, KIB)]
        assert tracker.live_bytes == 256 * KIB
        del x
        assert tracker.live_bytes == 256 * KIB
        del views
        assert tracker.live_bytes == 0


def test_in_place_and_out_ops_add_nothing():
    with StorageTracker() as tracker:
        x = torch.zeros(KIB)
        y = torch.ones(KIB)
        x.add_(1).mul_(2)
        torch.add(x, x, out=y)
        assert tracker.live_bytes == tracker.peak_bytes == 2 * 4 * KIB


def test_a_resized_storage_counts_its_new_size():
    with StorageTracker() as tracker:
        x = torch.zeros(KIB)
        x.resize_(3 * KIB)
        assert tracker.live_bytes == 3 * 4 * KIB


def test_a_recycled_address_is_a_new_storage():
    with StorageTracker() as tracker:
        for _ in range(50):
            x = torch.empty(KIB)
            assert tracker.live_bytes == 4 * KIB
            del x
            assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 4 * KIB


def test_tensors_saved_for_backward_count_until_backward_frees_them():
    x = torch.ones(KIB, requires_grad=True)
    with StorageTracker() as tracker:
        loss = x.mul(2).exp().sum()  # exp saves its output: 4 KiB that only the graph holds
        assert tracker.live_bytes == 4 * KIB + 4
        loss.backward()
        del loss
        assert tracker.live_bytes == 4 * KIB  # x.grad


def test_temporaries_of_backward_are_counted():
    x = torch.ones(KIB, requires_grad=True)

    class Scratch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, d_out):
            scratch = torch.empty(64 * KIB)
            scratch[0] = d_out
            return scratch[:1].expand(KIB).contiguous()

    loss = Scratch.apply(x)
    with StorageTracker() as tracker:
        loss.backward()
    assert tracker.peak_bytes >= 64 * KIB * 4
    assert tracker.peak_bytes <= 64 * KIB * 4 + 2 * 4 * KIB + 8
    assert tracker.live_bytes == 4 * KIB


def test_weights_that_lived_before_are_the_baseline():
    model = torch.nn.Linear(64, 64)
    tied = model.weight.t()
    tracker = StorageTracker()
    assert tracker.watch([*model.parameters(), tied]) == (64 * 64 + 64) * 4
    with tracker:
        out = model(torch.ones(1, 64)) * model.weight.sum()
        del out
        gc.collect()
    assert tracker.live_bytes == (64 * 64 + 64) * 4


def test_a_gradient_is_activation_until_it_is_in_grad():
    weight = torch.nn.Parameter(torch.ones(KIB))
    tracker = StorageTracker()
    tracker.watch([weight])
    tracker.follow_gradients([weight])
    with tracker:
        loss = weight.exp().sum()  # exp's output of 4 KiB is saved
        loss.backward()
        # exp's output, the loss, the 1 that backward starts from, and the gradient on its way
        assert tracker.peak_activation_bytes == 4 * KIB + 4 + 4 + 4 * KIB
        assert tracker.activation_bytes == 4  # the loss
        assert tracker.live_bytes == 2 * 4 * KIB + 4
        weight.grad = None
        assert tracker.live_bytes == 4 * KIB + 4
        assert tracker.activation_bytes == 4


def test_the_gradient_of_a_shared_weight_is_activation_while_it_waits_for_the_other_use():
    weight = torch.nn.Parameter(torch.ones(KIB))
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d_out):
            seen.append(tracker.activation_bytes)
            return d_out

    tracker = StorageTracker()
    tracker.watch([weight])
    tracker.follow_gradients([weight])
    early = Probe.apply(weight)
    loss = early.sum() + (early.detach() * weight).sum()
    with tracker:
        loss.backward()  # the later product is differentiated first
    assert seen[0] >= 4 * KIB
    assert tracker.activation_bytes == 0


def test_gradients_from_before_are_no_activations():
    weight = torch.nn.Parameter(torch.ones(KIB))
    weight.grad = torch.ones(KIB)
    tracker = StorageTracker()
    tracker.watch([weight])
    tracker.follow_gradients([weight])
    assert tracker.live_bytes == 2 * 4 * KIB
    assert tracker.activation_bytes == tracker.peak_activation_bytes == 0
    with tracker:
        (weight * 2).sum().backward()
    assert tracker.activation_bytes == 0
    assert tracker.live_bytes == 2 * 4 * KIB
    assert tracker.peak_activation_bytes >= 4 * KIB  # what is about to be added


def test_weights_that_need_no_gradient_are_followed_without_a_hook():
    frozen = torch.nn.Parameter(torch.ones(KIB), requires_grad=False)
    StorageTracker().follow_gradients([frozen])
    assert not frozen._post_accumulate_grad_hooks


def test_the_hooks_on_parameters_go_with_the_tracker():
    weight = torch.nn.Parameter(torch.ones(KIB))
    tracker = StorageTracker()
    tracker.follow_gradients([weight])
    assert len(weight._post_accumulate_grad_hooks) == 1
    with tracker:
        pass
    assert not weight._post_accumulate_grad_hooks


def test_memory_that_torch_did_not_allocate_is_left_out():
    arena = bytearray(64 * KIB)
    host = torch.frombuffer(arena, dtype=torch.uint8)
    with StorageTracker() as tracker:
        window = host[: 4 * KIB].view(torch.float32)
        window.copy_(torch.ones(KIB))
        assert tracker.live_bytes == 0
        assert tracker.peak_bytes == 4 * KIB  # the ones


def test_meta_tensors_do_not_count():
    with StorageTracker() as tracker:
        torch.empty(KIB, device="meta")
    assert tracker.peak_bytes == 0


def test_the_limit_stops_the_op_that_passes_it_and_frees_its_output():
    with StorageTracker(limit_bytes=8 * KIB) as tracker:
        x = torch.empty(KIB)
        y = torch.empty(KIB)
        with pytest.raises(
            MemoryLimitExceeded, match="expected at most 8192 live bytes, got 12288"
        ):
            torch.empty(KIB)
        gc.collect()
        assert tracker.live_bytes == 8 * KIB
        del x, y


def test_the_limit_also_stops_backward():
    x = torch.ones(KIB, requires_grad=True)
    loss = x.mul(2).exp().sum()
    with StorageTracker(limit_bytes=KIB), pytest.raises(MemoryLimitExceeded):
        loss.backward()


def test_storages_freed_on_another_thread_leave():
    with StorageTracker() as tracker:
        box = [torch.empty(KIB)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert tracker.live_bytes == 0


def test_the_curve_keeps_its_peak_when_thinned():
    series = [(i / 1000, 7_000 if i == 4321 else i % 10) for i in range(10_000)]
    thinned = reduce_series(series, points=50)
    assert len(thinned) <= 50
    assert max(size for _, size in thinned) == 7_000
    assert reduce_series([]) == []


def test_peak_rss_can_be_reset_between_steps():
    if not reset_peak_rss():
        pytest.skip("this system cannot reset the high-water mark")
    before = read_peak_rss()
    with mmap.mmap(-1, 64 * 2**20) as fresh:  # malloc may reuse memory that is resident already
        torch.frombuffer(fresh, dtype=torch.uint8).fill_(1)
    assert read_peak_rss() >= before + 60 * 2**20
    assert reset_peak_rss()
    assert read_peak_rss() < before + 60 * 2**20


def test_times_are_summed_up_by_their_median():
    times = [{"seconds": s, "processor_seconds": 2 * s} for s in (1.0, 9.0, 2.0)]
    figures = summarize_times(times)
    assert figures["step_seconds"] == [1.0, 9.0, 2.0]
    assert (figures["step_min_s"], figures["step_s"], figures["step_max_s"]) == (1.0, 2.0, 9.0)
    assert figures["step_processor_s"] == 4.0


def test_ratios_are_of_the_same_round():
    # By medians the first is twice as fast; round by round it is twice, thrice, half as slow.
    assert pair_ratios([2.0, 30.0, 5.0], [1.0, 10.0, 10.0]) == {
        "median": 2.0,
        "min": 0.5,
        "max": 3.0,
    }
