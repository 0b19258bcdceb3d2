"""Models, Trainer, PEFT, caches and switches of transformers; for releases 5.24 and 4.57."""

import copy
import pickle
import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
    StaticCache,
    Trainer,
    TrainingArguments,
)

import offload
from tests.models import FORCED, assert_same_step, calls_of, gradients, step
from tests.tiled import V5

CACHE = "cache" if V5 else "past_key_values"
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=64),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2, intermediate_size=64),
    "opt": OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=64),
}


def build(name="llama", dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).to(dtype).train()


def tokens(batch=2, length=37):
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(1))


def language_loss(ids=None, **options):
    ids = tokens() if ids is None else ids
    return lambda model: model(input_ids=ids, labels=ids, **options).loss


def inner_forwards(model):
    """Counts how often the model's layers really run: forwards of their first norm or attention."""
    counts = []
    for call in calls_of(model):
        first = next(iter(call.module.children()))
        first.register_forward_hook(lambda *_: counts.append(1))
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_equal_the_plain_models(store, name, dtype):
    plain = build(name, dtype)
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    assert len(calls_of(wrapped)) == 3
    assert_same_step(plain, wrapped, language_loss(use_cache=False))
    assert all(call.record.offloaded_tensors == 2 for call in calls_of(wrapped)[:-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_librarys_cache_is_off_while_training_and_on_while_generating(store, name):
    plain = build(name)
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    loss = language_loss(use_cache=False)
    output = wrapped(input_ids=tokens(), labels=tokens())
    assert getattr(output, "past_key_values", None) is None
    assert_same_step(plain, wrapped, loss)
    prompt = tokens(1, 7)
    for model in (plain, wrapped):
        model.eval()
    generated = wrapped.generate(prompt, max_new_tokens=5, do_sample=False)
    assert torch.equal(generated, plain.generate(prompt, max_new_tokens=5, do_sample=False))
    with torch.no_grad():
        assert wrapped(prompt, use_cache=True).past_key_values.get_seq_length() == 7
    assert wrapped.config.use_cache == plain.config.use_cache


@pytest.mark.skipif(not V5, reason="4.57 switches its cache off in training mode, gradients or not")
def test_generating_in_training_mode_uses_the_cache(store):
    wrapped = offload.wrap(build(), policy=FORCED)
    step(wrapped, language_loss())
    lengths = []
    calls_of(wrapped)[0].module.register_forward_pre_hook(
        lambda module, args: lengths.append(args[0].shape[1])
    )
    with torch.no_grad():
        wrapped.generate(tokens(1, 7), max_new_tokens=4, do_sample=False)
    assert lengths == [7, 1, 1, 1]


@pytest.mark.parametrize("training", [True, False])
def test_a_cache_the_caller_passes_is_filled_once(store, training):
    plain = build().train(training)
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    caches = {}

    def loss_of(model):
        caches[model] = DynamicCache()
        return model(tokens(), labels=tokens(), use_cache=True, **{CACHE: caches[model]}).loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(plain, wrapped, loss_of)
    assert caches[wrapped].get_seq_length() == caches[plain].get_seq_length() == 37


def test_a_cache_that_is_written_in_place_makes_the_layers_run_untouched(store):
    wrapped = offload.wrap(build().eval(), policy=FORCED)
    cache = StaticCache(config=wrapped.config, max_cache_len=64)
    with pytest.warns(UserWarning, match="run untouched.*StaticCache"):
        wrapped(tokens(), labels=tokens(), **{CACHE: cache}).loss.backward()
    assert all(call.record.forwards == 0 for call in calls_of(wrapped))


def test_hidden_states_are_collected_once(store):
    plain = build()
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)

    def loss_of(model):
        output = model(tokens(), labels=tokens(), output_hidden_states=True, use_cache=False)
        assert len(output.hidden_states) == 4
        loss_of.kept = output.hidden_states
        return output.loss + sum(h.pow(2).mean() for h in output.hidden_states)

    assert_same_step(plain, wrapped, loss_of)
    assert len(loss_of.kept) == 4


def test_attentions_are_collected_once_also_when_backward_runs_inside_the_call(store):
    plain = build()
    plain.set_attn_implementation("eager")
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)

    def loss_of(model):
        output = model(tokens(), labels=tokens(), output_attentions=True, use_cache=False)
        assert len(output.attentions) == 3
        return output.loss + sum(a.pow(2).sum() for a in output.attentions)

    assert_same_step(plain, wrapped, loss_of)


@pytest.mark.parametrize("order", ["enable, wrap", "wrap, enable", "wrap, disable, enable"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_librarys_own_checkpointing_does_not_run_layers_a_third_time(store, order, reentrant):
    plain = build()
    wrapped = copy.deepcopy(plain)
    for action in order.split(", "):
        if action == "wrap":
            offload.wrap(wrapped, policy=FORCED)
        elif action == "disable":
            wrapped.gradient_checkpointing_disable()
        else:
            wrapped.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant}
            )
    counts = inner_forwards(wrapped)
    assert_same_step(plain, wrapped, language_loss(use_cache=False), steps=1)
    assert len(counts) == 6
    assert wrapped.is_gradient_checkpointing


