"""The compiled module: what it links, what it refuses, how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import offload
from offload import _native
from offload._source_hash import source_hash

MODULE = Path(sys.modules["offload._C"].__file__)
CHECKOUT = Path(__file__).parents[1]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)} | environment,
        check=False,
    )


def tool_output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_it_links_neither_cuda_nor_torch_dynamically():
    needed = [
        line for line in tool_output("readelf", "-d", str(MODULE)).splitlines() if "NEEDED" in line
    ]
    assert needed
    assert not [line for line in needed if "cuda" in line or "torch" in line or "c10" in line]


def test_it_has_no_torch_symbol():
    undefined = tool_output("nm", "-D", "--undefined-only", str(MODULE))
    assert undefined
    assert not [s for s in undefined.splitlines() if "torch" in s or "c10" in s or "5at" in s]


def test_it_imports_without_a_driver_and_without_torch():
    done = run_python(
        f"import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('offload._C', {str(MODULE)!r})\n"
        f"module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        f"module.built_with_cuda()\n"
        f"assert 'torch' not in sys.modules\n",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr


def test_a_build_of_another_version_is_refused():
    with pytest.raises(ImportError, match=r"expected version 9\.9, got 0\.1.*Rebuild it with"):
        _native._check_build("0.1", "same", "9.9", Path("/nonexistent"))


def test_a_build_of_other_sources_is_refused(tmp_path):
    (tmp_path / "arena.cpp").write_text("int x;")
    current = source_hash(tmp_path)
    _native._check_build("1", current, "1", tmp_path)
    (tmp_path / "arena.cpp").write_text("int y;")
    with pytest.raises(ImportError, match=f"got {current}. Rebuild it with"):
        _native._check_build("1", current, "1", tmp_path)


def test_the_hash_sees_names_and_contents(tmp_path):
    (tmp_path / "a.cpp").write_text("x")
    first = source_hash(tmp_path)
    (tmp_path / "a.cpp").rename(tmp_path / "b.cpp")
    assert source_hash(tmp_path) != first


def test_importing_offload_imports_no_third_party_library():
    done = run_python(
        "import offload, sys\n"
        "found = {'transformers', 'accelerate', 'peft', 'triton', 'rich'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    assert done.returncode == 0, done.stderr


USE = (
    "import torch, os, sys\n"
    "from offload import _native\n"
    "from offload.store import default_store as s\n"
)


def test_exit_with_live_tickets_and_copies_in_flight_is_clean():
    done = run_python(
        USE + "t = [s().offload(torch.ones(1 << 20)) for _ in range(20)]\n"
        "t[3].prefetch(); view = t[0].host_view()\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_after_close_calls_raise_and_dropping_tickets_is_harmless():
    done = run_python(
        USE + "t = s().offload(torch.ones(1000)); _native.close()\n"
        "try: s().offload(torch.ones(10))\n"
        "except Exception as e: print(type(e).__name__)\n"
        "del t\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "OffloadError"


def test_in_a_forked_child_calls_raise_and_destructors_do_nothing():
    done = run_python(
        USE + "t = s().offload(torch.ones(1000)); s().synchronize()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: t.reload(); code = 1\n"
        "    except Exception as e: code = 0 if type(e).__name__ == 'OffloadError' else 2\n"
        "    del t\n"
        "    sys.exit(code)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "assert t.reload().sum() == 1000\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_that_reads_a_slot_gets_a_segmentation_fault():
    done = run_python(
        USE + "v = s().offload(torch.ones(1000)).host_view()\n"
        "pid = os.fork()\n"
        "if pid == 0: int(v[0]); os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert done.stdout.strip() == str(-signal.SIGSEGV), done.stderr


def test_a_data_loader_worker_forked_mid_step_does_no_harm():
    done = run_python(
        "import torch, offload\n"
        "from torch import nn\n"
        "m = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])\n"
        "offload.wrap(m, policy=offload.Policy(tier='host', min_bytes=0))\n"
        "loss = m(torch.randn(512, 64)).sum()\n"
        "loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2)\n"
        "assert sum(int(x) for x in loader) == 28\n"
        "loss.backward()\n"
        "assert all(p.grad is not None for p in m.parameters())\n"
    )
    assert done.returncode == 0, done.stderr


def test_the_arena_stays_near_the_peak_of_live_bytes_over_five_lengths():
    step = 64 << 20
    allocator = _native.SlotAllocator(1 << 40, step)
    peak = 0
    for length in (70_000, 71_111, 65_536, 30_000, 72_000) * 3:
        slots = []
        for _ in range(16):
            slots.append(allocator.allocate(length * 3_072 * 2))
            peak = max(peak, allocator.live_bytes)
        for slot in reversed(slots):
            allocator.release(slot)
    assert allocator.live_bytes == 0
    assert allocator.committed_bytes <= 1.05 * peak + step


@pytest.mark.parametrize("scale", [1, 64])
def test_sixteen_layers_of_70000_tokens_reserve_two_percent_more_at_most(scale):
    allocator = _native.SlotAllocator(1 << 40, (64 << 20) // scale)
    layer_bytes = 70_000 * 3_072 * 2 // scale  # bf16
    committed = set()
    for _ in range(20):
        slots = [allocator.allocate(layer_bytes) for _ in range(16)]
        committed.add(allocator.committed_bytes)
        for slot in reversed(slots):
            allocator.release(slot)
    assert len(committed) == 1
    assert committed.pop() <= 1.02 * 16 * layer_bytes


def test_the_version_is_the_distributions():
    assert offload.__version__ == _native.VERSION
