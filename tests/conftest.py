"""Fixtures shared by all tests."""

import gc
import os
import warnings

import pytest
import torch

from offload import _native
from offload.store import default_store

torch.set_num_threads(1)  # the models here are small
gc.collect()
gc.freeze()  # what was imported is not searched again by every collection
warnings.filterwarnings(
    "ignore", message=".*gradient_checkpointing_enable.*", category=FutureWarning
)


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
    yield store
    settle(store)
    store.retire()


def settle(store) -> None:
    """Drops dead graphs, waits for copies, and checks that nothing stays in the arena."""
    gc.collect()
    store.synchronize()
    assert store.held_bytes() == 0
    if _native.started():
        assert _native.arena_statistics().live_slots == 0
