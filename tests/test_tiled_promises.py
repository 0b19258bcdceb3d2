"""What tiled mode promises of autograd: hooks, graphs, exceptions, copies, what is run."""

import contextlib
import copy
import pickle
import random
import warnings

import pytest
import torch

import offload
from offload.errors import LayerRefused, OffloadError
from tests.conftest import settle
from tests.models import FORCED, gradients, step
from tests.tiled import (
    assert_close_gradients,
    assert_close_step,
    assert_tiled,
    batch,
    build,
    decoder_layers,
    lora,
    loss_on,
    nano,
    stays_float64,
    tiled,
)
from tests.tiled_pairs import AUTO, LOSS, count_attention, count_mlp, fail_in_mlp, one_warning, pair

pytestmark = pytest.mark.filterwarnings("error:.*offload")


# -- parameters


@pytest.mark.parametrize("make", [nano, build])
def test_hooks_of_parameters_run_once_a_backward_on_the_whole_gradient(store, make):
    plain, wrapped = pair(make)
    seen, ready = {}, []
    step(plain, LOSS)
    expected = gradients(plain)
    for name, parameter in wrapped.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: ready.append(name))
    step(wrapped, LOSS)  # the first step includes the proof
    assert sorted(ready) == sorted(expected)
    assert all(len(grads) == 1 for grads in seen.values())
    tolerance = 1e-5 if make is build else 1e-12
    assert_close_gradients({n: grads[0] for n, grads in seen.items()}, expected, tolerance)
    step(wrapped, LOSS)
    assert all(len(grads) == 2 for grads in seen.values())
    assert_tiled(wrapped, count=2)


def test_a_hook_that_changes_a_gradient_changes_it_once(store):
    plain, wrapped = pair()
    for model in (plain, wrapped):
        model.blocks[0].up.weight.register_hook(lambda grad: 2 * grad)
    assert_close_step(plain, wrapped, LOSS)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_parameter_changed_in_place_before_backward_raises(store, layer):
    _, wrapped = pair()
    loss = LOSS(wrapped)
    with torch.no_grad():
        wrapped.blocks[layer].down.weight.add_(1)
    with pytest.raises(OffloadError, match="'weight' was modified in place"):
        loss.backward()
    assert_close_step(copy.deepcopy(offload.unwrap(copy.deepcopy(wrapped))), wrapped, LOSS)


# -- graphs


def test_second_order_gradients_raise(store):
    _, wrapped = pair()
    parameters = [wrapped.blocks[0].up.weight, wrapped.tokens.weight]
    grads = torch.autograd.grad(LOSS(wrapped), parameters, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(grad.square().sum() for grad in grads).backward()


def test_a_graph_that_is_kept_can_be_walked_twice(store):
    plain, wrapped = pair(build)
    with stays_float64():
        for model in (plain, wrapped):
            loss = LOSS(model)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=model is plain)
        assert_close_gradients(gradients(wrapped), gradients(plain))
    assert_tiled(wrapped, count=2)


def test_two_forwards_before_one_backward(store):
    plain, wrapped = pair(build)
    assert_close_step(
        plain, wrapped, lambda m: loss_on(2, 37)(m) * loss_on(1, 50, kind="left", seed=4)(m)
    )
    assert_tiled(wrapped, count=2)


def test_backwards_in_the_order_of_the_forwards(store):
    plain, wrapped = pair()
    with stays_float64():
        for model in (plain, wrapped):
            for loss in [loss_on(1, 37 + seed, seed=seed)(model) for seed in range(3)]:
                loss.backward()
    assert_close_gradients(gradients(wrapped), gradients(plain))


@pytest.mark.parametrize("collects", [False, True])
def test_a_forward_without_backward_leaves_nothing_in_the_store(store, collects):
    _, wrapped = pair(build)
    inputs, _ = batch(2, 37)
    output = wrapped(**inputs, use_cache=False, output_hidden_states=collects)
    assert sum(layer.host_bytes for layer in offload.report(wrapped).layers) > 0
    del output
    settle(store)


# -- exceptions


@pytest.mark.parametrize(
    ("at", "error"),
    [
        (3, RuntimeError),
        (6, KeyboardInterrupt),
        (9, KeyboardInterrupt),
        (11, RuntimeError),
        (15, RuntimeError),
    ],
)
def test_an_exception_in_a_layer_leaves_everything_clean(store, monkeypatch, at, error):
    """Calls 1 to 8 are of forward, 9 to 16 of backward; two layers of four tiles."""
    plain, wrapped = pair(build)
    step(wrapped, LOSS)
    wrapped.zero_grad()
    name = wrapped.config._attn_implementation
    slots = {
        (path, key): parameter
        for path, module in wrapped.named_modules()
        for key, parameter in module._parameters.items()
    }
    torch.manual_seed(1)
    expected = torch.rand(1)

    def run():
        torch.manual_seed(1)
        loss = LOSS(wrapped)
        if at <= 8:
            pytest.fail("expected the forward to raise")
        loss.backward()

    fail_in_mlp(monkeypatch, wrapped, at, error)
    with pytest.raises(error, match="out of luck"):
        run()
    monkeypatch.undo()
    assert torch.equal(torch.rand(1), expected)
    settle(store)
    assert wrapped.config._attn_implementation == name
    for (path, key), parameter in slots.items():
        assert wrapped.get_submodule(path)._parameters[key] is parameter
    assert offload.ops.routing.current_route() is None
    assert_close_step(plain, wrapped, LOSS)


