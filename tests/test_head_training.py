"""Chunked heads under PEFT, autocast, Trainer, accelerate and distributed training."""

import warnings

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from offload.adapters.transformers.head import HeadCall, HeadLoss, install_head, uninstall_head
from offload.errors import OffloadError
from offload.lazy_logits import LazyLogits
from tests.heads import (
    CHUNK,
    VOCAB,
    assert_same,
    batch,
    build,
    installed,
    loss_and_gradients,
    loss_in_float64,
)
from tests.models import gradients


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]])
def test_peft(materialised, when, targets):
    peft = pytest.importorskip("peft")
    plain = peft.get_peft_model(build(), peft.LoraConfig(target_modules=targets, r=2))
    plain.base_model.model.loss_function = loss_in_float64
    model = build()
    on_head = "lm_head" in targets

    def put(m):
        if on_head and when == "after":
            with pytest.warns(UserWarning, match="not a plain nn.Linear"):
                install_head(m, CHUNK)
        else:
            install_head(m, CHUNK)

    if when == "before":
        put(model)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2))
    model.load_state_dict(plain.state_dict())
    if when == "after":
        put(model)
    plain.eval(), model.eval()
    expected = loss_and_gradients(plain, **batch())
    if on_head and when == "before":
        with pytest.warns(UserWarning, match="head was replaced"):
            ours = loss_and_gradients(model, **batch())
    else:
        ours = loss_and_gradients(model, **batch())
    assert_same((ours[0].double(), ours[1]), expected, 1e-6 if on_head else 1e-10)
    assert isinstance(model(**batch()).logits, LazyLogits) != on_head
    assert not materialised


def test_autocast(materialised):
    plain, model = build(dtype=torch.float32), installed(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        results = [loss_and_gradients(m, **batch()) for m in (model, plain)]
    assert not materialised
    assert results[0][0].dtype == results[1][0].dtype
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    for name, expected in results[1][1].items():
        error = (results[0][1][name] - expected).norm() / expected.norm()
        assert error < 2e-2, name


def rows(count=8):
    ids = torch.randint(1, VOCAB, (count, 12), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row.clone(), "unused": 1} for row in ids]


def train(model, directory, **options):
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(), eval_dataset=rows(4))
    return trainer, trainer.train()


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_with_accumulation(tmp_path, materialised, bf16):
    options = {"bf16": bf16, "gradient_accumulation_steps": 2}
    plain, model = build(dtype=torch.float32), installed(dtype=torch.float32)
    _, expected = train(plain, tmp_path, **options)
    trainer, ours = train(model, tmp_path, **options)
    assert not materialised
    assert ours.training_loss == pytest.approx(expected.training_loss, rel=2e-3 if bf16 else 1e-6)
    assert trainer.predict(rows(4)).predictions.shape == (4, 12, VOCAB)
    uninstall_head(model)
    assert type(model(**batch()).logits) is torch.Tensor
    assert not isinstance(model.__dict__.get("_loss_function"), HeadLoss)


def test_accelerates_conversion_to_float32_stays_lazy(materialised):
    accelerate = pytest.importorskip("accelerate")
    model = installed(dtype=torch.bfloat16)
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    output = prepared(**batch(1, 5))
    assert isinstance(output.logits, LazyLogits)
    assert output.logits.dtype == torch.float32
    output.loss.backward()
    assert not materialised
    uninstall_head(model)  # below accelerate's forward
    assert type(prepared(**batch(1, 5)).logits) is torch.Tensor
    install_head(model, CHUNK)
    assert isinstance(prepared(**batch(1, 5)).logits, LazyLogits)


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerates_device_hooks(materialised, when):
    accelerate = pytest.importorskip("accelerate")
    model, plain = build(), build()
    plain.loss_function = loss_in_float64
    if when == "before":
        install_head(model, CHUNK)
    devices = {"model": "cpu", "lm_head": "cpu"}
    accelerate.dispatch_model(model, devices, main_device="cpu", force_hooks=True)
    assert hasattr(model.lm_head, "_hf_hook")
    if when == "after":
        install_head(model, CHUNK)
    moved, hook = [], model.lm_head._hf_hook
    pre_forward = hook.pre_forward
    hook.pre_forward = lambda *args, **kwargs: moved.append(1) or pre_forward(*args, **kwargs)
    output = model(**batch())
    assert moved  # the hook's work is still done
    assert isinstance(output.logits, LazyLogits)
    assert_same(loss_and_gradients(model, **batch()), loss_and_gradients(plain, **batch()))
    assert not materialised
    uninstall_head(model)
    assert type(model(**batch()).logits) is torch.Tensor
    accelerate.hooks.remove_hook_from_submodules(model)
    assert not isinstance(model.lm_head.forward, HeadCall)
    assert type(model(**batch()).logits) is torch.Tensor


def _process(rank, functions, store):
    warnings.filterwarnings("error", message="offload")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    counted = []
    original = LazyLogits.materialise
    LazyLogits.materialise = lambda self: counted.append(1) or original(self)
    for function in functions:
        function(rank)
        assert not counted
    torch.distributed.destroy_process_group()


def share(rank):
    return {name: value[rank : rank + 1] for name, value in batch().items()}


def mean_of_both():
    plain = build("llama, tied")
    plain.loss_function = loss_in_float64
    losses, grads = zip(*(loss_and_gradients(plain, **share(rank)) for rank in (0, 1)), strict=True)
    return losses, {name: (grads[0][name] + grads[1][name]) / 2 for name in grads[0]}


def ddp(rank):
    losses, expected = mean_of_both()
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        wrapped = nn.parallel.DistributedDataParallel(installed("llama, tied"), **options)
        for _ in range(2):
            wrapped.zero_grad()
            output = wrapped(**share(rank))
            assert isinstance(output.logits, LazyLogits)
            output.loss.backward()
        grads = gradients(wrapped.module)
        assert_same((output.loss.detach(), grads), (losses[rank], expected))


def fsdp(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    losses, expected = mean_of_both()
    for first, reshard in ((True, None), (False, None), (True, True)):
        model = build("llama, tied")
        if first:
            install_head(model, CHUNK)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        if not first:
            install_head(model, CHUNK)
        for _ in range(2):
            model.zero_grad()
            output = model(**share(rank))
            assert isinstance(output.logits, LazyLogits)
            output.loss.backward()
        if reshard:
            with pytest.raises(OffloadError, match="was freed since"):
                output.logits.detach()
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        assert_same((output.loss.detach(), grads), (losses[rank], expected))


def fsdp_head_alone(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    plain = build()
    _, grads = zip(*(loss_and_gradients(plain, **share(r)) for r in (0, 1)), strict=True)
    expected = {name: (grads[0][name] + grads[1][name]) / 2 for name in grads[0]}
    model = installed()
    fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.warns(UserWarning, match="head is a FSDPLinear, not a plain nn.Linear"):
        loss = model(**share(rank)).loss
    loss.backward()
    ours = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert_same((loss.detach(), ours), (loss_and_gradients(plain, **share(rank))[0], expected))


def test_ddp_and_fsdp_in_two_processes(tmp_path):
    functions = (ddp, fsdp, fsdp_head_alone)  # one start for all: importing takes longest
    torch.multiprocessing.spawn(_process, (functions, str(tmp_path / "store")), nprocs=2)
