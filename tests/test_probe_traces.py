"""What a layer reads from elsewhere or leaves elsewhere keeps it from being run by tiles."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offload
from offload.adapters.hooks import has_user_hook
from offload.errors import LayerRefused, OffloadError
from tests.models import Stack, gradients
from tests.test_probe import WIDTH, Attending, verdict_of

TILED = offload.Policy(mode="tiled", tile_tokens=16)
AUTO = offload.Policy(tile_tokens=16)


def hidden(tokens: int = 50) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, tokens, WIDTH)


class Conditioned(Attending):
    """Adds a tensor that the model sets on it before the call."""

    condition: torch.Tensor | None = None

    def mix(self, x):
        return x + self.condition


class Sharing(Attending):
    """Uses a module that is registered elsewhere."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = [shared]

    def mix(self, x):
        return x + self.shared[0](x)


class KeepingLoss(Attending):
    def forward(self, x):
        out = super().forward(x)
        self.penalty = out.square().mean()
        return out


class CollectingLosses(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.penalties = []

    def forward(self, x):
        out = super().forward(x)
        self.penalties.append(out.square().mean())
        return out


class FillingArgument(Attending):
    def forward(self, x, found=None):
        out = super().forward(x)
        if found is not None:
            found.append(out.mean())
        return out


class Returning(Attending):
    def forward(self, x):
        return super().forward(x), x.shape[1]


class GraphBuffer(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH).requires_grad_() * 1.0)

    def mix(self, x):
        return x * self.scale


class Drawing(Attending):
    def forward(self, x, generator=None):
        return super().forward(x + torch.rand(WIDTH, generator=generator))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Sharing(nn.Linear(WIDTH, WIDTH)), "neither an argument nor a parameter"),
        (KeepingLoss, "writes to its attribute 'penalty'"),
        (CollectingLosses, "writes to its attribute 'penalties'"),
        (Returning, "something else besides the hidden states"),
        (GraphBuffer, "buffer that requires gradients"),
    ],
    ids=["shared module", "kept loss", "collected losses", "number beside", "buffer in the graph"],
)
def test_what_tiles_would_lose_is_refused(build, reason):
    layer = build()
    before = {key: value for key, value in layer.__dict__.items() if key != "_modules"}
    assert reason in verdict_of(layer, torch.float32).refusal
    assert {key: value for key, value in layer.__dict__.items() if key != "_modules"} == before


def test_a_container_argument_that_a_layer_fills_is_refused():
    assert "container" in verdict_of(FillingArgument(), torch.float32, found=[]).refusal


def test_a_generator_argument_is_refused_untouched():
    layer = offload.wrap(Stack([Drawing()]), layers=Drawing, policy=TILED).layers[0]
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    with pytest.raises(LayerRefused, match="given a random generator"):
        layer(hidden(), generator=generator)
    assert torch.equal(generator.get_state(), state)


def test_gradients_reach_a_tensor_that_the_model_sets_on_its_layers():
    torch.manual_seed(0)
    plain = Stack([Conditioned(), Conditioned()])
    wrapped = offload.wrap(copy.deepcopy(plain), layers=Conditioned, policy=AUTO)
    found = []
    for model in (plain, wrapped):
        style = torch.ones(WIDTH, requires_grad=True)
        for layer in model.layers:
            layer.condition = style.tanh()
        if model is wrapped:
            with pytest.warns(UserWarning, match="checkpoint mode"):
                model(hidden()).square().mean().backward()
        else:
            model(hidden()).square().mean().backward()
        found.append(style.grad)
    torch.testing.assert_close(*found)


