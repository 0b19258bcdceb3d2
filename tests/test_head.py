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

from offload.adapters.transformers.head import install_head, uninstall_head
from offload.lazy_logits import LazyLogits
from tests.heads import (
    CHUNK,
    CONFIGS,
    SIZES,
    VOCAB,
    assert_same,
    batch,
    build,
    installed,
    loss_and_gradients,
    loss_in_float64,
)
from tests.tiled import V5


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