# -- copies


@pytest.mark.parametrize("make_twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("proved", [False, True])
def test_copies_and_pickles_train_with_equal_gradients(store, make_twin, proved):
    plain, wrapped = pair(build)
    if proved:
        step(wrapped, LOSS)
    twin = make_twin(wrapped)
    twin.zero_grad()
    before = gradients(wrapped)
    assert_close_step(plain, twin, LOSS)
    assert_tiled(twin, count=1)
    assert all((before[n] is None) == (g is None) for n, g in gradients(wrapped).items())


def test_backward_does_not_move_pythons_random_numbers(store):
    _, wrapped = pair()
    loss = LOSS(wrapped)
    first = random.random()
    loss.backward()
    del loss  # or the expected failure keeps the graph
    assert random.random() != first


@pytest.mark.parametrize("make", [nano, build])
def test_a_users_hook_inside_a_layer_runs_as_often_as_in_checkpoint_mode(store, make):
    plain = make()
    counts = {}
    for policy in (FORCED, AUTO):
        wrapped = offload.wrap(copy.deepcopy(plain), policy=policy)
        seen = counts.setdefault(policy.mode, [])
        for layer in decoder_layers(wrapped):
            inner = layer.up if make is nano else layer.mlp
            inner.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out.shape))
        expect = contextlib.nullcontext() if policy is FORCED else one_warning("has a hook")
        with expect:
            assert_close_step(plain, wrapped, LOSS)
        assert_tiled(wrapped, mode="checkpoint")
    assert counts["auto"] == counts["checkpoint"]
    assert {shape[1] for shape in counts["auto"]} == {37}
    offload.wrap(wrapped, policy=tiled())
    with pytest.raises(LayerRefused, match="has a hook"):
        LOSS(wrapped)


def test_a_users_hook_on_attention_gets_the_weights_that_the_plain_model_gives_it(store):
    plain = build("llama")
    plain.set_attn_implementation("eager")
    seen = []
    for model in (plain, offload.wrap(copy.deepcopy(plain), policy=AUTO)):
        attention = model.model.layers[0].self_attn
        attention.register_forward_hook(lambda m, a, out: seen.append(out[1] is None))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            LOSS(model)
    assert seen == [False, False]


def test_hooks_of_the_layers_themselves_run_once_on_the_whole_sequence(store):
    plain, wrapped = pair(build)
    seen = {"before": [], "after": [], "backward": []}
    for layer in wrapped.model.layers:
        layer.register_forward_pre_hook(lambda m, args: seen["before"].append(args[0].shape))
        layer.register_forward_hook(lambda m, a, out: seen["after"].append(out.shape))
        layer.register_full_backward_hook(lambda m, dx, dy: seen["backward"].append(dy[0].shape))
    assert_close_step(plain, wrapped, LOSS)
    assert all(shapes == [(2, 37, 32)] * 2 for shapes in seen.values())
    assert_tiled(wrapped, count=1)


# -- how often things run


@pytest.mark.parametrize("adapted", [False, True])
def test_attention_runs_once_and_the_mlp_twice_for_each_layer_and_tile(store, monkeypatch, adapted):
    wrapped = build("llama")
    wrapped = offload.wrap(lora(wrapped) if adapted else wrapped, policy=tiled())
    step(wrapped, LOSS)
    attention, forwards = count_attention(monkeypatch), count_mlp(monkeypatch, wrapped)
    loss = LOSS(wrapped)
    assert attention == [10, 10, 10, 7] * 2
    assert len(forwards) == 2 * 4
    loss.backward()
    assert attention == [10, 10, 10, 7] * 2
    first, second = (id(layer.mlp) for layer in decoder_layers(wrapped))
    assert forwards == [first] * 4 + [second] * 4 + [second] * 4 + [first] * 4


def test_frozen_layers_below_are_not_run_again(store, monkeypatch):
    plain = build("llama", num_hidden_layers=3)
    for part in (plain.model.embed_tokens, *plain.model.layers[:2]):
        part.requires_grad_(False)
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled())
    assert_close_step(plain, wrapped, LOSS)
    forwards = count_mlp(monkeypatch, wrapped)
    step(wrapped, LOSS)
    assert [forwards.count(id(layer.mlp)) for layer in wrapped.model.layers] == [4, 4, 8]
    layers = offload.report(wrapped).layers
    assert [layer.recomputes for layer in layers[:3]] == [0, 0, 2]
    assert [layer.forwards for layer in layers[:3]] == [0, 0, 2]
    assert [layer.offloaded_tensors > 0 for layer in layers[:3]] == [False, False, True]
