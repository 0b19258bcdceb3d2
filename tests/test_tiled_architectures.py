"""Tiled mode equals the unwrapped model in float64; for transformers 5.24 and 4.57."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from tests.models import gradients, step
from tests.tiled import (
    CONFIGS,
    V5,
    NanoBlock,
    NanoGPT,
    WithUnusedParameters,
    assert_close_gradients,
    assert_close_step,
    assert_tiled,
    assert_tiles_change_nothing,
    batch,
    build,
    cross_entropy,
    lora,
    loss_on,
    nano,
    stays_float64,
    tiled,
)

pytestmark = pytest.mark.filterwarnings("error:.*offload")
padded_opt = pytest.mark.skipif(not V5, reason="OPT of 4.57 makes S x S masks of padding: refused")
FAMILIES = [
    pytest.param(name, marks=padded_opt if name == "opt" else ())
    for name in CONFIGS
    if name != "llama, tied"
]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("rows", "length", "tile", "kind"), [(2, 37, 10, "left"), (1, 1000, 512, "right")]
)
def test_a_family_of_transformers(store, name, rows, length, tile, kind):
    if name == "gemma2":
        kind = "right"  # eager attention spreads a row without keys over all of them
    assert_tiles_change_nothing(build(name), loss_on(rows, length, kind=kind), tile)


@pytest.mark.parametrize(
    ("name", "rows", "length", "tile", "kind"),
    [
        ("llama", 1, 37, 1, "right"),
        ("mixtral", 1, 37, 1, "left"),
        ("gpt2", 2, 37, 1, "whole"),
        ("llama", 1, 37, 37, "left"),
        pytest.param("opt", 2, 37, 37, "right", marks=padded_opt),
        ("opt", 2, 37, 10, "whole"),
        ("llama", 2, 1000, 37, "left"),
        ("mistral", 1, 1000, 37, "left"),
        ("qwen2", 1, 1000, 1000, "whole"),
        ("llama", 8, 8, 3, "left"),  # as long as there are rows, and as a head is wide
        ("gpt_neox", 2, 2, 1, "whole"),
    ],
)
def test_any_tile(store, name, rows, length, tile, kind):
    assert_tiles_change_nothing(build(name), loss_on(rows, length, kind=kind), tile)


@pytest.mark.parametrize(
    ("rows", "length", "tile"), [(2, 37, 10), (1, 37, 1), (2, 1000, 512), (1, 1000, 37)]
)
def test_a_model_without_transformers(store, rows, length, tile):
    assert_tiles_change_nothing(nano(), loss_on(rows, length), tile)


class WithOurAttention(NanoBlock):
    """Calls `offload.attention` itself: a window, and one key head for two query heads."""

    def attend(self, x):
        q, k, v = (
            part.view(*x.shape[:2], -1, 8).transpose(1, 2)
            for part in self.qkv(x).split([32, 32, 32], dim=-1)
        )
        out = offload.attention(q, k[:, :2], v[:, :2], window_size=9, softcap=2.0)
        return out.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("tile", [10, 37])
def test_a_layer_that_calls_our_attention(store, tile):
    assert_tiles_change_nothing(nano(block=WithOurAttention), loss_on(2, 37), tile)


@pytest.mark.parametrize(
    ("name", "length", "tile"), [("llama", 37, 10), ("mistral", 37, 5), ("gemma2", 300, 37)]
)
def test_packed_documents(store, name, length, tile):
    plain, loss_of = build(name), loss_on(2, length, kind="packed")
    assert_tiles_change_nothing(plain, loss_of, tile)
    inputs, _ = batch(2, length, kind="packed")
    with torch.no_grad():  # documents do not see each other, or the test shows nothing
        packed = plain(**inputs, use_cache=False).logits
        alone = plain(input_ids=inputs["input_ids"], use_cache=False).logits
    assert (packed - alone).abs().max() > 1e-3


def test_tied_weights_of_embedding_and_head(store):
    plain = build("llama, tied")
    wrapped = assert_tiles_change_nothing(plain, loss_on(2, 37), 10)
    assert wrapped.lm_head.weight is wrapped.model.embed_tokens.weight


class TwiceTheSameProjection(NanoBlock):
    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.again = nn.Linear(width, width)
        self.again.weight = self.out.weight

    def forward(self, x):
        return super().forward(x) + self.again(x)


@pytest.mark.parametrize("tied_across", [False, True])
def test_tied_weights_inside_layers_and_across_them(store, tied_across):
    plain = nano(block=TwiceTheSameProjection)
    if tied_across:
        plain.blocks[1].qkv = plain.blocks[0].qkv
    assert_tiles_change_nothing(plain, loss_on(2, 37), 10)


def test_parameters_that_a_layer_does_not_use_get_no_gradient(store):
    wrapped = assert_tiles_change_nothing(nano(block=WithUnusedParameters), loss_on(2, 37), 10)
    assert wrapped.blocks[0].unused.weight.grad is None


def test_one_layer_called_twice(store):
    plain = nano()
    plain.blocks.extend([plain.blocks[0], plain.blocks[1]])
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(10))
    assert_close_step(plain, wrapped, loss_on(2, 37))
    assert_tiled(wrapped, count=2)


@pytest.mark.parametrize("order", ["wrap, peft", "peft, wrap", "wrap, peft, wrap"])
def test_lora_with_a_frozen_base(store, order):
    wrapped = build("llama")
    plain = lora(copy.deepcopy(wrapped))
    for action in order.split(", "):
        wrapped = lora(wrapped) if action == "peft" else offload.wrap(wrapped, policy=tiled(10))
    assert_close_step(plain, wrapped, loss_on(2, 37, kind="left"))
    assert_tiled(wrapped, count=1)
    trained = {name: g for name, g in gradients(wrapped).items() if g is not None}
    assert trained
    assert all("lora_" in name for name in trained)


def test_lora_adapters_switched_off_and_on_between_steps(store):
    plain = lora(build("qwen2"))
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(10))
    loss_of = loss_on(1, 37)
    assert_close_step(plain, wrapped, loss_of)
    for model in (plain, wrapped):
        model.base_model.model.model.embed_tokens.requires_grad_(True)
    with plain.disable_adapter(), wrapped.disable_adapter():
        assert_close_step(plain, wrapped, loss_of)
    for model in (plain, wrapped):
        model.base_model.set_adapter("default")
    assert_close_step(plain, wrapped, loss_of)
    assert_tiled(wrapped, count=3)


def test_an_adapter_on_the_first_layer_only_leaves_the_others_without_gradients(store):
    plain = lora(build("llama"), target_modules=["q_proj", "down_proj"], layers_to_transform=[0])
    wrapped = assert_tiles_change_nothing(plain, loss_on(1, 37), 10)
    assert all(p.grad is None for p in wrapped.base_model.model.model.layers[1].parameters())


def test_three_accumulated_batches_of_different_lengths(store):
    plain = build("qwen2")
    losses = [loss_on(2, 37), loss_on(1, 300, seed=2), loss_on(3, 11, kind="left", seed=3)]

    def backward_thrice(model):
        for loss_of in losses[:-1]:
            loss_of(model).backward()
        return losses[-1](model)

    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(37))
    assert_close_step(plain, wrapped, backward_thrice)
    assert_tiled(wrapped, count=3)


def test_two_steps_of_full_fine_tuning_in_evaluation_and_training_mode(store):
    plain = build("qwen3")
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(10))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, wrapped)]
    for training in (True, False, True):
        plain.train(training)
        wrapped.train(training)
        assert_close_step(plain, wrapped, loss_on(2, 37), tolerance=1e-9)  # Adam divides by tiny
        for optimizer in optimizers:
            optimizer.step()
    assert_tiled(wrapped, count=3)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_that_come_from_a_part_of_the_tokens_only(store, name):
    """Tiles behind the last token with a loss get zeros, those before it their share."""
    plain = build(name)
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(10))
    inputs, _ = batch(2, 37)
    for token in (0, 9, 10, 36):

        def loss_of(model, token=token):
            return model(**inputs, use_cache=False).logits[:, token].square().mean()

        assert_close_step(plain, wrapped, loss_of)
    assert_tiled(wrapped, count=4)


@pytest.mark.parametrize("inputs_need_gradients", [True, False])
def test_hidden_states_given_by_the_caller(store, inputs_need_gradients):
    plain = build("llama")
    embeds = torch.randn(2, 37, 32, dtype=torch.float64)
    leaves = []

    def loss_of(model):
        leaves.append(embeds.clone().requires_grad_(inputs_need_gradients))
        return model(inputs_embeds=leaves[-1], use_cache=False).logits.square().mean()

    for parameter in plain.parameters():
        parameter.requires_grad_(not inputs_need_gradients)
    if not inputs_need_gradients:
        assert_tiles_change_nothing(plain, loss_of, 10)
        return
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(10))
    with stays_float64():
        for model in (plain, wrapped):
            loss_of(model).backward()
    assert_close_gradients({"x": leaves[1].grad}, {"x": leaves[0].grad})
    assert_tiled(wrapped, count=1)


# -- dropout


class TilesWithoutRecompute:
    """Runs a layer of OPT tile by tile with autograd on, its attention over all earlier keys.

    It draws its random numbers in the order that tiled mode promises: layer by layer, in a layer
    tile by tile, in a tile as the layer draws them; the model's own between the layers.
    """

    def __init__(self, layer, tile):
        self.layer, self.tile, self.keys = layer, tile, []

    def __call__(self, hidden, **arguments):
        self.keys.clear()
        parts = []
        for begin in range(0, hidden.shape[1], self.tile):
            part = hidden[:, begin : begin + self.tile]
            output = type(self.layer).forward(self.layer, part, attention_mask=None)
            parts.append(output[0] if isinstance(output, tuple) else output)
        whole = torch.cat(parts, dim=1)
        return whole if V5 else (whole,)

    def attend(self, query, key, value, scaling):
        self.keys.append((key, value))
        key, value = (torch.cat(parts, dim=2) for parts in zip(*self.keys, strict=True))
        rows, keys = query.shape[2], key.shape[2]
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling)


def _attention_without_recompute(module, query, key, value, mask, scaling=None, **options):
    assert mask is None
    assert not options.get("dropout")
    return module.runner.attend(query, key, value, scaling).transpose(1, 2), None


@pytest.mark.parametrize("tile", [10, 37])
def test_dropout_draws_the_same_masks_in_the_recompute(store, tile):
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("tests", _attention_without_recompute)
    AttentionMaskInterface.register("tests", lambda *args, **kwargs: None)
    reference = build("opt", dropout=0.1, attention_dropout=0.0)
    wrapped = offload.wrap(copy.deepcopy(reference), policy=tiled(tile))
    reference.set_attn_implementation("tests")
    for layer in reference.model.decoder.layers:
        layer.forward = layer.self_attn.runner = TilesWithoutRecompute(layer, tile)

    def loss_of(model):
        loss = loss_on(2, 37)(model)
        torch.manual_seed(99)  # backward must not depend on what is drawn in between
        return loss

    assert_close_step(reference, wrapped, loss_of, seed=3)
    assert_tiled(wrapped, count=1)
    first = loss_of(wrapped).item()
    torch.manual_seed(4)
    assert abs(loss_of(wrapped).item() - first) > 1e-6  # there is dropout at all
    torch.manual_seed(6)
    expected = torch.rand(1)
    torch.manual_seed(5)
    loss = loss_on(2, 37)(wrapped)
    torch.manual_seed(6)
    loss.backward()
    assert torch.equal(torch.rand(1), expected)  # nor does it move the generator


# -- narrow dtypes


def _errors(run, truth, truth_grads):
    loss, grads = run
    errors = {"loss": abs(loss.double() - truth) / abs(truth)}
    for name, expected in truth_grads.items():
        errors[name] = (grads[name].double() - expected).norm() / expected.norm()
    return {name: float(error) for name, error in errors.items()}


def assert_no_worse_than_plain(plain, wrapped, truth, loss_of):
    """Loss and each gradient are at most twice as far from the truth as the plain model's."""
    exact, exact_grads, _ = step(truth, loss_of)
    exact_grads = {name: grad for name, grad in exact_grads.items() if grad is not None}
    results = [step(model, loss_of)[:2] for model in (plain, wrapped)]
    theirs, ours = (_errors(result, exact, exact_grads) for result in results)
    assert max(theirs.values()) > 1e-3  # the plain model's error is one of a narrow dtype
    for name in theirs:
        assert ours[name] <= 2 * theirs[name] + 1e-3, f"{name}: {ours[name]} > 2 {theirs[name]}"


