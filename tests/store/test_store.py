"""The store on the host device, where gates hold the copies' worker threads."""

import gc
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch

import offload
from offload import _native
from offload.errors import ArenaFull, OffloadError, TicketPoisoned
from offload.store import engine
from offload.store import store as store_module
from offload.store.statistics import Record
from offload.store.ticket import version_of

CPU = -1


@contextmanager
def gate(stream):
    """Holds a host stream until the block ends or `open` is called."""
    held = _native.HostGate(CPU, stream)
    try:
        yield held
    finally:
        held.open()


@pytest.fixture
def queues(store):
    """The engine's (D2H, H2D) streams of the CPU."""
    store.offload(torch.ones(1)).reload()
    return _native.host_queues(CPU)


def test_a_reload_equals_what_was_offloaded(store):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.randint(0, 2, (33, 65)).to(dtype)
        ticket = store.offload(tensor)
        assert ticket.tier == "host"
        assert torch.equal(ticket.reload(), tensor)
        assert ticket.reload().data_ptr() != tensor.data_ptr()


def test_a_ticket_can_be_reloaded_many_times(store):
    tensor = torch.randn(1000)
    ticket = store.offload(tensor)
    copies = [ticket.reload() for _ in range(5)]
    assert all(torch.equal(copy, tensor) for copy in copies)
    assert len({copy.data_ptr() for copy in copies}) == 5


def test_the_source_stays_alive_until_its_copy_is_done(store, queues):
    tensor = torch.full((1 << 16,), 3.0)
    alive = weakref.ref(tensor.untyped_storage())
    with gate(queues[0]) as held:
        ticket = store.offload(tensor)
        del tensor
        gc.collect()
        assert alive() is not None
        assert store.held_bytes() == 4 << 16
        held.open()
        assert torch.equal(ticket.reload(), torch.full((1 << 16,), 3.0))
    store.synchronize()
    assert alive() is None


def test_reload_waits_for_its_own_offload(store, queues):
    tensor = torch.full((1 << 16,), 3.0)
    with gate(queues[0]) as held:
        ticket = store.offload(tensor)
        result = []
        thread = threading.Thread(target=lambda: result.append(ticket.reload()))
        thread.start()
        while not ticket.prefetched and not result and not store._buffers:
            pass  # until the reload is queued behind the offload
        assert not result
        held.open()
        thread.join()
    assert torch.equal(result[0], tensor)


def test_a_dropped_prefetch_stays_alive_until_its_copy_is_done(store, queues):
    ticket = store.offload(torch.randn(1 << 16))
    store.synchronize()
    with gate(queues[1]):
        ticket.prefetch()
        buffer = weakref.ref(ticket.prefetched.buffer.untyped_storage())
        ticket.release()
        del ticket
        gc.collect()
        store.retire()
        assert buffer() is not None
    store.synchronize()
    assert buffer() is None


def test_a_prefetched_buffer_is_not_handed_to_another_stream(store, queues, monkeypatch):
    tensor = torch.randn(1000)
    ticket = store.offload(tensor)
    first, second = _native.host_create_stream(CPU), _native.host_create_stream(CPU)
    try:
        monkeypatch.setattr(engine, "compute_stream", lambda device: first)
        ticket.prefetch()
        prefetched = ticket.prefetched.buffer
        monkeypatch.setattr(engine, "compute_stream", lambda device: second)
        reloaded = ticket.reload()
        store.synchronize()
        assert reloaded.data_ptr() != prefetched.data_ptr()
        assert torch.equal(reloaded, tensor)
        ticket.prefetch()
        expected = ticket.prefetched.buffer.data_ptr()
        again = ticket.reload()  # held: host memory, unlike a card's, is not freed in stream order
        assert again.data_ptr() == expected
    finally:
        store.synchronize()
        _native.host_destroy_stream(CPU, first)
        _native.host_destroy_stream(CPU, second)


def test_a_change_in_place_during_the_copy_poisons_the_ticket(store, queues):
    tensor = torch.zeros(1 << 16)
    with gate(queues[0]):
        ticket = store.offload(tensor)
        tensor.add_(1)
        with pytest.raises(TicketPoisoned, match="modified in place"):
            ticket.reload()
    store.synchronize()
    with pytest.raises(TicketPoisoned, match=r"\(65536,\).*Clone it"):
        ticket.reload()


def test_a_change_in_place_after_the_copy_is_harmless(store):
    tensor = torch.zeros(1000)
    ticket = store.offload(tensor)
    store.synchronize()
    tensor.add_(1)
    assert torch.equal(ticket.reload(), torch.zeros(1000))


def test_a_kept_tensor_that_was_changed_raises(store):
    tensor = torch.zeros(10)
    ticket = store.keep(tensor)
    assert ticket.tier == "device"
    assert ticket.reload() is tensor
    tensor.add_(1)
    with pytest.raises(TicketPoisoned, match="modified in place"):
        ticket.reload()


def test_a_gathered_view_may_be_changed_while_it_is_copied(store, queues):
    tensor = torch.zeros(8, 1 << 12)
    with gate(queues[0]):
        ticket = store.offload(tensor[:, ::2])
        tensor.add_(1)
    assert torch.equal(ticket.reload(), torch.zeros(8, 1 << 11))


