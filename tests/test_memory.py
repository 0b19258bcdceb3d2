"""What the layers hold between forward and backward, and that nothing grows over steps."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import offload
from offload import _native
from offload.store import engine
from offload.store import store as store_module
from tests.models import FORCED, Block, Stack, blocks, calls_of, step

TOKENS, WIDTH = 1024, 64
INPUT_BYTES = TOKENS * WIDTH * 4


class Watched(Stack):
    """Notes every layer input by a weak reference to its storage."""

    def __init__(self, layers, keyword=None) -> None:
        super().__init__(layers, keyword)
        self.inputs: list[weakref.ref] = []

    def forward(self, hidden):
        for layer in self.layers:
            self.inputs.append(weakref.ref(hidden.untyped_storage()))
            hidden = layer(**{self.keyword: hidden}) if self.keyword else layer(hidden)
        return hidden

    def live_inputs(self) -> int:
        return sum(reference() is not None for reference in self.inputs)


class Checkpointed(Block):
    def forward(self, hidden):
        return checkpoint(super().forward, hidden, use_reentrant=False)


@pytest.mark.parametrize("keyword", [None, "hidden"])
@pytest.mark.parametrize("depth", [4, 16])
def test_after_forward_the_layers_hold_at_most_two_inputs_whatever_the_depth(store, depth, keyword):
    model = offload.wrap(Watched([Block(WIDTH) for _ in range(depth)], keyword), policy=FORCED)
    live_slots = _native.arena_statistics().live_slots if _native.started() else 0
    loss = model(torch.randn(1, TOKENS, WIDTH) * 1.0).sum()
    held = model.live_inputs()
    assert held <= 2 + store.held_bytes() // INPUT_BYTES
    store.synchronize()
    assert model.live_inputs() <= 2
    arena = _native.arena_statistics()
    assert arena.live_slots - live_slots == depth - 1
    assert arena.live_bytes - (depth - 1) * INPUT_BYTES <= 4096 * (depth - 1)
    loss.backward()


def test_torchs_checkpoint_holds_them_all():
    """Guards the test above: without offload the same count shows every input."""
    model = Watched([Checkpointed(WIDTH) for _ in range(16)])
    loss = model(torch.randn(1, TOKENS, WIDTH) * 1.0).sum()
    assert model.live_inputs() == 16
    loss.backward()


def test_copies_in_flight_hold_at_most_one_large_input_during_forward(store):
    """With the bound at its floor, every offload waits for the one before it."""
    store.offload(torch.ones(1))
    _native.set_max_in_flight_bytes(0)
    try:
        model = Watched([Block(WIDTH) for _ in range(8)])
        offload.wrap(model, policy=FORCED)
        held = []
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: held.append(store.held_bytes()))
        model(torch.randn(1, TOKENS, WIDTH)).sum().backward()
        assert max(held) <= INPUT_BYTES
    finally:
        _native.set_max_in_flight_bytes(128 << 20)


def test_in_backward_at_most_two_inputs_are_on_the_device(store):
    model = Watched([Block(WIDTH) for _ in range(12)])
    offload.wrap(model, policy=FORCED)
    ahead = []

    def count(*_):
        ahead.append(
            sum(t.nbytes for c in calls_of(model) for t in c.record.tickets if t.prefetched)
        )

    for layer in model.layers:
        layer.register_full_backward_hook(count)
    old, store_module.PREFETCH_BYTES = store_module.PREFETCH_BYTES, 0
    try:
        model(torch.randn(1, TOKENS, WIDTH)).sum().backward()
    finally:
        store_module.PREFETCH_BYTES = old
    assert max(ahead) == INPUT_BYTES


def bytes_now(store) -> tuple[int, int, int]:
    """Live host bytes, committed host bytes, live bytes of torch storages."""
    gc.collect()
    store.synchronize()
    arena = _native.arena_statistics()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return arena.live_bytes, arena.committed_bytes, sum(storages.values())


class Moody(Block):
    raises = False

    def forward(self, hidden):
        if self.raises:
            raise ValueError("on purpose")
        return super().forward(hidden)


@pytest.mark.parametrize("trouble", ["none", "every third raises", "every third has no backward"])
def test_step_300_uses_as_many_bytes_as_step_10(store, trouble):
    model = Stack([Moody() for _ in range(4)])
    offload.wrap(model, policy=FORCED)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    at_step = {}
    for index in range(1, 301):
        length = 16 + index % 5
        third = index % 3 == 0
        model.layers[2].raises = third and trouble == "every third raises"
        try:
            loss = model(torch.randn(2, length, 32)).pow(2).mean()
            if not (third and trouble == "every third has no backward"):
                loss.backward()
                optimizer.step()
        except ValueError:
            pass
        optimizer.zero_grad()
        loss = None
        if index in (10, 300):
            at_step[index] = bytes_now(store)
    assert at_step[300] == at_step[10]
    assert at_step[300][0] == 0


def test_a_full_arena_fails_the_step_cleanly_and_the_next_one_works(store):
    store.trim()
    cap = _native.arena_statistics().cap_bytes if _native.started() else 1 << 30
    policy = offload.Policy(mode="checkpoint", tier="host", min_bytes=0, host_bytes="64MiB")
    model = offload.wrap(blocks(4, 64), policy=policy)
    try:
        with pytest.raises(offload.ArenaFull, match=r"Policy\.host_bytes"):
            model(torch.randn(1, 128 << 10, 64))
        gc.collect()
        assert _native.arena_statistics().live_bytes in (0, 32 << 20)
        step(model, lambda m: m(torch.randn(1, 64, 64)).sum())
        assert all(p.grad is not None for p in model.parameters())
    finally:
        engine.set_host_cap(cap)


def test_unwrap_gives_host_memory_back(store):
    model = offload.wrap(blocks(4, 64), policy=FORCED)
    step(model, lambda m: m(torch.randn(1, 4096, 64)).sum())
    assert _native.arena_statistics().committed_bytes > 0
    offload.unwrap(model)
    assert _native.arena_statistics().committed_bytes == 0
