"""Tiled mode under DDP and FSDP2, two processes: gradients of the concatenated batch."""

import copy
import warnings

import torch
from torch import nn

import offload
from tests.models import gradients, step
from tests.tiled import (
    NanoGPT,
    WithUnusedParameters,
    assert_close_gradients,
    assert_tiled,
    batch,
    build,
    cross_entropy,
    lora,
    loss_on,
    nano,
    stays_float64,
    tiled,
)

TILE, LENGTH = 10, 37


def _process(rank, functions, store):
    warnings.filterwarnings("error", message=".*offload")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    for function in functions:
        with stays_float64():
            function(rank)
    torch.distributed.destroy_process_group()


def loss_of_rank(rank):
    inputs, labels = batch(2, LENGTH)
    ids, labels = inputs["input_ids"][rank : rank + 1], labels[rank : rank + 1]

    def loss_of(model):
        inner = getattr(model, "module", model)
        if isinstance(inner, NanoGPT):
            return cross_entropy(model(ids), labels)
        return cross_entropy(model(input_ids=ids, use_cache=False).logits, labels)

    return loss_of


def expected_gradients(plain):
    """Those of both ranks' rows in one process; rows are equally long, so means are equal."""
    return step(plain, loss_on(2, LENGTH))[1]


def with_unused():
    model = nano(block=WithUnusedParameters)
    model.idle = nn.Linear(3, 3).double()
    return model


def ddp(rank):
    for plain, options in (
        (build("llama"), {}),
        (nano(), {"static_graph": True}),
        (lora(build("qwen2")), {}),
        (build("llama"), {"gradient_as_bucket_view": True, "static_graph": True}),
    ):
        expected = expected_gradients(plain)
        wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(TILE))
        model = nn.parallel.DistributedDataParallel(wrapped, **options)
        for _ in range(3):
            model.zero_grad()
            loss_of_rank(rank)(model).backward()
            assert_close_gradients(gradients(wrapped), expected)
        assert_tiled(wrapped, count=3)


def ddp_accumulates(rank):
    plain = nano()
    wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(TILE))
    model = nn.parallel.DistributedDataParallel(wrapped)
    expected = {name: 2 * grad for name, grad in expected_gradients(plain).items()}
    with model.no_sync():
        loss_of_rank(rank)(model).backward()
    loss_of_rank(rank)(model).backward()
    assert_close_gradients(gradients(wrapped), expected)


def ddp_unused(rank):
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        plain = with_unused()
        wrapped = offload.wrap(copy.deepcopy(plain), policy=tiled(TILE))
        models = [nn.parallel.DistributedDataParallel(m, **options) for m in (plain, wrapped)]
        for _ in range(3):
            for model in models:
                model.zero_grad()
                loss_of_rank(rank)(model).backward()
            expected = gradients(plain)
            assert any(grad is None for grad in expected.values()), options
            assert_close_gradients(gradients(wrapped), expected)
        assert_tiled(wrapped, count=3)


def _sharded(model, layers, first, **options):
    from torch.distributed.fsdp import fully_shard

    options["mesh"] = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    if first:
        offload.wrap(model, policy=tiled(TILE))
    for layer in layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model if first else offload.wrap(model, policy=tiled(TILE))


def _whole_gradients(model):
    return {
        name: None if p.grad is None else p.grad.full_tensor()
        for name, p in model.named_parameters()
    }


def _llama_layers(model):
    return (
        model.get_base_model().model.layers
        if hasattr(model, "peft_config")
        else (model.model.layers)
    )


def fsdp(rank):
    for make, layers in (
        (lambda: build("llama"), _llama_layers),
        (lambda: lora(build("llama")), _llama_layers),
        (nano, lambda model: model.blocks),
    ):
        expected = expected_gradients(make())
        for first in (True, False):
            model = _sharded(make(), layers, first)
            for _ in range(2):
                model.zero_grad()
                loss_of_rank(rank)(model).backward()
                assert_close_gradients(_whole_gradients(model), expected)
            assert_tiled(model, count=2)


def fsdp_accumulates(rank):
    """Two forwards before the backwards, and a forward without gradients in between."""
    expected = {n: 2 * grad for n, grad in expected_gradients(nano()).items()}
    for first in (True, False):
        model = _sharded(nano(), lambda model: model.blocks, first)
        losses = [loss_of_rank(rank)(model)]
        with torch.no_grad():
            value = loss_of_rank(rank)(model)
        losses.append(loss_of_rank(rank)(model))
        assert abs(value - losses[0].detach()) < 1e-12
        for loss in losses:
            loss.backward()
        assert_close_gradients(_whole_gradients(model), expected)


def fsdp_bfloat16(rank):
    """Sharded weights in float32, computed with in bfloat16: as near as plain FSDP2 is."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact = expected_gradients(nano(torch.float32))
    errors = []
    for first in (None, True, False):
        model, layers = nano(torch.float32), lambda model: model.blocks
        if first is None:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh, mp_policy=mixed)
        else:
            model = _sharded(model, layers, first, mp_policy=mixed)
        loss_of_rank(rank)(model).backward()
        grads = _whole_gradients(model)
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        errors.append({n: float((grads[n] - e).norm() / e.norm()) for n, e in exact.items()})
    plain, *ours = errors
    assert max(plain.values()) > 1e-3
    for after in ours:
        for name, error in after.items():
            assert error <= 2 * plain[name] + 1e-3, name


def test_ddp_and_fsdp2_in_two_processes(tmp_path):
    functions = (ddp, ddp_accumulates, ddp_unused, fsdp, fsdp_accumulates, fsdp_bfloat16)
    # one start for all: importing takes longest
    torch.multiprocessing.spawn(_process, (functions, str(tmp_path / "store")), nprocs=2)
