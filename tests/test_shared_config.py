"""Models that share a configuration, where calls switch the name of the attention meanwhile."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import offload
from offload.adapters.transformers import attention as adapter
from offload.adapters.transformers.attention import NAME, attention_as_before, attention_routed
from tests.models import step
from tests.tiled import assert_close_gradients, assert_tiled, build, loss_on, stays_float64, tiled
from tests.tiled_pairs import AUTO, LOSS, fail_in_mlp, one_warning

pytestmark = pytest.mark.filterwarnings("error:.*offload")
PATIENCE_S = 60
"""After which a thread that waits for another one fails the test."""


@pytest.mark.parametrize("raises", [False, True])
def test_another_model_of_the_same_config_does_not_notice(store, raises, monkeypatch):
    torch.manual_seed(1)
    first, config = build("llama"), None
    config = first.config
    second = type(first)(config).double()
    assert second.config is config
    before = step(second, LOSS)
    name = config._attn_implementation
    offload.wrap(first, policy=tiled())
    if raises:
        step(first, LOSS)
        fail_in_mlp(monkeypatch, first, at=3)
        with pytest.raises(RuntimeError, match="out of luck"):
            LOSS(first)
        monkeypatch.undo()
    else:
        loss = LOSS(first)  # the other model runs between this one's forward and backward
        step(second, LOSS)
        loss.backward()
    assert config._attn_implementation == name
    after = step(second, LOSS)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(before[1][n], after[1][n]) for n in before[1])
    assert second.config._attn_implementation == name


def siblings(count):
    """Models with one configuration and equal weights."""
    first = build("llama")
    models = [first, *(type(first)(first.config).double().train() for _ in range(count - 1))]
    for model in models:
        assert model.config is first.config
        model.load_state_dict(first.state_dict())
    return models


class Gate:
    """Stops a module at its next call until it is opened; a norm, since attention follows it."""

    def __init__(self, monkeypatch, module) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        forward = type(module).forward

        def gated(this, x):
            if this is module and not self.reached.is_set():
                self.reached.set()
                assert self.opened.wait(PATIENCE_S)
            return forward(this, x)

        monkeypatch.setattr(type(module), "forward", gated)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opened.set()


def assert_same(ours, expected):
    """Two results of `step` are equal bit for bit."""
    assert torch.equal(ours[0], expected[0])
    assert all(torch.equal(ours[1][name], grad) for name, grad in expected[1].items())


def assert_close(ours, expected):
    assert abs(ours[0] - expected[0]) <= 1e-12 * abs(expected[0])
    assert_close_gradients(ours[1], expected[1])


def attention_threads(monkeypatch):
    """Collects the threads in which the library's attention becomes ours."""
    threads, attend = set(), adapter.attention

    def noted(*args, **kwargs):
        threads.add(threading.get_ident())
        return attend(*args, **kwargs)

    monkeypatch.setattr(adapter, "attention", noted)
    return threads


@pytest.fixture
def pool():
    with stays_float64(), ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("kind", ["whole", "left"])
def test_a_plain_model_in_another_thread_keeps_its_attention(store, pool, monkeypatch, kind):
    plain, wrapped = siblings(2)
    name, loss_of = plain.config._attn_implementation, loss_on(2, 37, kind=kind)
    expected = step(plain, loss_of)
    step(offload.wrap(wrapped, policy=tiled()), loss_of)
    threads = attention_threads(monkeypatch)  # short sequences may give equal bits in both
    with Gate(monkeypatch, wrapped.model.layers[0].input_layernorm) as gate:
        ours = pool.submit(step, wrapped, loss_of)
        assert gate.reached.wait(PATIENCE_S)
        assert plain.config._attn_implementation != name
        assert_same(step(plain, loss_of), expected)
    assert_close(ours.result(), expected)
    assert threads
    assert threading.get_ident() not in threads
    assert_tiled(wrapped, count=2)
    assert plain.config._attn_implementation == name
    assert_same(step(plain, loss_of), expected)


