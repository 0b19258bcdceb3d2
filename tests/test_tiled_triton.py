"""Tiled mode over the Triton kernels: on a card, or on the CPU by the interpreter."""

import copy

import pytest
import torch

import offload
from tests.tiled import assert_close_step, assert_tiled, build, loss_on, nano, tiled

backend = pytest.importorskip("offload.ops.fused.backend")
pytestmark = pytest.mark.skipif(not backend.INTERPRETED, reason="compares on the CPU")
FLOAT32 = 1e-4
"""Of a gradient's largest entry; over torch's kernels tiles differ as much from the plain model."""
FEW_HEADS = {  # the interpreter takes its time for each
    "llama": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "opt": {"num_attention_heads": 2},
}


def count_launches(monkeypatch) -> dict[str, int]:
    counts = dict.fromkeys(("forward", "backward_queries", "backward_keys"), 0)

    def counting(name, function):
        def launch(*arguments):
            counts[name] += 1
            return function(*arguments)

        return launch

    for name in counts:
        monkeypatch.setattr(backend, name, counting(name, getattr(backend, name)))
    return counts


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "whole"), ("llama", "left"), ("llama", "packed"), ("opt", "whole"), ("opt", "left")],
)
def test_a_family_of_transformers_in_float32(store, monkeypatch, name, kind):
    plain = build(name, torch.float32, **FEW_HEADS[name])
    policy = tiled(16, attention="triton")
    wrapped = offload.wrap(copy.deepcopy(plain), policy=policy)
    counts = count_launches(monkeypatch)
    loss_of = loss_on(1, 37, kind)
    assert_close_step(plain, wrapped, loss_of, FLOAT32)
    assert_tiled(wrapped, count=1)
    # Three tiles of two layers that see one, two and three blocks; no attention is computed twice.
    blocks = 2 * (1 + 2 + 3)
    assert counts["forward"] <= blocks
    assert counts["forward"] == counts["backward_queries"] == counts["backward_keys"]
    if kind != "packed":  # a later document does not see the blocks of the first
        assert counts["forward"] == blocks


def test_a_model_without_transformers(store):
    plain = nano(torch.float32)
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(16, attention="triton"))
    assert_close_step(plain, wrapped, loss_on(1, 37), FLOAT32)
    assert_tiled(wrapped, count=1)


def test_a_forward_without_gradients(store):
    plain = build("llama", torch.float32).eval()
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(16, attention="triton"))
    ids = torch.arange(37).unsqueeze(0)
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
        actual = wrapped(ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=FLOAT32 * expected.abs().max())


@pytest.mark.parametrize("mode", ["tiled", "auto"])
def test_triton_that_was_asked_for_and_cannot_run_is_an_error(store, monkeypatch, mode):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    model = offload.wrap(build("llama", torch.float32), policy=tiled(16, mode, attention="triton"))
    with pytest.raises(ValueError, match=r"'triton' takes, got tensors on cpu\. Use 'auto'"):
        loss_on(1, 37)(model)


def test_auto_takes_torch_on_the_cpu(store, monkeypatch):
    counts = count_launches(monkeypatch)
    model = offload.wrap(build("llama", torch.float32), policy=tiled(16))
    loss_on(1, 37)(model).backward()
    assert not any(counts.values())