@pytest.mark.parametrize("direction", ["offload", "reload"])
def test_a_failed_copy_poisons_its_ticket_not_the_engine(store, queues, direction):
    tensor = torch.randn(1000)
    if direction == "offload":
        _native.host_fail_next_copies(CPU, 1)
        ticket = store.offload(tensor)
    else:
        ticket = store.offload(tensor)
        store.synchronize()
        _native.host_fail_next_copies(CPU, 1)
    with pytest.raises(TicketPoisoned):
        ticket.reload()
    with pytest.raises(TicketPoisoned):
        ticket.reload()
    assert torch.equal(store.offload(tensor.clone()).reload(), tensor)


def test_a_failed_prefetch_shows_at_the_reload(store, queues):
    first = store.offload(torch.randn(1000))
    store.synchronize()
    _native.host_fail_next_copies(CPU, 1)
    first.prefetch()
    with pytest.raises(TicketPoisoned):
        first.reload()


def test_reloading_a_ticket_prefetches_those_stored_before_it(store):
    tickets = [store.offload(torch.randn(1000)) for _ in range(4)]
    tickets[3].reload()
    assert [t.prefetched is not None for t in tickets] == [True, True, True, False]
    for ticket in reversed(tickets):
        ticket.reload()
    assert all(t.prefetched is None for t in tickets)


def test_prefetching_is_bounded_by_bytes_but_one_ticket_is_always_ahead(store, monkeypatch):
    tickets = [store.offload(torch.randn(1000)) for _ in range(6)]
    monkeypatch.setattr(store_module, "PREFETCH_BYTES", 8000)
    tickets[5].reload()
    assert [t.prefetched is not None for t in tickets] == [False] * 3 + [True] * 2 + [False]
    tickets = [store.offload(torch.randn(1000)) for _ in range(3)]
    monkeypatch.setattr(store_module, "PREFETCH_BYTES", 0)
    gc.collect()
    tickets[2].reload()
    assert [t.prefetched is not None for t in tickets] == [False, True, False]


def test_the_order_chain_keeps_no_ticket_alive(store):
    first = store.offload(torch.randn(1000))
    second = store.offload(torch.randn(1000))
    gone = weakref.ref(first)
    del first
    assert gone() is None
    assert second.reload().shape == (1000,)


def test_identical_views_share_a_ticket_and_differing_views_do_not(store):
    matrix = torch.randn(64, 64)
    ticket = store.offload(matrix)
    assert store.offload(matrix.view(64, 64)) is ticket
    transposed = store.offload(matrix.t())
    assert transposed is not ticket
    assert torch.equal(transposed.reload(), matrix.t())
    matrix.add_(1)
    store.synchronize()
    changed = store.offload(matrix)
    assert changed is not ticket
    assert torch.equal(changed.reload(), matrix)


def test_a_released_ticket_is_not_shared(store):
    tensor = torch.randn(1000)
    first = store.offload(tensor)
    first.release()
    second = store.offload(tensor)
    assert torch.equal(second.reload(), tensor)
    with pytest.raises(OffloadError, match="released"):
        first.reload()


def test_an_empty_tensor_is_kept(store):
    ticket = store.offload(torch.empty(3, 0))
    assert ticket.tier == "device"
    assert ticket.reload().shape == (3, 0)


def test_a_small_view_frees_its_large_base(store):
    base = torch.randn(1 << 24)
    alive = weakref.ref(base.untyped_storage())
    ticket = store.offload(base[5:9])
    expected = base[5:9].clone()
    store.synchronize()
    del base
    assert alive() is None
    assert ticket.nbytes == 16
    assert torch.equal(ticket.reload(), expected)


def test_a_host_view_outlives_its_ticket_and_blocks_reuse_of_the_slot(store):
    tensor = torch.arange(4096, dtype=torch.int32)
    ticket = store.offload(tensor)
    view = ticket.host_view()
    address = view.data_ptr()
    del ticket
    store.synchronize()
    others = [store.offload(torch.zeros(4096, dtype=torch.int32)) for _ in range(4)]
    store.synchronize()
    assert all(_native.host_slot(other.native).address != address for other in others)
    assert torch.equal(view.view(torch.int32), tensor)
    del view, others


def test_a_full_arena_raises_with_numbers_and_the_setting(store):
    cap = _native.arena_statistics().cap_bytes if _native.started() else None
    store.trim()
    engine.set_host_cap(64 << 20)
    try:
        held = store.offload(torch.zeros(48 << 20, dtype=torch.uint8))
        with pytest.raises(ArenaFull, match=r"33,554,432 bytes.*Policy\.host_bytes") as caught:
            store.offload(torch.zeros(32 << 20, dtype=torch.uint8))
        assert caught.value.asked_bytes == 32 << 20
        assert caught.value.free_bytes == 16 << 20
        assert caught.value.cap_bytes == 64 << 20
        del held
        assert store.offload(torch.ones(32 << 20, dtype=torch.uint8)).reload().all()
    finally:
        engine.set_host_cap(cap or (1 << 30))


