"""A plain model beside a tiled one, and spies on what runs inside."""

import contextlib
import copy
import warnings

import pytest

import offload
import offload.tape
from offload.errors import LayerRefused
from tests.tiled import assert_close_step, assert_tiled, decoder_layers, loss_on, nano, tiled

AUTO = tiled(mode="auto")
LOSS = loss_on(2, 37)


def pair(make=nano, policy=None, **options):
    """A plain model and a wrapped copy."""
    plain = make(**options)
    return plain, offload.wrap(copy.deepcopy(plain), policy=policy or tiled())


@contextlib.contextmanager
def one_warning(match):
    """Exactly one warning of offload, and it says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [str(w.message) for w in caught if "offload" in str(w.message)]
    assert len(ours) == 1, ours
    assert match in ours[0]


def assert_falls_back(plain, wrapped, loss_of, warning, refusal):
    """In auto, layers run right in checkpoint mode and one warning says why; tiled refuses them."""
    with one_warning(warning):
        assert_close_step(plain, wrapped, loss_of)
    assert_tiled(wrapped, mode="checkpoint")
    offload.wrap(wrapped, policy=tiled())
    with pytest.raises(LayerRefused, match=refusal):
        loss_of(wrapped)


def fail_in_mlp(monkeypatch, model, at, error=RuntimeError):
    """Makes the given call of the layers' MLPs raise, once."""
    kind = type(decoder_layers(model)[0].mlp)
    forward, calls = kind.forward, []

    def failing(self, x):
        calls.append(1)
        if len(calls) == at:
            raise error("out of luck")
        return forward(self, x)

    monkeypatch.setattr(kind, "forward", failing)


def count_attention(monkeypatch):
    calls, attend = [], offload.tape.attend

    def counted(q, *args, **kwargs):
        calls.append(q.shape[2])
        return attend(q, *args, **kwargs)

    monkeypatch.setattr(offload.tape, "attend", counted)
    return calls


def count_mlp(monkeypatch, model):
    """Lists whose MLP ran, by identity, in order."""
    kind = type(decoder_layers(model)[0].mlp)
    forward, calls = kind.forward, []

    def counted(self, x):
        calls.append(id(self))
        return forward(self, x)

    monkeypatch.setattr(kind, "forward", counted)
    return calls
