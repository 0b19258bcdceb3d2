"""Models on meta: what they weigh, shortened, quantised, copied."""

import copy

import pytest
import torch
from torch import nn

from offload.planner.outline import outline_of, to_meta
from offload.planner.quantised import QuantisedLinear, nf4_bytes
from tests.planner.cases import Plain, llama

PUBLISHED = {
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_248_023_552,
    "gemma-2-2b": 2_614_341_888,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_presets_have_as_many_parameters_as_their_models(name, parameters):
    assert outline_of(name).parameter_count == parameters


def test_four_bits_change_what_is_stored_not_what_is_counted():
    plain, packed = (outline_of(llama(), lora=4, four_bit=four) for four in (False, True))
    assert packed.parameter_count == plain.parameter_count
    assert packed.trained_bytes == plain.trained_bytes
    assert packed.weight_bytes < plain.weight_bytes
    assert packed.is_quantised
    assert not plain.is_quantised


def test_nf4_holds_half_a_byte_a_value_and_scales():
    assert nf4_bytes(4096 * 4096) == 4096 * 4096 // 2 + 262_144 + 4 * 1024


def test_a_quantised_layer_makes_its_weight_anew_in_both_directions():
    from offload.planner.ledger import Ledger

    layer = QuantisedLinear(64, 128, nf4_bytes(64 * 128), torch.float32, None)
    ledger = Ledger()
    with ledger:
        ledger.begin("forward")
        x = torch.empty(8, 64, device="meta", requires_grad=True)
        out = layer(x)
        ledger.begin("backward")
        out.sum().backward()
        ledger.finish()
    forward, backward = ledger.segments
    weight = 4 * 64 * 128
    assert sum(forward.peak) == 4 * 8 * (64 + 128) + weight
    assert sum(backward.peak) >= weight
    assert sum(forward.end) == 4 * 8 * (64 + 128)
    assert x.grad.shape == (8, 64)


class Packed(nn.Linear):
    """As bitsandbytes holds a layer: bytes in place of its weight."""

    def __init__(self, linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.compute_dtype = torch.float32


def test_quantised_models_are_planned_with_the_bytes_they_hold():
    import offload

    model = Plain()
    for block in model.blocks:
        block.qkv = Packed(block.qkv)
    held = sum(p.nbytes for p in model.parameters())
    made = offload.plan(model, tokens=256, optimizer="none")
    assert made.purposes["weights"] == held
    assert isinstance(model.blocks[0].qkv, Packed)


def test_copies_on_meta_keep_ties_and_flags_and_leave_the_model_alone():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(llama(tie_word_embeddings=True))
    model.model.embed_tokens.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    copied = to_meta(model)
    assert all(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers()))
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert not copied.lm_head.weight.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_shortened_model_shares_weights_and_has_the_first_layers():
    outline = outline_of(Plain())
    model, named = outline.shortened(2)
    assert [name for name, _ in named] == ["blocks.0", "blocks.1"]
    assert len(model.blocks) == 2
    assert len(outline.model.blocks) == 5
    assert named[0][1] is model.blocks[0]
    assert model.head.weight is outline.model.head.weight
    whole, all_named = outline.shortened(9)
    assert whole is not outline.model
    assert all_named[4][1] is whole.blocks[4]


def test_wrapped_models_are_planned_as_if_they_were_not():
    import offload

    model = offload.wrap(Plain())
    copied = to_meta(model)
    assert all("forward" not in vars(module) for module in copied.modules())
    assert "forward" in vars(model.blocks[0])
