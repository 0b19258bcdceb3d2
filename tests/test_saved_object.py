"""What a node saves beside tensors: there for its backward, gone after it."""

import gc
import weakref

import pytest
import torch

import offload
from offload import _native
from offload.saved_object import SavedObject
from tests.conftest import settle
from tests.tiled import nano


class Value:
    factor = 3.0


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, saved, x):
        ctx.save_for_backward(saved.carrier)
        return x * saved.value.factor

    @staticmethod
    def backward(ctx, d_output):
        return None, d_output * SavedObject.of(ctx).factor


def scaled(x):
    """A node over `x`, and a weak reference to what it saves."""
    saved = SavedObject(Value())
    with saved:
        output = Scale.apply(saved, x)
    return output, weakref.ref(saved.value)


def test_the_object_lives_from_forward_to_the_end_of_backward():
    x = torch.ones(2, requires_grad=True)
    output, value = scaled(x)
    gc.collect()
    assert value() is not None
    output.sum().backward()
    assert value() is None  # while `output` lives
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_a_graph_that_is_kept_keeps_it():
    x = torch.ones(2, requires_grad=True)
    output, value = scaled(x)
    output.sum().backward(retain_graph=True)
    assert value() is not None
    output.sum().backward()
    assert value() is None


def test_without_backward_it_goes_with_the_graph():
    output, value = scaled(torch.ones(2, requires_grad=True))
    del output
    assert value() is None


def test_a_second_backward_raises_torchs_own_error():
    output, _ = scaled(torch.ones(2, requires_grad=True))
    total = output.sum()
    total.backward()
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


def test_tensors_that_others_save_meanwhile_are_left_alone():
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, saved, x):
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                ctx.graph = inner, inner.square()
            ctx.save_for_backward(saved.carrier)
            return ctx.graph[1].detach()

        @staticmethod
        def backward(ctx, d_output):
            inner, squared = ctx.graph
            return None, torch.autograd.grad(squared, inner, d_output)[0]

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    saved = SavedObject(Value())
    with saved:
        output = Inner.apply(saved, x)
    output.sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 4.0]))


def test_backward_gives_a_tiled_layers_host_memory_back_while_the_loss_lives(store):
    """Else the next forward, which runs before `loss` is assigned anew, would need it twice."""
    model = nano()
    offload.wrap(
        model, policy=offload.Policy(mode="tiled", tile_tokens=10, tier="host", min_bytes=0)
    )
    ids = torch.randint(0, 50, (1, 37))
    loss = model(ids).float().square().mean()
    store.synchronize()
    assert _native.arena_statistics().live_bytes > 0
    loss.backward()
    settle(store)  # asserts that nothing is left
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
