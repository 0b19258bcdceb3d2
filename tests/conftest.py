"""Fixtures shared by all tests."""

import gc
import os
import warnings

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are imported

import offload
from offload import _native
from offload.lazy_logits import LazyLogits
from offload.store import default_store
from tests.models import FORCED

torch.set_num_threads(1)  # the models here are small
gc.collect()
gc.freeze()  # what was imported is not searched again by every collection
warnings.filterwarnings(
    "ignore", message=".*gradient_checkpointing_enable.*", category=FutureWarning
)


FEW_LONG_TESTS = (
    "test_smollm2.py",  # unpacks the model, which the two last files need as well
    "test_tiled_distributed.py",
    "test_tiled_memory.py",
    "test_head_training.py",
    "test_processes.py",
    "test_step.py",
    "test_plan.py",
    "test_prediction.py",
    "test_placement.py",
    "test_native.py",
    "test_codec_steps.py",
    "test_examples.py",
)


def pytest_collection_modifyitems(items):
    """Puts files of few and long tests first: left to the end, one process would wait for them."""
    order = {name: index for index, name in enumerate(FEW_LONG_TESTS)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_runtest_setup(item):
    if item.get_closest_marker("needs_cuda") and not torch.cuda.is_available():
        if os.environ.get("FAIL_WITHOUT_CUDA") == "1":
            pytest.fail("needs_cuda: expected a CUDA device, found none.")
        pytest.skip("needs a CUDA device")


@pytest.fixture
def store():
    """The process's store, with nothing in it before and after the test."""
    store = default_store()
    settle(store)
    assert not _native.started() or _native.disk_statistics().cap_bytes == 0
    yield store
    settle(store)
    store.retire()
    gc.freeze()  # what is alive now outlives the test: libraries that it was the first to import


def settle(store) -> None:
    """Drops dead graphs, waits for copies, and checks that nothing stays in the arena."""
    gc.collect()
    store.synchronize()
    assert store.held_bytes() == 0
    if _native.started():
        assert _native.arena_statistics().live_slots == 0


CHECKPOINT_POLICIES = {
    "forced": FORCED,
    "by reference": offload.Policy(mode="checkpoint"),
    "keep none": offload.Policy(mode="checkpoint", keep_last=0),
}


@pytest.fixture(params=CHECKPOINT_POLICIES.values(), ids=CHECKPOINT_POLICIES.keys())
def policy(request, store):
    """Each way in which checkpoint mode keeps a layer's input."""
    return request.param


@pytest.fixture
def materialised(monkeypatch):
    """Every computation of real logits by a LazyLogits."""
    seen = []
    original = LazyLogits.materialise

    def spy(self):
        if not self.computed:
            seen.append(self.shape)
        return original(self)

    monkeypatch.setattr(LazyLogits, "materialise", spy)
    return seen
