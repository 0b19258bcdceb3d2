"""The probe accepts what acts on each token alone but for attention; it refuses all else."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offload
from offload.errors import LayerRefused
from offload.layer_arguments import LayerArguments
from offload.probe import prove
from tests.models import Block, Stack, gradients

WIDTH = 32
HEADS = 2
TOKENS = 300  # the probe sees the first 256


class Attending(Block):
    """A layer that calls torch's fused attention; its children spoil it in one place."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(WIDTH, dropout)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def keys(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        out = self.attend(self.heads(q), self.heads(self.keys(x, k)), self.heads(v))
        return super().forward(x + self.out(out.transpose(1, 2).flatten(2)))


class ConvolvedKeys(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def keys(self, x, k):
        return self.conv(F.pad(k.transpose(1, 2), (2, 0))).transpose(1, 2)


class ZeroConvolution(ConvolvedKeys):
    """Still the identity: only the convolution's own gradient shows that it mixes."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)

    def keys(self, x, k):
        return k + super().keys(x, k)


class ShiftedTokens(Attending):
    def mix(self, x):
        return x + 0.1 * F.pad(x, (0, 0, 1, 0))[:, :-1]


class GatedShift(Attending):
    """A shift behind a gate that starts at zero, or at very little."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((WIDTH,), start))

    def mix(self, x):
        return x + self.gate * F.pad(x, (0, 0, 1, 0))[:, :-1]


class FaintShift(GatedShift):
    def __init__(self) -> None:
        super().__init__(1e-5)


class OwnSoftmax(Attending):
    """Bidirectional attention that no route sees."""

    def attend(self, q, k, v):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class Bidirectional(Attending):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Twice(Attending):
    def attend(self, q, k, v):
        return super().attend(q, k, v) - super().attend(k, q, v)


class BorrowedKeys(Attending):
    """Keys of another layer, as models have them that share keys between layers."""

    borrowed: torch.Tensor | None = None

    def keys(self, x, k):
        if self.borrowed is None or self.borrowed.shape != k.shape:
            self.borrowed = torch.randn(k.shape, dtype=k.dtype)
        return self.borrowed


class BatchStatistics(Attending):
    def mix(self, x):
        return (x - x.mean(dim=(0, 1), keepdim=True)) / x.std(dim=(0, 1), keepdim=True)


class DetachedStatistics(Attending):
    """A scale of the whole tensor, as dynamic quantisation has it; no gradient flows through it."""

    def mix(self, x):
        return x / x.detach().abs().max()


class RunningStatistics(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def mix(self, x):
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class Counting(Attending):
    """Writes to a buffer at every call; harmless for the result, but tiles would count too much."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def mix(self, x):
        self.calls += 1
        return x


class CapacityRouter(Attending):
    """Drops tokens of an expert beyond its capacity, first come first served."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)

    def mix(self, x):
        chosen = self.router(x).argmax(-1)  # [B, S]
        place = F.one_hot(chosen, 4).cumsum(1).gather(-1, chosen[..., None])
        return x * (1 + (place <= max(8, x.shape[1] // 8)).to(x.dtype))


class LengthThreshold(Attending):
    limit = 200

    def mix(self, x):
        return x * (1.05 if x.shape[1] > self.limit else 1.0)


class LowThreshold(LengthThreshold):
    limit = 5


class OwnPositions(Attending):
    """Positions that the layer counts itself, from zero."""

    def mix(self, x):
        return x + torch.arange(x.shape[1]).to(x)[:, None] / 100


class WritesIntoInput(Attending):
    def mix(self, x):
        return x.mul_(0.5)


class Shortened(Attending):
    def forward(self, x):
        return super().forward(x)[:, 1:]


class WithoutCausalMask(Attending):
    def attend(self, q, k, v):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


REFUSED = {
    ConvolvedKeys: "key at a token depends on other tokens",
    ZeroConvolution: "gradient of a parameter depends on other tokens",
    ShiftedTokens: "at a token depends on other tokens",
    GatedShift: "gradient of a parameter depends on other tokens",
    FaintShift: "depends on other tokens|gradient at other tokens",
    OwnSoftmax: "output at a token depends on other tokens",
    Bidirectional: "not causal",
    Twice: "attention more than once",
    BorrowedKeys: "keys do not come from its hidden states",
    BatchStatistics: "depends on other tokens",
    DetachedStatistics: "depends on other tokens",
    RunningStatistics: "depends on other tokens|writes to its buffer",
    Counting: "writes to its buffer 'calls'",
    CapacityRouter: "depends on other tokens",
    LengthThreshold: "changes with the length of a tile",
    LowThreshold: "changes with the length of a tile",
    OwnPositions: "changes with the length of a tile",
    WritesIntoInput: "trial run raised RuntimeError",
    Shortened: "another number of tokens",
    WithoutCausalMask: "gets a mask",
}


def verdict_of(layer: nn.Module, dtype: torch.dtype, **arguments):
    torch.manual_seed(0)
    hidden = torch.randn(2, TOKENS, WIDTH, dtype=dtype)
    call = LayerArguments(layer.forward, (hidden,), arguments)
    return prove(layer, layer.forward, call, hidden, attends=True)


def made(kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_mixes_tokens_or_changes_with_length_is_refused(kind, dtype):
    verdict = verdict_of(made(kind, dtype), dtype)
    assert verdict.refusal
    assert any(part in verdict.refusal for part in REFUSED[kind].split("|")), verdict.refusal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", [Attending, Block], ids=lambda kind: kind.__name__)
def test_right_layers_are_accepted_also_with_dropout(kind, dropout, dtype):
    torch.manual_seed(0)
    layer = (Attending(dropout) if kind is Attending else Block(WIDTH, dropout)).to(dtype)
    assert verdict_of(layer, dtype).refusal == ""


def test_a_frozen_gate_that_is_zero_is_harmless_and_a_trainable_one_is_not():
    layer = GatedShift()
    layer.gate.requires_grad_(False)
    assert verdict_of(layer, torch.float32).refusal == ""
    layer.gate.requires_grad_(True)
    assert verdict_of(layer, torch.float32).refusal


def test_a_gate_that_is_unfrozen_after_the_proof_is_proved_anew():
    layer = GatedShift()
    layer.gate.requires_grad_(False)
    model = offload.wrap(
        Stack([layer]), layers=Attending, policy=offload.Policy(mode="tiled", tile_tokens=64)
    )
    x = torch.randn(1, 128, WIDTH)
    model(x).sum().backward()
    layer.gate.requires_grad_(True)
    with pytest.raises(LayerRefused, match="gradient of a parameter depends on other tokens"):
        model(x)


def test_the_probe_leaves_no_trace():
    layer = made(RunningStatistics, torch.float32)
    hook_calls = []
    layer.qkv.weight.register_hook(hook_calls.append)
    parameters = dict(layer.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    layer.out.weight.grad = torch.ones_like(layer.out.weight)
    torch.manual_seed(3)
    expected = torch.rand(1)
    hidden = torch.randn(2, TOKENS, WIDTH)
    call = LayerArguments(layer.forward, (hidden,), {})
    torch.manual_seed(3)
    assert prove(layer, layer.forward, call, hidden, attends=True).refusal
    assert torch.equal(torch.rand(1), expected)
    assert all(parameter is parameters[name] for name, parameter in layer.named_parameters())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in layer.named_buffers())
    assert torch.equal(layer.out.weight.grad, torch.ones_like(layer.out.weight))
    assert layer.qkv.weight.grad is None
    assert not hook_calls
    assert all(module.training for module in layer.modules())


def test_a_proof_on_few_tokens_does_not_hold_for_more():
    layer = made(LengthThreshold, torch.float32)
    model = offload.wrap(
        Stack([layer]), layers=Attending, policy=offload.Policy(mode="tiled", tile_tokens=64)
    )
    model(torch.randn(1, 100, WIDTH)).sum().backward()  # below the threshold: one behaviour
    with pytest.raises(LayerRefused, match="changes with the length of a tile"):
        model(torch.randn(1, 256, WIDTH))


class LateThreshold(LengthThreshold):
    limit = 400


def test_verify_finds_what_only_happens_beyond_the_probe():
    policy = offload.Policy(mode="tiled", tile_tokens=128)
    x = torch.randn(1, 512, WIDTH)
    late = made(LateThreshold, torch.float32)
    unseen = offload.wrap(Stack([late]), layers=Attending, policy=policy)
    unseen(x)  # what the docstring says the probe cannot see
    seen = offload.wrap(Stack([late]), layers=Attending, policy=policy, verify=True)
    with pytest.raises(LayerRefused, match=r"verify: .*changes with the length of a tile"):
        seen(x)


def test_verify_accepts_a_right_layer():
    policy = offload.Policy(mode="tiled", tile_tokens=100)
    model = offload.wrap(Stack([Attending()]), layers=Attending, policy=policy, verify=True)
    model(torch.randn(2, 512, WIDTH)).sum().backward()
    assert {layer.mode for layer in offload.report(model).layers} == {"tiled"}


def test_a_refused_layer_runs_in_checkpoint_mode_with_one_message_and_right_gradients():
    torch.manual_seed(0)
    plain = Stack([Attending(), ShiftedTokens(), ShiftedTokens()])
    wrapped = Stack([Attending(), ShiftedTokens(), ShiftedTokens()])
    wrapped.load_state_dict(plain.state_dict())
    offload.wrap(wrapped, layers=Attending, policy=offload.Policy(tile_tokens=64))
    x = torch.randn(1, 128, WIDTH)
    with pytest.warns(UserWarning, match=r"'layers\.1' runs in checkpoint mode") as caught:
        wrapped(x).square().mean().backward()
    assert len([w for w in caught if "checkpoint mode" in str(w.message)]) == 1
    wrapped.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(x).square().mean().backward()
    assert [layer.mode for layer in offload.report(wrapped).layers] == [
        "tiled",
        "checkpoint",
        "checkpoint",
    ]
    plain(x).square().mean().backward()
    expected = gradients(plain)
    for name, grad in gradients(wrapped).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


def test_an_argument_of_unknown_meaning_is_refused():
    class WithMask(Attending):
        def forward(self, x, weights=None, table=None):
            return super().forward(x) * (1 if weights is None else weights[:, :, None])

    layer = WithMask()
    x = torch.randn(1, 64, WIDTH)
    weights = torch.rand(1, 64)
    call = LayerArguments(layer.forward, (x,), {"weights": weights})
    assert prove(layer, layer.forward, call, x, attends=True).refusal == ""
    with pytest.raises(LayerRefused, match="'table' has 2 dimensions as long as the sequence"):
        LayerArguments(layer.forward, (x,), {"table": torch.zeros(64, 64)})
    with pytest.raises(LayerRefused, match="'weights' requires gradients"):
        LayerArguments(layer.forward, (x,), {"weights": nn.Parameter(weights)})
