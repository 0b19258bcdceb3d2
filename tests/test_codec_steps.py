"""Training steps whose activations pass through a codec: what is encoded, and what it costs."""

import dataclasses

import pytest
import torch

import offload
from bench import codec as bench_codec
from bench.models import add_lora, build_batch, build_model, convert_smollm2
from bench.spec import StepSpec
from offload.policy import Codecs
from tests.models import FORCED, blocks, calls_of, gradients, on, step, twins
from tests.tiled import assert_tiled, tiled

SPEC = StepSpec("llama", 400, hidden=256, layers=2, heads=4, kv_heads=4, mlp=256, vocab=97)


def flat(grads):
    return torch.cat([g.flatten().double() for g in grads.values() if g is not None])


def cosine_of_steps(lossless, lossy, loss_of):
    _, expected, _ = step(lossless, loss_of)
    _, grads, _ = step(lossy, loss_of)
    return torch.nn.functional.cosine_similarity(flat(expected), flat(grads), dim=0).item()


def loss_of(model):
    ids = build_batch(SPEC)
    return model(input_ids=ids, labels=ids).loss


def wide_pair(codec, dtype="float32"):
    spec = dataclasses.replace(SPEC, dtype=dtype)
    policies = [tiled(64, keep_last=0, codec=c) for c in (None, codec)]
    return [offload.wrap(build_model(spec), policy=policy) for policy in policies]


@pytest.mark.parametrize(
    ("codec", "error_range"), [("fp8", (0.02, 0.03)), ("int8", (0.001, 0.012))]
)
def test_every_role_is_encoded_and_its_error_reported(store, codec, error_range):
    lossless, lossy = wide_pair(codec)
    assert 0.999 < cosine_of_steps(lossless, lossy, loss_of) < 1 - 1e-9
    assert_tiled(lossy, count=1)
    report = offload.report(lossy)
    assert report.codec_errors.keys() == {"input", "kv", "attention"}
    least, most = error_range
    assert all(least < error < most for error in report.codec_errors.values())
    assert all(layer.codec_errors for layer in report.layers if layer.offloaded_bytes)
    assert "codec: relative error input " in str(report)
    assert offload.report(lossless).codec_errors == {}


@pytest.mark.parametrize("role", Codecs._fields)
def test_a_role_alone_is_encoded(store, role):
    _, lossy = wide_pair({role: "fp8"})
    step(lossy, loss_of)
    assert offload.report(lossy).codec_errors.keys() == {role}


def test_a_codec_of_nothing_changes_nothing(store):
    lossless, same = wide_pair(dict.fromkeys(Codecs._fields))
    _, expected, _ = step(lossless, loss_of)
    _, grads, _ = step(same, loss_of)
    assert torch.equal(flat(expected), flat(grads))


def test_keys_values_and_inputs_in_fp8_take_at_most_0_52_of_their_bytes_in_bfloat16(store):
    moved = []
    for model in wide_pair({"input": "fp8", "kv": "fp8"}, "bfloat16"):
        step(model, lambda m: m.model(build_batch(SPEC)).last_hidden_state.float().pow(2).mean())
        moved.append([layer.offloaded_bytes for layer in offload.report(model).layers[:2]])
    outputs = 400 * (256 * 2 + 4 * 4)  # attention's output and its LSE stay as they are
    for exact, lossy in zip(*moved, strict=True):
        assert exact - outputs == 400 * 256 * 3 * 2
        assert (lossy - outputs) / (exact - outputs) <= 0.52


@pytest.mark.parametrize("codec", ["fp8", {"input": "fp8"}])
def test_in_checkpoint_mode_layer_inputs_are_encoded(store, codec):
    policy = offload.Policy(mode="checkpoint", tier="host", min_bytes=0, codec=codec)
    lossless, lossy = twins(offload.wrap(blocks(4, 256), policy=FORCED), policy)
    assert 0.999 < cosine_of_steps(lossless, lossy, on(torch.randn(1, 100, 256))) < 1 - 1e-9
    layers = offload.report(lossy).layers
    # The first input is data and needs no gradient; the last stays where it is.
    assert [set(layer.codec_errors) for layer in layers] == [set(), {"input"}, {"input"}, set()]


def test_a_mask_among_the_inputs_passes_unchanged(store):
    """A float mask of zeros and -inf would not survive a lossy codec."""

    class Masked(torch.nn.Linear):
        def forward(self, hidden, mask):
            assert mask.isinf().any()
            assert (mask[mask > -1] == 0).all()
            return hidden + (super().forward(hidden).unsqueeze(-1) + mask).logsumexp(-1)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Masked(64, 64) for _ in range(3))

        def forward(self, hidden):
            mask = torch.zeros(1, hidden.shape[1], 64, 4)
            mask[..., 1:] = float("-inf")
            for layer in self.layers:
                hidden = layer(hidden, mask)
            return hidden

    torch.manual_seed(0)
    policy = offload.Policy(mode="checkpoint", tier="host", min_bytes=0, codec="int8")
    lossless, lossy = twins(Model(), policy)
    assert cosine_of_steps(lossless, lossy, on(torch.randn(1, 64, 64))) > 0.999


def test_a_graph_that_is_kept_decodes_the_same_twice(store):
    _, lossy = wide_pair("fp8")
    loss = loss_of(lossy)
    loss.backward(retain_graph=True)
    once = flat(gradients(lossy))
    lossy.zero_grad()
    loss.backward()
    assert torch.equal(flat(gradients(lossy)), once)


def test_fifty_lora_steps_on_a_real_text_lose_nothing_visible(store):
    """The first layers of SmolLM2-135M; `python -m bench codec` trains the whole model."""
    from transformers import AutoModelForCausalLM

    directory = str(convert_smollm2())
    spec = StepSpec("smollm2", 50 * 24, input_directory=directory)
    curves = []
    for codec in (None, "fp8"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(
            directory, num_hidden_layers=2, local_files_only=True
        )
        model = add_lora(model, 8).train()
        offload.wrap(model, policy=tiled(12, keep_last=0, codec=codec))
        curves.append(torch.tensor(list(bench_codec.train(model, spec, 24, 2e-3))))
        assert all(call.record.recomputes == 50 for call in calls_of(model)[:2])
    lossless, lossy = curves
    assert lossless[-10:].mean() < lossless[:10].mean() - 1
    assert not torch.equal(lossy, lossless)
    assert (lossy - lossless).abs().max() < 0.02 * lossless[0]
    assert abs(lossy[-10:].mean() - lossless[-10:].mean()) < 0.005 * lossless[0]
