"""Heads of transformers models with a chunked loss; for releases 5.24 and 4.57."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from offload.adapters.transformers.head import HeadCall, HeadLoss, install_head, uninstall_head
from offload.errors import OffloadError
from offload.lazy_logits import LazyLogits
from tests.models import gradients

V5 = int(transformers.__version__.split(".")[0]) >= 5
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


@pytest.fixture
def materialised(monkeypatch):
    """Every computation of real logits by a LazyLogits."""
    seen = []
    original = LazyLogits.materialise

    def spy(self):
        if not self.computed:
            seen.append(self.shape)
        return original(self)

    monkeypatch.setattr(LazyLogits, "materialise", spy)
    return seen


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="offload")
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_equal_the_plain_models(quiet, materialised, name):
    plain, ours = build(name), installed(name)
    plain.loss_function = loss_in_float64
    for options in ({}, {"num_items_in_batch": torch.tensor(17)}):
        if options and "kwargs" not in inspect.signature(plain.forward).parameters:
            continue  # before the library passed it
        inputs = {**batch(), "use_cache": False, **options}
        rounds = name == "gptj" and not V5  # its own forward converts the logits to float32
        assert_same(
            loss_and_gradients(ours, **inputs),
            loss_and_gradients(plain, **inputs),
            1e-5 if rounds else 1e-10,
        )
    output = ours(**batch())
    assert isinstance(output.logits, LazyLogits)
    assert not materialised
    expected = plain(**batch()).logits
    torch.testing.assert_close(output.logits.materialise(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"shift_labels": torch.arange(46).view(2, 23)},
        {"ignore_index": 3},
        {"num_items_in_batch": 5},
        {"num_items_in_batch": torch.tensor(5.0)},
        {"return_dict": False},
    ],
)
def test_options_of_the_librarys_loss(materialised, options):
    plain, ours = build(), installed()
    plain.loss_function = loss_in_float64
    inputs = batch()
    inputs["labels"] = inputs["input_ids"]
    losses = [model(**inputs, **options)[0] for model in (ours, plain)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    assert not materialised


def test_the_librarys_own_loss_in_float32():
    plain, ours = build(dtype=torch.float32), installed(dtype=torch.float32)
    results = [loss_and_gradients(model, **batch()) for model in (ours, plain)]
    assert results[0][0].dtype == torch.float32
    assert_same(*results, 2e-5)


def test_positional_labels_are_seen():
    model = installed()
    names = list(inspect.signature(model.forward).parameters)
    values = dict.fromkeys(names[: names.index("labels") + 1]) | batch()
    assert isinstance(model(*values.values()).logits, LazyLogits)


def test_all_labels_ignored():
    model = installed()
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    loss, grads = loss_and_gradients(model, **inputs)
    assert loss.item() == 0
    assert all(gradient is None or not gradient.any() for gradient in grads.values())


def test_other_calls_get_real_logits(materialised):
    plain, model = build(), installed()
    ids = batch()["input_ids"]
    expected = plain(input_ids=ids).logits
    assert torch.equal(model(input_ids=ids).logits, expected)
    with torch.no_grad():
        output = model(**batch())
    assert torch.equal(output.logits, expected)
    assert output.loss.dtype == torch.float32  # the library's own
    with torch.inference_mode():
        assert type(model(**batch()).logits) is torch.Tensor
    generated = model.generate(ids[:, :5], max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, plain.generate(ids[:, :5], max_new_tokens=4, do_sample=False))
    assert type(model.lm_head(torch.zeros(1, 32, dtype=torch.float64))) is torch.Tensor
    assert type(model.get_output_embeddings()) is nn.Linear


def test_another_models_head_is_not_lazy_inside_a_forward():
    model, teacher, seen = installed(), installed(), []
    model.model.norm.register_forward_hook(lambda m, args, out: seen.append(teacher.lm_head(out)))
    model.model.norm.register_forward_hook(
        lambda m, args, out: seen.append(teacher(batch()["input_ids"]).logits)
    )
    assert isinstance(model(**batch()).logits, LazyLogits)
    assert [type(logits) for logits in seen] == [torch.Tensor] * 2


def test_user_code_on_logits_gets_right_values(materialised):
    plain, model = build(), installed()
    inputs = batch()
    expected, output = plain(**inputs).logits, model(**inputs)
    assert torch.equal(output.logits.argmax(-1), expected.argmax(-1))
    assert len(materialised) == 1
    targets = inputs["labels"][..., 1:].reshape(-1)
    losses = [
        F.cross_entropy(logits[..., :-1, :].reshape(-1, VOCAB), targets)
        for logits in (output.logits, model(**inputs).logits, expected)
    ]
    torch.testing.assert_close(losses[0], losses[2], rtol=0, atol=1e-12)
    torch.testing.assert_close(losses[1], losses[2], rtol=0, atol=1e-12)
    assert len(materialised) == 1
    last = model(**inputs).logits[:, -1].softmax(-1)
    torch.testing.assert_close(last, expected[:, -1].softmax(-1), rtol=0, atol=1e-12)
    assert materialised == [(2, 23, VOCAB), (2, VOCAB)]


def test_an_own_loss_function_gets_real_logits():
    seen = []

    def own(logits, labels, **kwargs):
        seen.append(type(logits))
        return logits.sum()

    before, after = build(), installed()
    before.loss_function = after.loss_function = own
    install_head(before, CHUNK)
    before(**batch())
    after(**batch())
    assert seen == [torch.Tensor, torch.Tensor]
    uninstall_head(after)
    assert after.loss_function is own


def test_a_loss_computed_inside_the_forward_is_chunked(materialised):
    """As models that do not call `self.loss_function` do."""
    model = transformers.GPT2DoubleHeadsModel(copy.deepcopy(CONFIGS["gpt2"])).double().eval()
    plain = copy.deepcopy(model)
    install_head(model, CHUNK)
    losses = [m(**batch()).loss for m in (model, plain)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    assert not materialised


def test_logits_of_fewer_tokens_than_labels_fail_as_before():
    for model in (build(), installed()):
        with pytest.raises(ValueError, match="batch_size"):
            model(**batch(), logits_to_keep=3)


def test_uninstalling_leaves_nothing():
    plain, model = build(), build()
    before = attributes(model)
    install_head(model, CHUNK)
    install_head(model, None)
    assert attributes(model) != before
    assert model.state_dict().keys() == plain.state_dict().keys()
    uninstall_head(model)
    assert attributes(model) == before
    assert type(model(**batch()).logits) is torch.Tensor
    uninstall_head(model)
    install_head(model, 0)
    assert attributes(model) == before


def attributes(model):
    return {name: sorted(module.__dict__) for name, module in model.named_modules()}


def test_the_forward_keeps_its_signature():
    assert inspect.signature(installed().forward) == inspect.signature(build().forward)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_installed_on_their_own(materialised, make):
    model = installed()
    copied = make(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    plain = build()
    plain.loss_function = loss_in_float64
    assert_same(loss_and_gradients(copied, **batch()), loss_and_gradients(plain, **batch()))
    assert isinstance(copied(**batch()).logits, LazyLogits)
    assert not materialised
    uninstall_head(copied)
    assert isinstance(model(**batch()).logits, LazyLogits)
    assert type(copied(**batch()).logits) is torch.Tensor


def test_a_copy_of_the_head_alone_does_not_drag_the_model_along():
    model = installed()
    head = copy.deepcopy(model.lm_head)
    assert len(pickle.dumps(head)) < 2 * head.weight.nbytes
    other = build()
    other.set_output_embeddings(head)
    assert type(other(**batch()).logits) is torch.Tensor


def test_a_head_that_was_replaced_gets_real_logits_and_a_warning():
    model = installed()
    model.set_output_embeddings(nn.Linear(32, VOCAB, bias=False, dtype=torch.float64))
    with pytest.warns(UserWarning, match="the head was replaced after offload took it over"):
        logits = model(**batch()).logits
    assert type(logits) is torch.Tensor


def test_a_hook_on_the_head_gets_real_logits_and_warns_once():
    plain, model = build(), installed()
    seen = []
    for m in (plain, model):
        m.lm_head.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    with pytest.warns(UserWarning, match="all logits at once: a hook sits on the head") as caught:
        results = [loss_and_gradients(m, **batch()) for m in (model, plain, model)]
    assert seen == [torch.Tensor] * 3
    assert len([w for w in caught if "offload" in str(w.message)]) == 1
    assert_same(results[0], results[1])


def test_a_quantised_or_other_head_is_left_alone():
    model = build()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.warns(UserWarning, match="the head is a Sequential, not a plain nn.Linear"):
        install_head(model, CHUNK)
    assert type(model(**batch()).logits) is torch.Tensor
    model = installed()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.float())
    with (
        pytest.warns(UserWarning, match="input is torch.float64 on cpu, its weight torch.float32"),
        pytest.raises(RuntimeError, match="dtype"),
    ):
        model(**batch())


def test_models_without_a_causal_loss_are_left_alone(quiet):
    sizes = {**SIZES, "intermediate_size": 48}
    for model in (
        transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
        transformers.LlamaModel(CONFIGS["llama"]),
        transformers.LlamaForSequenceClassification(CONFIGS["llama"]),
        nn.Linear(2, 2),
    ):
        before = attributes(model)
        install_head(model, CHUNK)
        assert attributes(model) == before


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