def test_enabling_checkpointing_makes_no_input_require_gradients(store):
    wrapped = offload.wrap(build(), policy=FORCED)
    wrapped.gradient_checkpointing_enable()
    wrapped.enable_input_require_grads()
    wrapped.get_input_embeddings().requires_grad_(False)
    assert not wrapped.get_input_embeddings()(tokens()).requires_grad


def test_unwrap_gives_the_librarys_switch_back(store):
    wrapped = build()
    before = {name: dict(module.__dict__) for name, module in wrapped.named_modules()}
    offload.unwrap(offload.wrap(wrapped, policy=FORCED))
    after = {name: dict(module.__dict__) for name, module in wrapped.named_modules()}
    for name, attributes in before.items():
        assert after[name].keys() - attributes.keys() <= {"_gradient_checkpointing_func"}, name
        assert after[name].get("gradient_checkpointing") == attributes.get("gradient_checkpointing")
    wrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert all(layer.gradient_checkpointing for layer in wrapped.model.layers)


def test_copies_and_pickles_stay_wrapped(store):
    plain = build()
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert_same_step(plain, twin, language_loss(use_cache=False), steps=1)
        assert [call.record.recomputes for call in calls_of(twin)] == [1] * 3
        twin.gradient_checkpointing_enable()
        counts = inner_forwards(twin)
        step(twin, language_loss())
        assert len(counts) == 6
    assert [call.record.forwards for call in calls_of(wrapped)] == [0] * 3


def test_saving_and_loading_keep_names_and_tied_weights(store, tmp_path):
    plain = build("gpt2")
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    step(wrapped, language_loss())
    assert wrapped.lm_head.weight is wrapped.transformer.wte.weight
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    wrapped.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = wrapped.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        ids = tokens(1, 16 + index)[0]
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("wrapped_after_trainer_is_made", [False, True])
def test_trainer_with_gradient_checkpointing(store, tmp_path, wrapped_after_trainer_is_made):
    def train(wrap):
        model = build()
        model.config.use_cache = wrap  # the plain model would take another attention kernel
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            gradient_checkpointing=wrap,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            seed=3,
        )
        if wrap and not wrapped_after_trainer_is_made:
            offload.wrap(model, policy=FORCED)
        trainer = Trainer(model=model, args=arguments, train_dataset=Texts())
        if wrap and wrapped_after_trainer_is_made:
            offload.wrap(model, policy=FORCED)
        counts = inner_forwards(model) if wrap else []
        trainer.train()
        return model, counts

    plain, _ = train(wrap=False)
    wrapped, counts = train(wrap=True)
    assert len(counts) == 4 * 3 * 2  # texts x layers x (forward and replay)
    expected = plain.state_dict()
    assert all(torch.equal(v, expected[name]) for name, v in wrapped.state_dict().items())


@pytest.mark.parametrize("order", ["wrap, peft", "peft, wrap", "wrap inner, peft"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_peft_before_and_after(store, order, checkpointing):
    peft = pytest.importorskip("peft")

    def adapted(wrap):
        model = build()
        if wrap and order != "peft, wrap":
            offload.wrap(model, policy=FORCED)
        if checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        torch.manual_seed(5)
        config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        return offload.wrap(model, policy=FORCED) if wrap and order == "peft, wrap" else model

    plain, wrapped = adapted(wrap=False), adapted(wrap=True)
    counts = inner_forwards(wrapped)
    assert_same_step(plain, wrapped, language_loss(use_cache=False), steps=1)
    assert len(counts) == 6
    trained = {name: g for name, g in gradients(wrapped).items() if g is not None}
    assert trained
    assert all("lora" in name for name in trained)
    assert all(g.abs().sum() > 0 for g in trained.values())


def test_left_padding_and_batches(store):
    plain = build()
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    mask = torch.ones(2, 37, dtype=torch.long)
    mask[0, :9] = 0
    assert_same_step(plain, wrapped, language_loss(attention_mask=mask, use_cache=False))


def test_the_model_still_advertises_the_keywords_trainer_looks_for(store):
    import inspect

    plain = build()
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    assert inspect.signature(wrapped.forward) == inspect.signature(plain.forward)
    expected = inspect.signature(plain.model.layers[0].forward)
    assert inspect.signature(wrapped.model.layers[0].forward) == expected


def test_collected_outputs_without_a_backward_leave_nothing_behind(store):
    """The store fixture checks that no slot stays."""
    wrapped = offload.wrap(build(), policy=FORCED)
    wrapped(tokens(), output_hidden_states=True, use_cache=False)
    output = wrapped(tokens(), output_hidden_states=True, use_cache=False)
    output.hidden_states[1].sum().backward()


def test_unwrapping_a_part_first_leaves_no_switch_behind(store):
    model = offload.wrap(build(), policy=FORCED)
    offload.unwrap(model.model)
    offload.unwrap(model)
    assert "enable_input_require_grads" not in model.__dict__


def test_keep_leaves_the_librarys_checkpointing_alone(store):
    model = offload.wrap(build(), policy=offload.Policy(mode="keep"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    counts = inner_forwards(model)
    step(model, language_loss(use_cache=False))
    assert len(counts) == 6