def test_lowering_the_cap_below_what_is_in_use_is_an_error(store):
    held = store.offload(torch.zeros(1000))
    cap = _native.arena_statistics().cap_bytes
    with pytest.raises(OffloadError):
        engine.set_host_cap(4096)
    assert _native.arena_statistics().cap_bytes == cap
    assert held.reload().shape == (1000,)


def test_bytes_in_flight_are_bounded(store, queues):
    _native.set_max_in_flight_bytes(0)
    try:
        with gate(queues[0]) as held:
            first = store.offload(torch.zeros(1 << 16))
            second: list[object] = []
            thread = threading.Thread(
                target=lambda: second.append(store.offload(torch.ones(1 << 16)))
            )
            thread.start()
            thread.join(timeout=0.2)
            assert not second  # back-pressure: it waits for the first copy
            held.open()
            thread.join()
        assert first.reload().sum() == 0
        assert second[0].reload().sum() == 1 << 16
    finally:
        _native.set_max_in_flight_bytes(128 << 20)


def test_refused_pinning_falls_back_to_pageable_memory_with_one_warning(store):
    store.trim()
    _native.host_refuse_pinning(CPU, "the memlock limit is 64 KiB")
    try:
        with pytest.warns(UserWarning, match=r"pinned host memory.*64 KiB") as caught:  # noqa: PT031
            engine.request_pinning(torch.device("cpu"))
            tickets = [store.offload(torch.full((1000,), float(i))) for i in range(5)]
            assert [int(t.reload()[0]) for t in tickets] == list(range(5))
        assert len(caught) == 1
        assert _native.arena_statistics().pinned_bytes == 0
    finally:
        _native.host_refuse_pinning(CPU, "")
        engine._pinning.update(requested=False, warned=False)


def test_a_record_counts_bytes_and_times(store):
    record = Record("layer")
    ticket = store.offload(torch.randn(1 << 20), record)
    kept = store.keep(torch.randn(10), record)
    assert (record.offloaded_tensors, record.offloaded_bytes) == (1, 4 << 20)
    assert (record.kept_tensors, record.kept_bytes) == (1, 40)
    assert record.live_bytes("host") == 4 << 20
    ticket.reload()
    store.synchronize()
    assert record.reloaded_bytes == 4 << 20
    assert record.d2h_ms > 0
    assert record.h2d_ms > 0
    del ticket, kept
    assert record.live_bytes("host") == record.live_bytes("device") == 0


def test_tickets_can_be_dropped_on_any_thread(store):
    tickets = [store.offload(torch.randn(1 << 14)) for _ in range(100)]
    threads = [threading.Thread(target=tickets[i::4].clear) for i in range(4)]
    threads += [threading.Thread(target=gc.collect)]
    for thread in threads:
        thread.start()
    more = [store.offload(torch.full((1 << 14,), float(i))) for i in range(100)]
    for thread in threads:
        thread.join()
    assert [int(t.reload()[-1]) for t in more] == list(range(100))


def test_four_threads_share_the_store(store):
    errors = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            tensors = [torch.randn(1 << 12, generator=generator) for _ in range(4)]
            tickets = [store.offload(tensor) for tensor in tensors]
            for ticket, tensor in zip(reversed(tickets), reversed(tensors), strict=True):
                if not torch.equal(ticket.reload(), tensor):
                    errors.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_thousand_tensors_of_mixed_size_leave_no_leak(store):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 1 << 18, (1000,), generator=generator).tolist()
    live = []
    for index, size in enumerate(sizes):
        live.append((store.offload(torch.full((size,), index, dtype=torch.int32)), index))
        if index % 3 == 0:
            ticket, value = live.pop(index * 7 % len(live))
            assert int(ticket.reload()[-1]) == value
    wasted = _native.arena_statistics().live_bytes - sum(t.nbytes for t, _ in live)
    assert wasted <= 4096 * len(live)
    live.clear()
    del ticket
    store.synchronize()
    assert _native.arena_statistics().live_bytes == 0


def test_trim_gives_the_memory_back(store):
    store.offload(torch.zeros(80 << 20, dtype=torch.uint8)).reload()
    assert _native.arena_statistics().committed_bytes >= 80 << 20
    store.trim()
    assert _native.arena_statistics().committed_bytes == 0


def test_inference_tensors_have_no_version(store):
    with torch.inference_mode():
        tensor = torch.ones(1000)
    assert version_of(tensor) is None
    assert torch.equal(store.offload(tensor).reload(), tensor)


def test_errors_are_public():
    assert issubclass(offload.ArenaFull, offload.OffloadError)


def test_a_graph_that_is_kept_does_not_switch_prefetching_off(store, monkeypatch):
    monkeypatch.setattr(store_module, "PREFETCH_BYTES", 8000)
    kept = [store.offload(torch.randn(1000)) for _ in range(4)]
    for _ in range(3):
        store.begin_order()
        tickets = [store.offload(torch.randn(1000)) for _ in range(4)]
        tickets[0].reload()
        assert kept[3].prefetched is None
        tickets[3].reload()
        assert tickets[2].prefetched is not None
