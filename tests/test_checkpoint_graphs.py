"""Checkpoint mode and autograd: graphs, exceptions, and what is in force around a call."""

import contextvars
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from tests.models import (
    FORCED,
    Adapted,
    Block,
    Stack,
    assert_same_step,
    blocks,
    calls_of,
    gradients,
    on,
    step,
    twins,
)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_the_same_in_forward_and_replay(policy, inside):
    dtypes = []

    class Records(Block):
        def forward(self, hidden):
            dtypes.append(self.up(hidden).dtype)
            with torch.autocast("cpu", enabled=False):
                dtypes.append(self.up(hidden.float()).dtype)
            return super().forward(hidden)

    plain, wrapped = twins(Stack([Records() for _ in range(3)]), policy)

    def loss_of(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(torch.ones(2, 9, 32)).float().pow(2).mean()

    assert_same_step(plain, wrapped, loss_of)
    dtypes.clear()
    if inside:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wrapped(torch.ones(2, 9, 32)).float().sum().backward()
    else:
        step(wrapped, loss_of)
    assert dtypes == [torch.bfloat16, torch.float32] * 6


def test_weights_get_gradients_after_a_no_grad_call_under_the_same_autocast(policy):
    wrapped = offload.wrap(blocks(3), policy=policy)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        with torch.no_grad():
            wrapped(torch.ones(1, 9, 32))
        loss = wrapped(torch.ones(1, 9, 32)).float().sum()
    loss.backward()
    assert all(p.grad is not None for p in wrapped.parameters())


def test_backward_twice_through_a_retained_graph(policy):
    plain, wrapped = twins(blocks(4, dropout=0.2), policy)
    inputs = torch.randn(2, 17, 32)
    results = []
    for model in (plain, wrapped):
        torch.manual_seed(3)
        loss = model(inputs).pow(2).mean()
        loss.backward(retain_graph=True)
        first = gradients(model)
        loss.backward()
        results.append((first, gradients(model)))
        assert all(torch.equal(first[name], gradients(plain)[name] / 2) for name in first)
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


@pytest.mark.parametrize("order", ["sum", "first a", "first b"])
def test_two_forwards_before_one_backward(policy, order):
    plain, wrapped = twins(blocks(4, dropout=0.1), policy)
    a, b = torch.randn(2, 17, 32), torch.randn(1, 5, 32)

    def run(model):
        model.zero_grad()
        torch.manual_seed(0)
        loss_a = model(a).pow(2).mean()
        with torch.no_grad():
            model(b)
        loss_b = model(b).pow(2).mean()
        if order == "sum":
            (loss_a + loss_b).backward()
        else:
            for loss in (loss_a, loss_b) if order == "first a" else (loss_b, loss_a):
                loss.backward()
        return gradients(model)

    expected, got = run(plain), run(wrapped)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_forward_without_backward_then_a_step(policy, store):
    plain, wrapped = twins(blocks(4), policy)
    inputs = torch.randn(2, 17, 32)
    for _ in range(3):
        wrapped(inputs)
    assert_same_step(plain, wrapped, on(inputs))


def test_backward_outside_and_after_the_frame_that_made_the_loss(policy):
    plain, wrapped = twins(blocks(4), policy)

    def loss_of(model):
        with torch.autograd.graph.save_on_cpu():
            return model(torch.full((2, 17, 32), 0.5)).pow(2).mean()

    assert_same_step(plain, wrapped, loss_of)


def test_an_exception_in_forward_leaves_nothing_behind(policy, store):
    class Fails(Block):
        fail = False

        def forward(self, hidden):
            if self.fail:
                raise ValueError("on purpose")
            return super().forward(hidden)

    plain, wrapped = twins(Stack([Block(), Fails(), Block()]), policy, layers=Block)
    inputs = torch.randn(2, 17, 32)
    for _ in range(3):
        wrapped.layers[1].fail = True
        with pytest.raises(ValueError, match="on purpose"):
            wrapped(inputs)
        wrapped.layers[1].fail = False
        assert_same_step(plain, wrapped, on(inputs), steps=1)


def test_an_exception_in_a_replay_leaves_nothing_behind(policy, store):
    class Fails(Block):
        calls_left = -1

        def forward(self, hidden):
            self.calls_left -= 1
            if self.calls_left == 0:
                raise KeyboardInterrupt
            return super().forward(hidden)

    plain, wrapped = twins(Stack([Block(), Fails(), Block()]), policy, layers=Block)
    inputs = torch.randn(2, 17, 32)
    wrapped.layers[1].calls_left = 2
    with pytest.raises(KeyboardInterrupt):
        step(wrapped, on(inputs))
    gc.collect()
    assert_same_step(plain, wrapped, on(inputs))


def test_no_grad_and_eval_passes_in_between(policy):
    plain, wrapped = twins(blocks(3, dropout=0.2), policy)
    inputs = torch.randn(2, 17, 32)
    assert_same_step(plain, wrapped, on(inputs), steps=1)
    with torch.no_grad():
        assert torch.equal(plain.eval()(inputs), wrapped.eval()(inputs))
    with torch.inference_mode():
        assert torch.equal(plain(inputs), wrapped(inputs))
    assert [call.record.forwards for call in calls_of(wrapped)] == [1] * 3
    assert_same_step(plain, wrapped, on(inputs), steps=1)  # in eval mode, with gradients
    assert [call.record.recomputes for call in calls_of(wrapped)] == [2] * 3
    plain.train(), wrapped.train()
    assert_same_step(plain, wrapped, on(inputs), steps=1)


SCALE = contextvars.ContextVar("scale", default=1.0)


def test_context_variables_set_around_the_call_hold_in_the_replay(policy):
    class Reads(Block):
        def forward(self, hidden):
            return torch.tanh(super().forward(hidden) * SCALE.get())  # saves its result

    plain, wrapped = twins(Stack([Reads() for _ in range(3)]), policy)

    def loss_of(model):
        token = SCALE.set(3.0)
        try:
            return model(torch.full((2, 9, 32), 0.25)).pow(2).mean()
        finally:
            SCALE.reset(token)

    assert_same_step(plain, wrapped, loss_of)


def test_a_saved_input_that_is_changed_in_place_raises(policy):
    class Writes(nn.Module):
        def __init__(self, model) -> None:
            super().__init__()
            self.layers = model.layers

        def forward(self, x):
            hidden = [x * 1.0]
            for layer in self.layers:
                hidden.append(layer(hidden[-1]))
            with torch.no_grad():
                hidden[-2].add_(1)  # the last layer's input, kept by reference in every policy
            return hidden[-1]

    wrapped = offload.wrap(Writes(blocks(3)), policy=policy)
    if policy.keep_last == 0 and policy.tier == "host":
        pytest.skip("the copy may be done already, and is then the right one")
    with pytest.raises(offload.TicketPoisoned, match="modified in place"):
        wrapped(torch.randn(2, 9, 32)).sum().backward()


def test_second_order_gradients_are_the_plain_models(policy):
    plain, wrapped = twins(Stack([Adapted() for _ in range(2)]), policy)

    def loss_of(model):
        x = torch.linspace(-1, 1, 64).view(2, 32).requires_grad_()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return g.pow(2).sum()

    assert_same_step(plain, wrapped, loss_of)


def test_gradients_add_to_those_of_earlier_batches(policy):
    plain, wrapped = twins(blocks(3), policy)
    for model in (plain, wrapped):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(2, 9, 32)).pow(2).mean().backward()
    grads, expected = gradients(wrapped), gradients(plain)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_live_memory_is_flat_without_the_garbage_collector(store):
    wrapped = offload.wrap(blocks(3), policy=FORCED)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            step(wrapped, on(torch.randn(2, 9, 32)))
        store.synchronize()
        assert sum(len(call.record.tickets) for call in calls_of(wrapped)) == 0
    finally:
        gc.enable()