def test_a_model_that_ends_its_step_leaves_the_switch_to_one_that_is_still_inside(
    store, pool, monkeypatch
):
    plain, first, second = siblings(3)
    name, loss_of = plain.config._attn_implementation, loss_on(2, 37, kind="left")
    expected = step(plain, loss_of)
    for model in (first, second):
        step(offload.wrap(model, policy=tiled()), loss_of)
    with Gate(monkeypatch, first.model.layers[0].input_layernorm) as gate:
        slow = pool.submit(step, first, loss_of)
        assert gate.reached.wait(PATIENCE_S)
        assert_close(step(second, loss_of), expected)
    assert_close(slow.result(), expected)
    assert plain.config._attn_implementation == name
    assert_same(step(plain, loss_of), expected)


@pytest.mark.parametrize("first", ["tiled", "checkpoint"])
def test_a_layer_in_checkpoint_mode_beside_one_that_runs_by_tiles(store, pool, monkeypatch, first):
    plain, by_tiles, whole = siblings(3)
    name, loss_of = plain.config._attn_implementation, loss_on(2, 37, kind="left")
    expected = step(plain, loss_of)
    offload.wrap(by_tiles, policy=tiled())
    offload.wrap(whole, policy=AUTO)
    for layer in whole.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, out: None)
    step(by_tiles, loss_of)
    with one_warning("has a hook"):
        step(whole, loss_of)
    models = (by_tiles, whole) if first == "tiled" else (whole, by_tiles)
    gates = [Gate(monkeypatch, model.model.layers[0].input_layernorm) for model in models]
    with contextlib.ExitStack() as stack:
        results = []
        for model, gate in zip(models, gates, strict=True):
            stack.enter_context(gate)
            results.append(pool.submit(step, model, loss_of))
            assert gate.reached.wait(PATIENCE_S)
        gates[0].opened.set()  # its layers run on while the other is inside one of its own
        assert_close(results[0].result(PATIENCE_S), expected)
        gates[1].opened.set()
        assert_close(results[1].result(PATIENCE_S), expected)
    assert_tiled(by_tiles)
    assert_tiled(whole, mode="checkpoint")
    assert plain.config._attn_implementation == name
    assert_same(step(plain, loss_of), expected)


def test_two_threads_train_at_once(store, pool):
    plain, *wrapped = siblings(3)
    name, loss_of = plain.config._attn_implementation, loss_on(2, 37, kind="left")
    expected = step(plain, loss_of)
    for model in wrapped:
        offload.wrap(model, policy=tiled())
    start = threading.Barrier(2, timeout=PATIENCE_S)

    def train(model):
        start.wait()
        return [step(model, loss_of) for _ in range(3)]

    for results in pool.map(train, wrapped):
        for result in results:
            assert_close(result, expected)
    for model in wrapped:
        assert_tiled(model, count=3)
    assert plain.config._attn_implementation == name
    assert_same(step(plain, loss_of), expected)


class Yielding:
    """A configuration that lets another thread run whenever its attention's name is used."""

    def __init__(self) -> None:
        self.name = "sdpa"

    @property
    def _attn_implementation_internal(self) -> str:
        time.sleep(0)
        return self.name

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, name: str) -> None:
        time.sleep(0)
        self.name = name


class Configured(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.config = config


def test_switching_is_not_interrupted_by_another_thread(pool):
    config = Yielding()
    layer = Configured(config)
    start = threading.Barrier(2, timeout=PATIENCE_S)

    def switch(_):
        seen = []
        start.wait()
        for number in range(300):
            with attention_routed([config]):
                seen.append(config.name)
                if number % 2:
                    with attention_as_before(layer):
                        pass
                    seen.append(config.name)
        return seen

    for seen in pool.map(switch, range(2)):
        assert set(seen) == {NAME}
    assert config.name == "sdpa"
