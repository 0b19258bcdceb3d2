"""Tickets beyond the host arena: on the disk and back, and nothing left there afterwards."""

import gc
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import offload
from offload import _native
from offload.errors import ArenaFull, OffloadError
from offload.store import default_store, engine
from tests.conftest import settle
from tests.models import Stack, assert_same_step, blocks, on, twins

CAP = 64 << 20
TENSOR = 8 << 20  # bytes; eight fill the arena


@pytest.fixture
def disk(store, tmp_path):
    """An arena of one step over an empty directory, for one test."""
    former = _native.arena_statistics().cap_bytes if _native.started() else 1 << 30
    store.trim()
    engine.set_host_cap(CAP)
    engine.set_disk(str(tmp_path), 1 << 30)
    yield tmp_path
    settle(store)
    assert list(tmp_path.iterdir()) == []
    engine.end_disk()
    engine.set_host_cap(former)


class Scale(nn.Module):
    """A layer that costs next to nothing, for large inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((512,), 0.5))

    def forward(self, hidden):
        return hidden + self.weight * hidden


def numbered(count):
    return [torch.full((TENSOR // 4,), float(number)) for number in range(count)]


def stored(store, tensors):
    """Tickets of tensors, once all copies have arrived."""
    tickets = []
    for tensor in tensors:
        tickets.append(store.offload(tensor))
        store.synchronize()
    return tickets


def test_what_the_arena_cannot_hold_comes_back_from_the_disk(store, disk):
    tickets = stored(store, numbered(20))
    assert tickets[0].tier == "disk"
    assert tickets[-1].tier == "host"
    assert _native.arena_statistics().committed_bytes == CAP
    for number in reversed(range(20)):
        assert torch.equal(tickets[number].reload(), torch.full((TENSOR // 4,), float(number)))
        del tickets[number]
    settle(store)
    assert _native.disk_statistics().live_bytes == 0


def test_a_host_view_of_a_ticket_on_the_disk(store, disk):
    tickets = stored(store, numbered(12))
    assert tickets[1].tier == "disk"
    assert tickets[1].host_view().view(torch.float32).unique().tolist() == [1.0]


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(
        [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    ),
    shape=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    change=st.sampled_from(
        [
            lambda tensor: tensor,
            lambda tensor: tensor.transpose(0, -1),
            lambda tensor: tensor[..., ::2],
            lambda tensor: tensor.unsqueeze(0).expand(3, *tensor.shape),
            lambda tensor: tensor[1:],
            lambda tensor: tensor.sum(),
        ]
    ),
)
def check_round_trip(dtype, shape, change):
    store = default_store()
    tensor = change(torch.randint(0, 100, shape).to(dtype))
    ticket = store.offload(tensor, leaves=True)
    store.synchronize()
    back = ticket.reload()
    assert torch.equal(back, tensor)
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


def test_every_dtype_stride_and_size_comes_back_bit_for_bit(store, disk):
    before = _native.residency_statistics().fetched_tickets
    check_round_trip()
    assert _native.residency_statistics().fetched_tickets > before


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("mode", ["tiled", "checkpoint"])
def test_a_step_over_the_disk_is_bit_equal_to_one_without(store, disk, tier, mode):
    options = {"mode": mode, "tile_tokens": 4096, "min_bytes": 0}
    policy = offload.Policy(tier=tier, disk=disk, disk_bytes="1GiB", host_bytes=CAP, **options)
    stack = Stack([Scale() for _ in range(7)])
    offload.wrap(stack, policy=offload.Policy(tier="device", **options))
    _, spilled = twins(stack, policy)
    assert_same_step(stack, spilled, on(torch.randn(1, 8192, 512)), steps=2)  # 16 MiB a layer
    report = offload.report(spilled)
    assert report.disk.live_bytes == 0
    assert report.written_bytes_per_step > 0
    assert "written a step" in str(report)


def test_with_tier_disk_the_host_is_only_passed_through(store, disk):
    tickets = [store.offload(tensor, leaves=True) for tensor in numbered(4)]
    store.synchronize()
    while any(ticket.tier == "host" for ticket in tickets):
        store.retire()
    store.retire()
    assert _native.arena_statistics().live_bytes == 0
    assert [ticket.reload()[0].item() for ticket in tickets] == [0.0, 1.0, 2.0, 3.0]


def test_a_full_disk_fails_the_step_and_the_next_one_works(store, disk):
    engine.set_disk(str(disk), 2 * TENSOR)
    with pytest.raises(ArenaFull, match=f"(?s)host arena.*{disk}"):
        stored(store, numbered(20))
    gc.collect()
    tickets = stored(store, numbered(9))
    assert tickets[0].reload()[0].item() == 0.0


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_directory_that_is_none_is_named(store, tmp_path, kind):
    path = tmp_path / kind
    if kind == "file":
        path.write_text("")
    policy = offload.Policy(disk=path)
    with pytest.raises(OffloadError, match=str(path)):
        offload.wrap(blocks(2), policy=policy)


def test_the_directory_cannot_change_under_tickets(store, disk, tmp_path_factory):
    tickets = stored(store, numbered(12))
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(OffloadError, match="while it is changed"):
        engine.set_disk(str(other), 1 << 30)
    assert tickets[0].reload()[0].item() == 0.0


TRAINING = """
    import sys, torch, offload
    from offload import _native
    from tests.models import Stack
    from tests.store.test_disk import Scale
    stack = Stack([Scale() for _ in range(9)])
    policy = offload.Policy(
        tier="host", disk=sys.argv[1], host_bytes="64MiB", min_bytes=0, tile_tokens=4096
    )
    offload.wrap(stack, policy=policy)
    loss = stack(torch.randn(1, 8192, 512)).sum()
    assert _native.disk_statistics().live_bytes > 0
    print("in the middle", flush=True)
"""


def run_training(directory, then):
    code = textwrap.dedent(TRAINING) + then
    command = [sys.executable, "-c", code, str(directory)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_that_is_killed_in_a_step_leaves_nothing(tmp_path):
    shared = set(os.listdir("/dev/shm"))
    child = run_training(tmp_path, "sys.stdin.read()")
    assert child.stdout.readline() == "in the middle\n", child.communicate()[1]
    assert list(tmp_path.iterdir()) == []
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared


def test_an_exit_with_tickets_on_the_disk_and_transfers_under_way_is_clean(tmp_path):
    child = run_training(tmp_path, "")
    _, errors = child.communicate(timeout=200)
    assert child.returncode == 0, errors
    assert errors == ""
    assert list(tmp_path.iterdir()) == []
