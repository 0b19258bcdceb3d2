"""Wraps a model of your own: any nn.Module with repeated layers, no library needed.

Attention is torch's own fused function, which offload takes over while the layer runs tile by tile;
the loss is computed from hidden states, so that the logits of all tokens never exist at once.

Run: `python examples/plain_pytorch.py --tokens 4096`.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import offload


class Block(nn.Module):
    """A pre-norm transformer layer: hidden states [B, S, E] in and out."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs causal attention and the MLP."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )  # each [B, H, S, D]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A small language model: token ids [B, S] in, hidden states [B, S, E] out."""

    def __init__(self, vocab: int = 512, hidden: int = 128, heads: int = 4, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns what the head turns into logits of the next token."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def main() -> None:
    """Trains on random tokens and prints the loss of each step, then what offload moved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    ids = torch.randint(512, (1, args.tokens + 1), device=device)

    # On a card the defaults do; tier="host" and min_bytes=0 make the copies visible on a CPU too.
    offload.wrap(model, policy=offload.Policy(tier="host", min_bytes=0))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        hidden = model(ids[:, :-1])
        loss = offload.linear_cross_entropy(hidden, model.head.weight, ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    print(offload.report(model))


if __name__ == "__main__":
    main()
