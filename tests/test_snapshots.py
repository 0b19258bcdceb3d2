"""Buffers that a layer writes end as in the plain model; a replay sees them as before."""

import copy

import pytest
import torch
from torch import nn

import offload
from offload import snapshots as snapshots_module
from tests.models import FORCED, assert_same_step, step


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Counting(nn.Module):
    """Reads a buffer before it writes it, and replaces another one."""

    def __init__(self, mask_elements: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("mask", torch.zeros(mask_elements), persistent=False)
        self.writes_mask = False

    def forward(self, x):
        out = self.linear(x) * (1 + self.calls) + self.running + self.mask.sum()
        self.calls += 1
        self.running = 0.9 * self.running + 0.1 * x.detach().mean((0, 1))
        if self.writes_mask:
            self.mask.add_(1)
        return out


def loss_of(model):
    return model(torch.linspace(-1, 1, 2 * 8 * 8).view(2, 8, 8)).pow(2).mean()


def assert_same_buffers(plain, wrapped):
    expected, got = dict(plain.named_buffers()), dict(wrapped.named_buffers())
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layer_class", [Normalised, Counting])
def test_buffers_and_gradients_equal_the_plain_models_over_three_steps(store, layer_class):
    torch.manual_seed(0)
    plain = nn.Sequential(*[layer_class() for _ in range(3)])
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    for _ in range(3):
        plain_loss, wrapped_loss = loss_of(plain), loss_of(wrapped)
        assert_same_buffers(plain, wrapped)
        plain_loss.backward()
        wrapped_loss.backward()
        assert_same_buffers(plain, wrapped)
        assert_same_step(plain, wrapped, loss_of, steps=1)
        assert_same_buffers(plain, wrapped)


def test_the_buffer_objects_stay_the_same(store):
    wrapped = offload.wrap(nn.Sequential(Normalised(), Normalised()), policy=FORCED)
    before = {name: id(buffer) for name, buffer in wrapped.named_buffers()}
    step(wrapped, loss_of)
    assert {name: id(buffer) for name, buffer in wrapped.named_buffers()} == before


def test_buffers_are_put_back_when_a_replay_fails(store):
    class Fails(Counting):
        fail = False

        def forward(self, x):
            out = super().forward(x)
            if self.fail:
                raise ValueError("on purpose")
            return out.exp()  # the replay runs to here, or it would stop before it fails

    wrapped = offload.wrap(nn.Sequential(Fails(), Fails()), policy=FORCED)
    loss = loss_of(wrapped)
    wrapped[1].fail = True
    before = {name: buffer.clone() for name, buffer in wrapped.named_buffers()}
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    assert all(torch.equal(before[name], b) for name, b in wrapped.named_buffers())


def test_a_large_buffer_that_begins_to_change_is_refused_once_and_right_after(store, monkeypatch):
    monkeypatch.setattr(snapshots_module, "SNAPSHOT_BYTES", 64)
    torch.manual_seed(0)
    plain = nn.Sequential(*[Counting(100) for _ in range(2)])
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    assert_same_step(plain, wrapped, loss_of, steps=1)
    for layer in (*plain, *wrapped):
        layer.writes_mask = True
    for _ in range(2):  # each layer meets it once
        with pytest.raises(offload.LayerRefused, match=r"\['mask'\].*Run the step again"):
            loss_of(wrapped)
    wrapped.load_state_dict(plain.state_dict())
    for ours, theirs in zip(wrapped, plain, strict=True):
        ours.mask.copy_(theirs.mask)
    assert_same_step(plain, wrapped, loss_of, steps=2)


class Late(nn.Module):
    """Fills a buffer that is None, and registers another one, in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("run", None)

    def forward(self, x):
        if self.run is None:
            self.run = torch.zeros(8)
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((8,), 2.0))
            x = x * 3
        self.run = self.run + 1
        return torch.tanh(self.linear(x) * self.run * self.scale)


class Tied(nn.Module):
    """Bears one buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("a", torch.zeros(8))
        self.register_buffer("b", self.a)

    def forward(self, x):
        self.a.add_(1)
        return torch.tanh(self.linear(x)) * self.b


@pytest.mark.parametrize("layer_class", [Late, Tied])
def test_buffers_that_come_into_being_or_bear_two_names(store, layer_class):
    torch.manual_seed(0)
    plain = nn.Sequential(*[layer_class() for _ in range(3)])
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    assert_same_step(plain, wrapped, loss_of, steps=3)
    assert_same_buffers(plain, wrapped)
