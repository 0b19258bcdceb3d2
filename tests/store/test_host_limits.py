"""The arena under real and injected limits, each in a process of its own."""

import re

import pytest

from tests.test_native import run_python

SETUP = """
import resource, warnings
import torch, offload
from offload import _native
from offload.store import default_store, engine
from tests.models import assert_same_step, blocks
warnings.simplefilter("always")
store = default_store()
MIB = 1 << 20

def limit(which, extra_bytes):
    used = {"AS": "VmSize", "DATA": "VmData"}[which]
    with open("/proc/self/status") as lines:
        status = dict(line.split(":", 1) for line in lines)
    nbytes = int(status[used].split()[0]) * 1024 + extra_bytes
    resource.setrlimit(getattr(resource, "RLIMIT_" + which), (nbytes, nbytes))

def a_slot(nbytes):
    return store.offload(torch.full((nbytes,), 7, dtype=torch.uint8))

def cap_line():
    return next(l for l in str(offload.report(blocks(1))).splitlines() if "cap " in l)
"""


def run(code: str) -> str:
    done = run_python(SETUP + code)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("which", "letter"), [("AS", "v"), ("DATA", "d")])
def test_under_ulimit_the_arena_takes_what_fits_and_says_so(which, letter):
    printed = run(
        f"limit({which!r}, 1024 * MIB)\n"
        "ticket = a_slot(10 * MIB)\n"
        "assert ticket.tier == 'host' and int(ticket.reload()[-1]) == 7\n"
        "assert 64 * MIB < _native.arena_statistics().cap_bytes <= 0.7 * 1024 * MIB\n"
        "print(cap_line())\n"
    )
    assert re.search(rf"cap \d+\.\d MiB \(70 % of the .*`ulimit -{letter}`\) leaves\)", printed)


def test_a_named_cap_that_cannot_be_reserved_is_lowered_and_says_so():
    printed = run(
        "limit('AS', 1024 * MIB)\n"
        "engine.set_host_cap(2 << 30)\n"
        "assert int(a_slot(MIB).reload()[0]) == 7\n"
        "engine.set_host_cap(1 << 30)\n"
        "print(cap_line())\n"
    )
    assert "`ulimit -v`) leaves, where Policy.host_bytes asks for 1.0 GiB)" in printed


def test_too_little_for_one_step_is_an_error_that_names_the_limit():
    printed = run(
        "limit('AS', 80 * MIB)\n"
        "try: a_slot(MIB)\n"
        "except offload.OffloadError as error: print(error)\n"
    )
    assert "expected 64.0 MiB of host memory or more" in printed
    assert "`ulimit -v`" in printed
    assert "Policy(tier='device')" in printed


def test_a_limit_met_after_the_cap_was_set_is_an_error_and_the_arena_goes_on():
    printed = run(
        "engine.set_host_cap(1 << 30)\n"
        "first = a_slot(MIB)\n"
        "limit('DATA', 150 * MIB)\n"
        "source = torch.full((96 * MIB,), 7, dtype=torch.uint8)\n"
        "try: store.offload(source)\n"
        "except offload.OffloadError as error: print(error)\n"
        "assert _native.arena_statistics().committed_bytes == 64 * MIB\n"
        "assert int(a_slot(MIB).reload()[0]) == int(first.reload()[0]) == 7\n"
    )
    assert "more bytes of host memory" in printed
    assert "`ulimit -d`" in printed


def test_pinning_refused_above_a_size_keeps_what_lies_below_it_and_warns_once():
    printed = run(
        "_native.host_refuse_pinning(-1, 'out of memory', 150 * MIB)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    engine.request_pinning(torch.device('cpu'))\n"
        "    tickets = [a_slot(50 * MIB) for _ in range(5)]\n"
        "    assert all(int(ticket.reload()[-1]) == 7 for ticket in tickets)\n"
        "    store.synchronize()\n"
        "    store.retire()\n"
        "arena = _native.arena_statistics()\n"
        "assert (arena.pinned_bytes, arena.committed_bytes) == (128 * MIB, 256 * MIB)\n"
        "assert len(caught) == 1\n"
        "print(caught[0].message)\n"
        "print(offload.report(blocks(1)))\n"
        "print(offload.report(blocks(1)).to_dict()['arena']['pin_refusal'])\n"
    )
    warning, *_, line, field = printed.splitlines()
    reason = "out of memory (asked for 64.0 MiB beyond 128.0 MiB page-locked; limits here: "
    assert warning.startswith(f"offload: pinned host memory was refused: {reason}")
    assert "Policy.host_bytes of at most 128.0 MiB" in warning
    assert line.startswith(f"host arena: pageable: {reason}")
    assert field.startswith(reason)


def test_training_with_refused_pinning_gives_the_same_gradients():
    run(
        "def loss_of(model): return model(torch.ones(2, 63, 32)).pow(2).mean()\n"
        "_native.host_refuse_pinning(-1, 'refused')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    engine.request_pinning(torch.device('cpu'))\n"
        "    policy = offload.Policy(mode='checkpoint', tier='host', min_bytes=0)\n"
        "    model = offload.wrap(blocks(4), policy=policy)\n"
        "    assert_same_step(blocks(4), model, loss_of)\n"
        "assert len([w for w in caught if 'pinned host memory' in str(w.message)]) == 1\n"
        "assert offload.report(model).moved_bytes > 0\n"
    )


def test_twenty_rounds_of_the_same_pattern_take_no_more_memory_than_the_first():
    run(
        "engine.request_pinning(torch.device('cpu'))\n"
        "def regions(begin, end):\n"
        "    starts = [int(line.split('-')[0], 16) for line in open('/proc/self/maps')]\n"
        "    return sum(begin <= start < end for start in starts)\n"
        "def round_of(sizes):\n"
        "    tickets = [a_slot(size) for size in sizes]\n"
        "    addresses = [ticket.host_view().data_ptr() for ticket in tickets]\n"
        "    for ticket in reversed(tickets): ticket.reload(); ticket.release()\n"
        "    store.synchronize(); store.retire()\n"
        "    arena = _native.arena_statistics()\n"
        "    return (arena.committed_bytes, arena.pinned_bytes, arena.peak_committed_bytes,\n"
        "            regions(min(addresses), min(addresses) + (1 << 30)))\n"
        "sizes = [70_000 * 3_072 * 2 // 64] * 16\n"
        "first = round_of(sizes)\n"
        "assert first[0] - sum(sizes) < 64 * MIB and first[3] > 0\n"
        "assert {round_of(sizes) for _ in range(20)} == {first}\n"
    )
