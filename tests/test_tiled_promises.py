"""What tiled mode promises besides gradients: hooks, fallbacks, graphs, copies, what is run."""

import contextlib
import copy
import pickle
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
import offload.tape
from offload.errors import LayerRefused, OffloadError
from tests.conftest import settle
from tests.models import FORCED, assert_same_step, gradients, step
from tests.tiled import (
    NanoBlock,
    NanoGPT,
    assert_close_gradients,
    assert_close_step,
    assert_tiled,
    batch,
    build,
    cross_entropy,
    decoder_layers,
    lora,
    loss_on,
    nano,
    stays_float64,
    tiled,
)

pytestmark = pytest.mark.filterwarnings("error:.*offload")
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


# -- what else is asked of the library's models


def test_hidden_states_equal_the_plain_models(store):
    plain, wrapped = pair(build)
    results = {}

    def loss_of(model):
        inputs, labels = batch(2, 37, "left")
        output = model(**inputs, output_hidden_states=True, use_cache=False)
        results[model] = output.hidden_states
        inner = sum((i + 1) * h.square().mean() for i, h in enumerate(output.hidden_states))
        return cross_entropy(output.logits, labels) + inner

    assert_close_step(plain, wrapped, loss_of)
    assert len(results[plain]) == len(results[wrapped]) == 3
    for ours, theirs in zip(results[wrapped], results[plain], strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    assert_tiled(wrapped, count=1)


def attentions_loss(model, **options):
    output = model(batch(2, 37)[0]["input_ids"], use_cache=False, **options)
    assert len(output.attentions) == 2
    return output.logits.square().mean() + sum(a.square().sum() for a in output.attentions)


@pytest.mark.parametrize("by_config", [False, True])
def test_attentions_are_right_in_auto_and_refused_in_tiled(store, by_config):
    plain = build("llama")
    plain.set_attn_implementation("eager")
    options = {} if by_config else {"output_attentions": True}
    plain.config.output_attentions = by_config
    wrapped = offload.wrap(copy.deepcopy(plain), policy=AUTO)
    with one_warning("output_attentions is on"):
        assert_same_step(plain, wrapped, lambda model: attentions_loss(model, **options))
    assert_tiled(wrapped, mode="checkpoint")
    offload.wrap(wrapped, policy=tiled())
    with pytest.raises(LayerRefused, match="output_attentions is on"):
        attentions_loss(wrapped, **options)
    for model in (plain, wrapped):
        model.config.output_attentions = False
    assert_close_step(plain, wrapped, LOSS)
    assert_tiled(wrapped)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("by_config", [False, True])
def test_router_logits_are_right_in_auto_and_refused_in_tiled(store, name, by_config):
    changes = {"router_aux_loss_coef": 0.5, "output_router_logits": by_config}
    plain = build(name, **changes)
    wrapped = offload.wrap(copy.deepcopy(plain), policy=AUTO)
    inputs, labels = batch(2, 37)
    options = {} if by_config else {"output_router_logits": True}

    def loss_of(model):
        output = model(**inputs, labels=labels, use_cache=False, **options)
        assert len(output.router_logits) == 2
        assert output.aux_loss.requires_grad
        return cross_entropy(output.logits, labels) + 0.5 * output.aux_loss

    with one_warning("output_router_logits is on"):
        assert_close_step(plain, wrapped, loss_of)
    assert_tiled(wrapped, mode="checkpoint")
    offload.wrap(wrapped, policy=tiled())
    with pytest.raises(LayerRefused, match="output_router_logits is on"):
        loss_of(wrapped)


@pytest.mark.parametrize("kind", ["additive", "bool", "of keys", "with a hole"])
def test_a_users_own_mask_falls_back(store, kind):
    plain = build("llama")
    causal = torch.ones(2, 1, 37, 37, dtype=torch.bool).tril()
    bias = torch.randn(2, 1, 37, 37, generator=torch.Generator().manual_seed(2)).double()
    mask = {
        "additive": bias.masked_fill(~causal, torch.finfo(torch.float64).min),
        "bool": causal & (bias > -1) | torch.eye(37, dtype=torch.bool),
        "of keys": bias[:, :, :1],
        "with a hole": bias[:, 0, 0] > -1,
    }[kind]

    def loss_of(model):
        output = model(batch(2, 37)[0]["input_ids"], attention_mask=mask, use_cache=False)
        return output.logits[:, 20:].square().mean()

    wrapped = offload.wrap(copy.deepcopy(plain), policy=AUTO)
    with one_warning("runs in checkpoint mode"):
        assert_close_step(plain, wrapped, loss_of)
    assert_tiled(wrapped, mode="checkpoint")
    offload.wrap(wrapped, policy=tiled())
    with pytest.raises(LayerRefused, match="run tile by tile"):
        loss_of(wrapped)


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "whole"), ("gemma2", "right")])
def test_dropout_of_attention_falls_back_and_draws_the_plain_models_masks(store, name, kind):
    changes = {"attn_pdrop": 0.1, "resid_pdrop": 0.1} if name == "gpt2" else {}
    plain = build(name, **changes or {"attention_dropout": 0.1})
    wrapped = offload.wrap(copy.deepcopy(plain), policy=AUTO)
    with one_warning("its attention has dropout"):
        assert_close_step(plain, wrapped, loss_on(2, 37, kind=kind))
    assert_tiled(wrapped, mode="checkpoint")
    for model in (plain, wrapped):
        model.eval()
    assert_close_step(plain, wrapped, loss_on(2, 37, kind=kind))
    assert_tiled(wrapped)


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


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_librarys_checkpointing_on_top_changes_nothing(store, monkeypatch, reentrant):
    plain, wrapped = pair(build)
    wrapped.gradient_checkpointing_enable({"use_reentrant": reentrant})
    wrapped.enable_input_require_grads()
    assert_close_step(plain, wrapped, LOSS)
    forwards = count_mlp(monkeypatch, wrapped)
    step(wrapped, LOSS)
    assert len(forwards) == 2 * 2 * 4
    assert_tiled(wrapped, count=2)