class OwnRotary(Attending):
    """Positions counted inside, behind an output that is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.out.weight)

    def heads(self, x):
        heads = super().heads(x)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 7
        return heads * angle.cos() + heads.roll(1, -1) * angle.sin()


class ScaledByLength(Attending):
    def attend(self, q, k, v):
        scale = 0.1 * torch.tensor(float(q.shape[2])).log().item()
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OwnRotary, "gives to attention changes with the length"),
        (ScaledByLength, "scaled by the length"),
    ],
)
def test_what_reaches_attention_is_compared_however_little_it_adds(kind, reason):
    assert reason in verdict_of(kind(), torch.float32).refusal


class Scaled(Attending):
    def forward(self, x, shift=None):
        return super().forward(x + shift)


def test_an_argument_changed_in_place_before_backward_raises():
    model = offload.wrap(Stack([Scaled()]), layers=Scaled, policy=TILED)
    shift = torch.ones(WIDTH)
    loss = model.layers[0](hidden(), shift=shift).sum()
    shift.add_(1)
    with pytest.raises(OffloadError, match=r"argument of shape .* modified in place"):
        loss.backward()


@pytest.mark.parametrize("mode", ["tiled", "checkpoint"])
def test_training_flags_of_the_forward_count_in_the_recompute(mode):
    torch.manual_seed(0)
    layer = Attending(dropout=0.5)
    policy = offload.Policy(mode=mode, tile_tokens=16)
    model = offload.wrap(Stack([layer]), layers=Attending, policy=policy)
    found = []
    for switch in (False, True):
        model.train().zero_grad()
        torch.manual_seed(3)
        loss = model(hidden()).square().mean()
        if switch:
            model.eval()
        loss.backward()
        found.append(gradients(model))
        assert model.training is not switch
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


@pytest.mark.parametrize("mode", ["tiled", "checkpoint"])
def test_parameters_of_another_model_by_functional_call_count_in_the_recompute(mode):
    torch.manual_seed(0)
    plain, other = Stack([Attending()]), Stack([Attending()])
    policy = offload.Policy(mode=mode, tile_tokens=16)
    wrapped = offload.wrap(copy.deepcopy(plain), layers=Attending, policy=policy)
    found = []
    for model in (plain, wrapped):
        other.zero_grad()
        out = torch.func.functional_call(model, dict(other.named_parameters()), (hidden(),))
        out.square().mean().backward()
        found.append(gradients(other))
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mode", ["tiled", "checkpoint"])
def test_a_parameter_given_other_memory_before_backward_raises(mode):
    policy = offload.Policy(mode=mode, tile_tokens=16)
    model = offload.wrap(Stack([Attending()]), layers=Attending, policy=policy)
    loss = model(hidden()).sum()
    weight = model.layers[0].up.weight
    weight.data = weight.data.clone()
    with pytest.raises(OffloadError, match="parameters of layer"):
        loss.backward()


class SkippingItself(Attending):
    def forward(self, x):
        attends = not self.training or torch.rand(()) < 0.5
        return super().forward(x) if attends else x * 2


class DroppingAttention(Attending):
    def forward(self, x):
        out = super().forward(x)
        attends = not self.training or torch.rand(()) < 0.5
        return out if attends else x + 0 * out.detach()


@pytest.mark.parametrize(
    ("kind", "error"),
    [(SkippingItself, "for some tokens and not for others"), (DroppingAttention, "or for none")],
)
def test_chance_that_decides_about_attention_tile_by_tile_raises(kind, error):
    model = offload.wrap(Stack([kind()]), layers=kind, policy=AUTO)

    def steps():
        for _ in range(12):
            x = hidden()
            model(x).sum().backward()

    with pytest.raises(OffloadError, match=error):
        steps()


def test_verify_is_not_misled_by_dropout_and_moves_no_random_number():
    model = offload.wrap(Stack([Attending(0.3)]), layers=Attending, policy=TILED, verify=True)
    x = hidden()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with torch.no_grad():
        model.eval()(x)
    assert torch.equal(torch.rand(1), expected)
    model.train()(x).sum().backward()


def test_a_users_own_checkpoint_around_a_wrapped_layer_is_no_reason_to_refuse():
    from torch.utils.checkpoint import checkpoint

    model = offload.wrap(Stack([Attending()]), layers=Attending, policy=TILED)
    x = hidden().requires_grad_()
    checkpoint(model.layers[0], x, use_reentrant=False).sum().backward()
    assert x.grad is not None


def test_a_hook_of_a_program_whose_name_begins_like_a_librarys_is_a_users():
    def hook(module, args):
        """Does nothing."""

    layer = Attending()
    layer.up.register_forward_pre_hook(hook)
    assert not has_user_hook(layer)
    for origin, users in (("peft_utils", True), ("peft.tuners.lora", False), ("__main__", True)):
        hook.__module__ = origin
        assert has_user_hook(layer.up) is users
