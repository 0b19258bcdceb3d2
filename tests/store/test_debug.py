"""Debug mode: bytes that changed on the way are noticed, and memory without valid bytes shows."""

import ctypes
import sys

import pytest
import torch

import offload
from offload import _native
from offload.errors import OffloadError, TicketPoisoned
from offload.store import engine
from tests.models import assert_same_step, blocks, on, twins

CPU = -1
SHAPES = {
    "dense": lambda: torch.randn(300, 50),
    "transposed": lambda: torch.randn(300, 50).T,
    "with holes": lambda: torch.randn(300, 50)[:, ::2],
    "a part": lambda: torch.randn(300, 50)[7:31],
    "expanded": lambda: torch.randn(50).expand(300, 50),
    "bfloat16": lambda: torch.randn(301, 51).bfloat16(),
    "packed": lambda: torch.randn(400, 400) > 0,
}


@pytest.fixture
def debugged(store):
    """The store in debug mode, for one test."""
    pytest.importorskip("xxhash")
    store.set_debug(True)
    yield store
    store.set_debug(False)


def overwrite(ticket, offset):
    """Changes one bit of what a ticket holds in the arena."""
    slot = _native.host_slot(ticket.native)
    address = slot.address + offset
    ctypes.c_ubyte.from_address(address).value ^= 1


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES.keys())
def test_what_is_not_changed_comes_back(debugged, make):
    tensor = make()
    ticket = debugged.offload(tensor)
    assert torch.equal(ticket.reload(), tensor)
    assert ticket.host_view().numel() == ticket.nbytes


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES.keys())
def test_one_changed_bit_is_noticed(debugged, make):
    ticket = debugged.offload(make())
    debugged.synchronize()
    overwrite(ticket, ticket.nbytes - 1)
    with pytest.raises(TicketPoisoned, match=f"expected the {ticket.nbytes:,} bytes that were"):
        ticket.host_view()
    with pytest.raises(TicketPoisoned, match="checksum"):
        ticket.reload()
    with pytest.raises(TicketPoisoned, match="checksum"):
        ticket.reload()


def test_one_changed_bit_of_an_encoded_tensor_is_noticed(debugged):
    tensor = torch.randn(64, 128)
    ticket = debugged.offload(tensor, codec="fp8")
    assert ticket.reload().sub(tensor).norm() < 0.1 * tensor.norm()
    overwrite(ticket, 0)
    with pytest.raises(TicketPoisoned, match="checksum"):
        ticket.reload()


def test_without_debug_mode_nothing_is_compared(store):
    tensor = torch.zeros(10)
    ticket = store.offload(tensor)
    store.synchronize()
    overwrite(ticket, 0)
    assert ticket.checksum is None
    assert not torch.equal(ticket.reload(), tensor)


def test_a_buffer_whose_copy_has_not_come_holds_nan(debugged):
    ticket = debugged.offload(torch.randn(1000))
    debugged.synchronize()
    held = _native.HostGate(CPU, _native.host_queues(CPU)[1])
    ticket.prefetch()
    try:
        assert ticket.prefetched.buffer.isnan().all()
    finally:
        held.open()
    assert not ticket.reload().isnan().any()


def test_a_slot_that_was_given_back_holds_nan(debugged):
    ticket = debugged.offload(torch.randn(1000))
    debugged.synchronize()
    address = _native.host_slot(ticket.native).address
    values = (ctypes.c_float * 1000).from_address(address)
    assert values[999] == values[999]
    ticket.release()
    _native.arena_statistics()  # takes note of what went free
    assert all(value != value for value in values)


@pytest.mark.parametrize("mode", ["tiled", "checkpoint"])
def test_a_step_in_debug_mode_is_bit_equal(debugged, mode):
    options = {"mode": mode, "tile_tokens": 16, "min_bytes": 0}
    stack = blocks(4)
    offload.wrap(stack, policy=offload.Policy(tier="device", **options))
    _, checked = twins(stack, offload.Policy(tier="host", debug=True, **options))
    assert_same_step(stack, checked, on(torch.randn(2, 63, 32)), steps=2)


def test_the_missing_package_is_named(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OffloadError, match="pip install xxhash"):
        offload.wrap(blocks(2), policy=offload.Policy(debug=True))
    assert engine.cap_reason() is not None
