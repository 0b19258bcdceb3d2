"""Wrapping changes how layers run and nothing else that a program can see."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import offload
from tests.models import FORCED, Block, Stack, assert_same_step, blocks, calls_of, step


def loss_of(model):
    return model(torch.linspace(-1, 1, 2 * 9 * 32).view(2, 9, 32)).pow(2).mean()


def test_wrap_returns_the_same_object_with_the_same_parameters(store):
    model = blocks(3)
    names, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    wrapped = offload.wrap(model, policy=FORCED)
    assert wrapped is model
    assert type(wrapped) is Stack
    assert isinstance(wrapped.layers[0], Block)
    assert list(wrapped.state_dict()) == names
    assert [id(p) for p in wrapped.parameters()] == parameters
    assert list(dict(wrapped.named_modules())) == list(dict(blocks(3).named_modules()))


def test_wrapping_twice_runs_each_layer_twice_not_more(store):
    plain = blocks(3)
    wrapped = offload.wrap(offload.wrap(copy.deepcopy(plain), policy=FORCED), policy=FORCED)
    counts = []
    for layer in wrapped.layers:
        layer.up.register_forward_hook(lambda *_: counts.append(1))
    assert_same_step(plain, wrapped, loss_of, steps=1)
    assert len(counts) == 6


def test_wrapping_again_takes_the_new_policy(store):
    wrapped = offload.wrap(blocks(3), policy=offload.Policy(mode="keep"))
    offload.wrap(wrapped, policy=FORCED)
    step(wrapped, loss_of)
    assert offload.report(wrapped).moved_bytes > 0


def test_unwrap_leaves_no_trace_and_is_harmless_on_a_plain_model(store):
    model = blocks(3)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    offload.unwrap(model)
    offload.unwrap(offload.wrap(model, policy=FORCED))
    after = {name: dict(m.__dict__) for name, m in model.named_modules()}
    assert {name: d.keys() for name, d in after.items()} == {n: d.keys() for n, d in before.items()}


def test_a_graph_made_before_unwrap_still_runs_its_backward(store):
    plain, wrapped = blocks(3), offload.wrap(blocks(3), policy=FORCED)
    loss_of(plain).backward()
    loss = loss_of(wrapped)
    offload.unwrap(wrapped)
    loss.backward()
    for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_copy_uses_its_own_weights_and_still_offloads(store):
    wrapped = offload.wrap(blocks(3), policy=FORCED)
    twin = copy.deepcopy(wrapped)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    x = torch.randn(1, 4, 32)
    with torch.no_grad():
        assert torch.equal(twin(x), x)
    step(twin, loss_of)
    assert [call.record.offloaded_tensors for call in calls_of(twin)] == [1, 1, 0]
    assert [call.record.offloaded_tensors for call in calls_of(wrapped)] == [0, 0, 0]


def test_a_copy_of_one_layer_is_a_layer_not_the_whole_model(store):
    wrapped = offload.wrap(Stack([Block() for _ in range(3)]), policy=FORCED)
    wrapped.ballast = nn.Parameter(torch.zeros(1 << 18))
    assert len(pickle.dumps(wrapped.layers[0])) < 1 << 18
    x = torch.randn(1, 2, 32)
    assert torch.equal(copy.deepcopy(wrapped.layers[0])(x), wrapped.layers[0](x))


@pytest.mark.parametrize("save", ["pickle", "torch"])
def test_a_pickled_model_stays_wrapped(store, save):
    wrapped = offload.wrap(blocks(3), policy=FORCED)
    step(wrapped, loss_of)
    buffer = io.BytesIO()
    if save == "pickle":
        pickle.dump(wrapped, buffer)
        buffer.seek(0)
        twin = pickle.load(buffer)
    else:
        torch.save(wrapped, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert_same_step(blocks(3), twin, loss_of, steps=1)
    assert [call.record.offloaded_tensors for call in calls_of(twin)] == [1, 1, 0]


class WithInstanceForward(Block):
    def __init__(self) -> None:
        super().__init__()
        self.forward = self._fast

    def _fast(self, hidden):
        return super().forward(hidden) * 2


def test_a_forward_set_on_the_instance_is_honoured_and_back_after_unwrap(store):
    torch.manual_seed(0)
    plain = Stack([WithInstanceForward() for _ in range(3)])
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    assert_same_step(plain, wrapped, loss_of)
    assert_same_step(plain, copy.deepcopy(wrapped), loss_of, steps=1)
    offload.unwrap(wrapped)
    assert wrapped.layers[0].forward == wrapped.layers[0]._fast


def test_a_class_swapped_after_wrapping_is_followed(store):
    class Doubled(Block):
        def forward(self, hidden):
            return super().forward(hidden) * 2

    plain, wrapped = blocks(3), offload.wrap(blocks(3), policy=FORCED)
    for layer in (*plain.layers, *wrapped.layers):
        layer.__class__ = Doubled
    assert_same_step(plain, wrapped, loss_of, steps=1)


def test_forward_hooks_on_a_layer_run_once(store):
    wrapped = offload.wrap(blocks(3), policy=FORCED)
    seen = []
    layer = wrapped.layers[1]
    layer.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    layer.register_forward_hook(lambda m, args, out: seen.append("post"))
    layer.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    step(wrapped, loss_of)
    assert seen == ["pre", "post", "backward"]


def test_a_parameter_hook_fires_once_with_the_whole_gradient(store):
    plain, wrapped = blocks(3), offload.wrap(blocks(3), policy=FORCED)
    for model in (plain, wrapped):
        model.layers[0].up.weight.register_hook(lambda g: 2 * g)
    assert_same_step(plain, wrapped, loss_of)


def test_the_signature_is_the_layers_own(store):
    wrapped = offload.wrap(blocks(2), policy=FORCED)
    assert list(inspect.signature(wrapped.layers[0].forward).parameters) == ["hidden"]


def test_an_optimizer_made_before_wrapping_trains_the_model(store):
    plain, wrapped = blocks(3), blocks(3)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, wrapped)]
    offload.wrap(wrapped, policy=FORCED)
    for _ in range(3):
        for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    expected = plain.state_dict()
    assert all(torch.equal(value, expected[n]) for n, value in wrapped.state_dict().items())


def test_a_layer_on_meta_is_refused(store):
    model = blocks(3)
    model.layers[1].to("meta")
    with pytest.raises(offload.LayerRefused, match=r"layers\.1.*meta device.*Load the model"):
        offload.wrap(model)
    assert not calls_of(model)


def test_a_layer_moved_to_meta_after_wrapping_is_refused(store):
    wrapped = offload.wrap(blocks(3), policy=FORCED)
    wrapped.layers[1].to("meta")
    with pytest.raises(offload.LayerRefused, match=r"layers\.1"):
        loss_of(wrapped)


@pytest.mark.parametrize("order", ["dispatch, wrap", "wrap, dispatch"])
def test_a_layer_that_accelerate_loads_per_call_is_refused(store, order, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = blocks(3)
    if order == "wrap, dispatch":
        offload.wrap(model, policy=FORCED)
    accelerate.disk_offload(model.layers[1], tmp_path, execution_device="cpu")
    with pytest.raises(offload.LayerRefused, match=r"layers\.1.*(accelerate|meta)"):
        loss_of(model if order == "wrap, dispatch" else offload.wrap(model))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (7, TypeError, "expected a torch.nn.Module, got int"),
        (nn.DataParallel(nn.Linear(2, 2)), TypeError, "DataParallel"),
        (
            torch.compile(blocks(2), backend="eager"),
            TypeError,
            "compiled one. Wrap the model first",
        ),
    ],
)
def test_what_cannot_be_wrapped_is_an_error(model, error, message):
    with pytest.raises(error, match=message):
        offload.wrap(model)


def test_a_policy_must_be_a_policy():
    with pytest.raises(TypeError, match=r"offload\.Policy"):
        offload.wrap(blocks(2), policy={"mode": "keep"})


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_the_whole_model_is_refused(store, fullgraph):
    wrapped = offload.wrap(blocks(2), policy=FORCED)
    compiled = torch.compile(wrapped, backend="eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match=r"layer\.mlp\.compile|[Uu]nsupported|graph break"):
        loss_of(compiled)
    torch._dynamo.reset()
    assert_same_step(blocks(2), wrapped, loss_of, steps=1)


def test_compiling_a_module_inside_a_layer_is_supported(store):
    plain, wrapped = blocks(2), blocks(2)
    for model in (plain, wrapped):
        for layer in model.layers:
            layer.up.compile(backend="eager")
    offload.wrap(wrapped, policy=FORCED)
    assert_same_step(plain, wrapped, loss_of)
    torch._dynamo.reset()


def test_keep_leaves_layers_untouched(store):
    wrapped = offload.wrap(blocks(3), policy=offload.Policy(mode="keep"))
    counts = []
    wrapped.layers[0].up.register_forward_hook(lambda *_: counts.append(1))
    assert_same_step(blocks(3), wrapped, loss_of, steps=1)
    assert len(counts) == 1