@pytest.mark.parametrize(("length", "tile", "kind"), [(300, 37, "whole"), (63, 10, "left")])
def test_bfloat16_is_as_exact_as_the_plain_model(store, length, tile, kind):
    plain = build("llama", dtype=torch.bfloat16)
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(tile))
    truth = copy.deepcopy(plain).float()
    inputs, labels = batch(2, length, kind)

    def loss_of(model):
        return cross_entropy(model(**inputs, use_cache=False).logits.float(), labels)

    assert_no_worse_than_plain(plain, wrapped, truth, loss_of)
    assert_tiled(wrapped, count=1)


def test_gradients_are_summed_over_tiles_in_float32(store):
    """In bfloat16, 512 + 1 is 512; the sum of 512, 1, 1 and 1 is nearest to 516."""
    wrapped = offload.wrap(nano(torch.bfloat16), policy=tiled(10))
    outputs = []
    wrapped.blocks[-1].register_forward_hook(lambda module, args, out: outputs.append(out))
    wrapped(batch(1, 37)[0]["input_ids"])
    cotangent = torch.zeros(1, 37, 32, dtype=torch.bfloat16)
    cotangent[:, [0, 10, 20]], cotangent[:, 36] = 1, 512
    outputs.pop().backward(cotangent)
    assert wrapped.blocks[-1].down.bias.grad.tolist() == [516.0] * 32
    assert_tiled(wrapped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapted", [False, True])
def test_autocast_is_as_exact_as_the_plain_model_under_autocast(store, dtype, adapted):
    plain = build("llama", dtype=torch.float32)
    plain = lora(plain) if adapted else plain
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(37))
    inputs, labels = batch(2, 100, "left")

    def loss_of(model):
        with torch.autocast("cpu", dtype, enabled=model is not truth):
            logits = model(**inputs, use_cache=False).logits
        return cross_entropy(logits.float(), labels)

    truth = copy.deepcopy(plain)
    assert_no_worse_than_plain(plain, wrapped, truth, loss_of)
    for grad in gradients(wrapped).values():
        assert grad is None or (grad.dtype == torch.float32 and bool(grad.any()))
    assert_tiled(wrapped, count=1)


class SharesAWeight(NanoGPT):
    """Uses a weight inside of a layer, and once more behind it."""

    def forward(self, ids):
        return super().forward(ids) + F.linear(
            F.linear(self.tokens(ids), self.blocks[-1].out.weight), self.head.weight
        )


def test_autocast_of_a_weight_that_is_used_again_outside_of_its_layer(store):
    """The cast that a tile made without gradients must not serve there."""
    torch.manual_seed(0)
    plain = SharesAWeight()
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(10))
    truth = copy.deepcopy(plain)
    inputs, labels = batch(2, 37)

    def loss_of(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=model is not truth):
            logits = model(inputs["input_ids"])
        return cross_entropy(logits.float(), labels)

    assert_no_worse_than_plain(plain, wrapped, truth, loss_of)
    assert_tiled(wrapped, count=1)