def test_torchs_own_checkpoint_inside_a_layer(policy):
    class Nested(Block):
        def forward(self, hidden):
            return checkpoint(super().forward, hidden, use_reentrant=False)

    plain, wrapped = twins(Stack([Nested() for _ in range(3)]), policy)
    assert_same_step(plain, wrapped, on(torch.randn(2, 9, 32)))


def test_a_step_of_the_optimizer_before_backward_raises_as_in_plain_torch(policy):
    wrapped = offload.wrap(blocks(3), policy=policy)
    first, second = (on(torch.randn(2, 9, 32))(wrapped) for _ in range(2))
    first.backward()
    torch.optim.SGD(wrapped.parameters(), 1.0).step()
    with pytest.raises(offload.OffloadError, match=r"modified in place\. Step the optimizer"):
        second.backward()


def test_parameters_passed_by_functional_call_are_those_of_the_replay(policy):
    plain, wrapped = twins(blocks(3), policy)
    results = []
    for model in (plain, wrapped):
        used = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
        x = torch.linspace(-1, 1, 288).view(1, 9, 32)
        torch.func.functional_call(model, used, (x,)).pow(2).mean().backward()
        results.append([tensor.grad for tensor in used.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_layer_that_changes_its_own_parameters_is_refused(policy):
    class Codebook(Block):
        def forward(self, hidden):
            with torch.no_grad():
                self.norm.weight.mul_(0.9)
            return super().forward(hidden)

    wrapped = offload.wrap(Stack([Codebook(), Codebook()]), policy=policy)
    with pytest.raises(offload.LayerRefused, match="leave its parameters alone"):
        wrapped(torch.randn(2, 9, 32))


def test_the_attention_backend_of_the_forward_holds_in_the_replay(policy):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class Attends(Block):
        def forward(self, hidden):
            heads = self.norm(hidden).unflatten(-1, (4, 8)).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            return super().forward(mixed.transpose(1, 2).flatten(2))

    plain, wrapped = twins(Stack([Attends() for _ in range(3)]), policy)

    def loss_of(model):
        with sdpa_kernel(SDPBackend.MATH):
            return model(torch.linspace(-1, 1, 576).view(2, 9, 32)).pow(2).mean()

    assert_same_step(plain, wrapped, loss_of)


def test_torch_func_runs_layers_untouched(policy):
    plain, wrapped = twins(blocks(2), policy)
    x = torch.linspace(-1, 1, 288).view(1, 9, 32)
    expected, got = (torch.func.grad(lambda t, m=m: m(t).sum())(x) for m in (plain, wrapped))
    assert torch.equal(expected, got)
