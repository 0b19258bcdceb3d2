"""What tiled mode makes of a call's options: outputs, masks, dropout, caches, other layers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.errors import LayerRefused
from tests.models import assert_same_step, step
from tests.tiled import (
    V5,
    NanoBlock,
    NanoGPT,
    assert_close_step,
    assert_tiled,
    assert_tiles_change_nothing,
    batch,
    build,
    cross_entropy,
    loss_on,
    nano,
    stays_float64,
    tiled,
)
from tests.tiled_pairs import (
    AUTO,
    LOSS,
    assert_falls_back,
    count_attention,
    count_mlp,
    one_warning,
    pair,
)

pytestmark = pytest.mark.filterwarnings("error:.*offload")


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

    reason = "output_router_logits is on"
    assert_falls_back(plain, wrapped, loss_of, warning=reason, refusal=reason)


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
    assert_falls_back(
        plain, wrapped, loss_of, warning="runs in checkpoint mode", refusal="run tile by tile"
    )


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


@pytest.mark.skipif(V5, reason="5.24 does not run models with softcap by sdpa")
def test_a_softcap_that_the_models_own_attention_ignores_is_ignored(store):
    plain = build("gemma2")
    inputs, _ = batch(2, 37)
    with torch.no_grad():
        capped = plain(**inputs, use_cache=False).logits
        plain.set_attn_implementation("sdpa")
        uncapped = plain(**inputs, use_cache=False).logits
    assert (capped - uncapped).abs().max() > 1e-3
    assert_tiles_change_nothing(plain, loss_on(2, 37, kind="right"), 10)


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