def test_backward_does_not_move_pythons_random_numbers(store):
    _, wrapped = pair()
    loss = LOSS(wrapped)
    first = random.random()
    loss.backward()
    del loss  # or the expected failure keeps the graph
    assert random.random() != first


# -- without gradients


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_cache_is_filled_and_generation_equals_the_plain_models(store, name):
    plain, wrapped = pair(build, name=name)
    step(wrapped, LOSS)  # proved already
    for model in (plain, wrapped):
        model.eval()
    prompt = batch(2, 37)[0]["input_ids"]
    with torch.no_grad():
        caches = [model(prompt, use_cache=True).past_key_values for model in (plain, wrapped)]
        assert caches[1].get_seq_length() == 37
        following = [
            model(prompt[:, :1], past_key_values=cache, use_cache=True).logits
            for model, cache in zip((plain, wrapped), caches, strict=True)
        ]
    assert torch.equal(*following)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(plain.generate(prompt, **options), wrapped.generate(prompt, **options))


@pytest.mark.parametrize(
    ("name", "guard"),
    [
        ("llama", torch.no_grad),
        ("mistral", torch.inference_mode),
        ("mixtral", torch.no_grad),
    ],
)
def test_without_gradients_and_cache_tiles_give_the_same(store, monkeypatch, name, guard):
    plain, wrapped = pair(build, name=name)
    inputs, _ = batch(2, 37, "left")
    calls = count_attention(monkeypatch)
    with guard(), stays_float64():
        for training in (True, False):
            outputs = [
                m.train(training)(**inputs, use_cache=False).logits for m in (plain, wrapped)
            ]
            assert (outputs[0] - outputs[1]).abs().max() <= 1e-12 * outputs[0].abs().max()
    assert len(calls) >= 2 * 2 * 4  # really by tiles
    assert all(layer.forwards == 0 for layer in offload.report(wrapped).layers)


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


# -- layers of no library


class Biased(NanoBlock):
    """Adds a learned bias of positions that its caller passes by keyword."""

    def forward(self, x, position_bias=None):
        return super().forward(x + position_bias[:, : x.shape[1]])


class BiasedGPT(NanoGPT):
    def __init__(self):
        super().__init__(block=Biased)
        self.bias = nn.Parameter(torch.randn(1, 37, 32))

    def forward(self, ids):
        return super().forward(ids, position_bias=self.bias)


def test_a_parameter_passed_by_keyword_gets_its_gradient(store):
    torch.manual_seed(0)
    plain = BiasedGPT().double()
    wrapped = offload.wrap(copy.deepcopy(plain), policy=AUTO)
    with one_warning("'position_bias' requires gradients as well"):
        assert_close_step(plain, wrapped, LOSS)
    assert bool(wrapped.bias.grad.any())
    assert_tiled(wrapped, mode="checkpoint")
    offload.wrap(wrapped, policy=tiled())
    with pytest.raises(LayerRefused, match="position_bias"):
        LOSS(wrapped)
    for model in (plain, wrapped):  # as a constant it is cut along the sequence
        model.bias.requires_grad_(False)
    assert_close_step(plain, wrapped, LOSS)
    assert_tiled(wrapped)


class Masked(NanoBlock):
    """Takes an additive mask for the attention weights."""

    def forward(self, x, bias=None):
        bias = bias.unflatten(0, (1, -1))[0] if bias.ndim == 4 else bias[0]
        x = x + self.out(self.attend(self.norm1(x), attn_mask=bias, is_causal=False))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.mark.parametrize("shape", [(1, 2, 1, 37, 37), (2, 1, 37, 37), (2, 4, 1, 37)])
def test_a_mask_of_a_layer_of_no_library_falls_back(store, shape):
    plain = nano(block=Masked)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()
    inputs, labels = batch(2, 37)

    def loss_of(model):
        return cross_entropy(model(inputs["input_ids"], bias=bias), labels)

    wrapped = offload.wrap(copy.deepcopy(plain), policy=AUTO)
    with one_warning("runs in checkpoint mode"):
        assert_close_step(plain, wrapped, loss_of)
    assert_tiled(wrapped, mode="checkpoint")


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
