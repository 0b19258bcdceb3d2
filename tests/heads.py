"""Models of transformers with a head, batches and the loss that the tests of heads compare with."""

import copy

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM

from offload.adapters.transformers.head import install_head
from tests.models import gradients

VOCAB, CHUNK = 97, 10
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "llama, tied": transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(**LLAMA, head_dim=8, final_logit_softcapping=0.5),
    "opt": transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
    "gpt2": transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES, intermediate_size=48),
    "gptj": transformers.GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    "bloom": transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "mixtral": transformers.MixtralConfig(
        **LLAMA, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1
    ),
    "cohere": transformers.CohereConfig(**LLAMA, logit_scale=0.4),
    "granite": transformers.GraniteConfig(**LLAMA, logits_scaling=3.0),
}


def build(name="llama", dtype=torch.float64):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    config._experts_implementation = "eager"  # the default of 5.24 has no float64
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():  # far from the flat distribution of a fresh model
        model.get_output_embeddings().weight.mul_(20)
    return model.eval()  # without dropout, which would need one seed for both


def installed(name="llama", dtype=torch.float64):
    model = build(name, dtype)
    install_head(model, CHUNK)
    return model


def batch(rows=2, length=23):
    ids = torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def loss_in_float64(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    """The library's loss, but without its conversion to float32."""
    targets, ignore_index = kwargs.get("shift_labels"), kwargs.get("ignore_index", -100)
    if targets is None:
        targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    total = F.cross_entropy(
        logits.view(-1, vocab_size), targets.reshape(-1), reduction="sum", ignore_index=ignore_index
    )
    items = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / items


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output.loss.detach(), gradients(model)


def assert_same(ours, plain, tolerance=1e-10):
    torch.testing.assert_close(ours[0], plain[0], rtol=0, atol=tolerance)
    assert ours[1].keys() == plain[1].keys()
    for name, expected in plain[1].items():
        torch.testing.assert_close(
            ours[1][name], expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
