"""Models, batches and comparisons of the tests of tiled mode."""

import contextlib
import copy
import sys

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

import offload
from tests.models import calls_of, step

V5 = int(transformers.__version__.split(".")[0]) >= 5
VOCAB, WINDOW, LONGEST = 97, 9, 1024
TOLERANCE = 1e-12
"""In float64: of the loss, and of each gradient's largest entry; see `assert_close_gradients`."""

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
HEADS = {**LLAMA, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2}
CONFIGS = {
    "llama": ("LlamaConfig", LLAMA),
    "llama, tied": ("LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", LLAMA),
    "qwen3": ("Qwen3Config", HEADS),
    "mistral": ("MistralConfig", {**LLAMA, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        {
            **HEADS,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "opt": (
        "OPTConfig",
        {
            **{k: v for k, v in SIZES.items() if k != "initializer_range"},
            "init_std": 0.2,
            "ffn_dim": 48,
            "word_embed_proj_dim": 16,
            "max_position_embeddings": LONGEST,
            "dropout": 0.0,
        },
    ),
    "gpt2": (
        "GPT2Config",
        {**SIZES, "n_positions": LONGEST, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "gpt_neox": ("GPTNeoXConfig", {**SIZES, "intermediate_size": 48, "rotary_pct": 0.5}),
    "phi3": ("Phi3Config", LLAMA),
    "mixtral": ("MixtralConfig", {**LLAMA, **EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**HEADS, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24},
    ),
}
OWN_MASKS = {
    "falcon": ("FalconConfig", SIZES),
    "falcon, alibi": ("FalconConfig", {**SIZES, "alibi": True}),
    "bloom": ("BloomConfig", {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "mpt": ("MptConfig", {**SIZES, "max_seq_len": 64}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            **SIZES,
            "num_layers": 2,  # is compared with the types before the other name is understood
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "max_position_embeddings": 64,
        },
    ),
}
"""Families whose layers are given S x S masks or biases that the model computes itself."""


def tiled(tile_tokens: int = 10, mode: str = "tiled", **options) -> offload.Policy:
    """A policy that copies everything to the arena and, unless told otherwise, never falls back."""
    options = {"tier": "host", "min_bytes": 0} | options
    return offload.Policy(mode=mode, tile_tokens=tile_tokens, **options)


def build(name="llama", dtype=torch.float64, **changes):
    torch.manual_seed(0)
    class_name, options = (CONFIGS | OWN_MASKS)[name]
    config = getattr(transformers, class_name)(**copy.deepcopy(options) | changes)
    if V5:
        config._experts_implementation = "eager"  # the default has no float64
    attention = "eager" if name == "gemma2" else "sdpa"  # only eager knows softcap
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=None if name in OWN_MASKS else attention
    )
    return _spread(model).to(dtype).train()


def _spread(model: nn.Module) -> nn.Module:
    """Moves biases and norms away from 0 and 1, where mistakes do not show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


# -- a model without transformers


class NanoBlock(nn.Module):
    """A block of nanoGPT: one projection for q, k, v, and torch's causal attention."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attend(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x: torch.Tensor, **options) -> torch.Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, **{"is_causal": True} | options)
        return out.transpose(1, 2).reshape(x.shape)


class WithUnusedParameters(NanoBlock):
    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.unused = nn.Linear(width, width)


class NanoGPT(nn.Module):
    """Learned positions, blocks, a norm and a tied head; returns logits."""

    def __init__(self, width: int = 32, layers: int = 2, block: type[nn.Module] = NanoBlock):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList([block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, **layer_arguments) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, **layer_arguments)
        return self.head(self.norm(x))


def nano(dtype=torch.float64, **options):
    torch.manual_seed(0)
    return _spread(NanoGPT(**options)).to(dtype).train()


# -- batches and losses


def batch(rows=2, length=37, kind="whole", seed=1):
    """Token ids, labels and masks: whole, padded on the left or right, or packed documents."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    labels, inputs = ids.clone(), {"input_ids": ids}
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        padding = [max(1, length // 4), *range(rows - 1)]
        for row, count in enumerate(padding):
            padded = slice(count) if kind == "left" else slice(length - count, length)
            mask[row, padded] = 0
        ids[mask == 0], labels[mask == 0] = 0, -100
        inputs["attention_mask"] = mask
    if kind == "packed":
        first, second = length // 3, length // 2
        lengths = (first, second - first, length - second)
        starts = torch.cat([torch.arange(count) for count in lengths])
        inputs["position_ids"] = starts.expand(rows, -1).contiguous()
        labels[:, [0, first, second]] = -100
    return inputs, labels


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the next tokens, in the dtype of the logits."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def loss_on(*shape, **options):
    """Returns the loss of a model on a batch, as a function of the model; see `batch`."""
    inputs, labels = batch(*shape, **options)

    def loss_of(model):
        if isinstance(model, NanoGPT):
            return cross_entropy(model(inputs["input_ids"]), labels)
        return cross_entropy(model(**inputs, use_cache=False).logits, labels)

    return loss_of


@contextlib.contextmanager
def stays_float64():
    """Keeps transformers from narrowing float64 in norms, routers and eager attention.

    Where a value is rounded to float32, the last bit of float64 can decide about the last bit of
    float32. Left alone are what offload does and the rotary tables, which are made once a model. A
    function mode would not be seen in backward.
    """
    with pytest.MonkeyPatch.context() as patch:
        for place in (torch.Tensor, torch, F):
            for name in ("to", "float", "softmax"):
                if hasattr(place, name) and callable(getattr(place, name)):
                    patch.setattr(place, name, _not_narrowing(getattr(place, name)))
        yield


def _not_narrowing(function):
    def call(x, *args, **kwargs):
        if x.dtype == torch.float64 and _narrows(sys._getframe(1)):
            if function is _TO_FLOAT:
                return x
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return function(x, *args, **kwargs)

    return call


def _narrows(caller) -> bool:
    is_rotary = "Rotary" in type(caller.f_locals.get("self")).__name__
    return caller.f_globals["__name__"].startswith("transformers.models") and not is_rotary


_TO_FLOAT = torch.Tensor.float


# -- comparisons


def assert_tiled(model: nn.Module, count: int | None = None, mode: str = "tiled") -> None:
    """Every decoder layer ran in a mode, and nothing of its tape is left."""
    layers = [layer for layer in offload.report(model).layers if _is_decoder(model, layer.name)]
    assert layers
    assert [layer.mode for layer in layers] == [mode] * len(layers)
    assert all(layer.forwards for layer in layers)
    if count is not None:
        assert [layer.recomputes for layer in layers] == [count] * len(layers)


def _is_decoder(model: nn.Module, name: str) -> bool:
    return name.rpartition(".")[2].isdigit() or name.isdigit()


def assert_close_gradients(ours, theirs, tolerance=TOLERANCE) -> None:
    """Each gradient differs by at most a part of its own largest entry, 0 from None never.

    Gradients that are next to nothing, such as those of key biases, count as a thousandth of the
    largest entry of all.
    """
    assert ours.keys() == theirs.keys()
    largest = max(g.abs().max().item() for g in theirs.values() if g is not None)
    assert largest > 0
    for name, expected in theirs.items():
        if expected is None or ours[name] is None:
            assert ours[name] is None, f"{name}: expected None"
            assert expected is None, f"{name}: expected a gradient, got None"
            continue
        scale = max(expected.abs().max().item(), 1e-3 * largest)
        error = (ours[name] - expected).abs().max().item()
        assert error <= tolerance * scale, f"{name}: {error / scale:.1e}"


def assert_close_step(plain, wrapped, loss_of, tolerance=TOLERANCE, seed=7) -> None:
    """One training step gives the same loss and gradients in both models."""
    with stays_float64():
        expected, expected_grads, _ = step(plain, loss_of, seed)
        loss, grads, _ = step(wrapped, loss_of, seed)
    assert abs(loss - expected) <= tolerance * abs(expected)
    assert_close_gradients(grads, expected_grads, tolerance)


def assert_tiles_change_nothing(plain, loss_of, tile_tokens, **options) -> nn.Module:
    """Wraps a copy of a model and compares one step; returns the copy."""
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(tile_tokens, **options))
    assert_close_step(plain, wrapped, loss_of)
    assert_tiled(wrapped, count=1)
    return wrapped


def lora(model, **options):
    """Adds LoRA adapters that already do something; the base is frozen."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    return [call.module for call in calls_of(model) if _is_decoder(model, call.name)]
