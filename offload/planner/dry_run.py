"""Runs one step on meta tensors as it would run on a device, and books what happens."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offload.adapters import transformers as hf
from offload.devices import DeviceKind, meta_stands_for
from offload.discovery import NamedLayers
from offload.installation import Installation
from offload.installer import install, uninstall
from offload.planner.ledger import Ledger, Purpose, Segment
from offload.planner.paper_store import PaperStore
from offload.planner.whole_attention import fused_on_meta
from offload.policy import Policy

Call = Callable[[nn.Module, torch.Tensor], Any]
"""Runs a model on token ids `[B, S]` and returns its loss, or without gradients anything."""


@dataclass(frozen=True)
class Situation:
    """What is run, and where.

    Attributes:
        tokens: S.
        batch: B.
        train: whether there is a backward.
        kind: of the device.
        rounding: bytes that its allocator rounds up to.
    """

    tokens: int
    batch: int
    train: bool
    kind: DeviceKind
    rounding: int = 1


@dataclass(frozen=True)
class Recording:
    """The segments of a step: what comes before the layers, each layer, the head, and back.

    Attributes:
        before: embedding and masks.
        forward: of each layer.
        head: final norm and head, with the loss and its backward.
        backward: of each layer, first to last; None for those that no gradient reaches. What the
            embedding does belongs to the last one that is run.
        notes: what `offload` warned of, such as layers that do not run by tiles.
    """

    before: Segment
    forward: list[Segment]
    head: Segment
    backward: list[Segment | None]
    notes: tuple[str, ...] = ()


def dry_run(
    model: nn.Module, named: NamedLayers, policy: Policy, situation: Situation, call: Call
) -> Recording:
    """Runs a step on meta tensors.

    Args:
        model: on meta; as it was afterwards.
        named: its layers, first to last.
        policy: how they are run.
        situation: what is run.
        call: runs the model.

    Returns:
        What happened.
    """
    ledger = Ledger(situation.rounding)
    store = PaperStore(ledger)
    ledger.at_end = store.enter
    with (
        meta_stands_for(situation.kind),
        fused_on_meta(),  # before the warnings: it lets one thread in at a time
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        install(model, named, Installation(policy, len(named), store=store))
        hooks = _mark_segments(model, named, ledger)
        try:
            _run(model, situation, call, ledger)
        finally:
            for hook in hooks:
                hook.remove()
            uninstall(model)
            for parameter in model.parameters():
                parameter.grad = None
    messages = dict.fromkeys(str(warning.message) for warning in warned)
    notes = tuple(message for message in messages if message.startswith("offload:"))
    return replace(_recording(ledger.segments, len(named)), notes=notes)


def _run(model: nn.Module, situation: Situation, call: Call, ledger: Ledger) -> None:
    ids = torch.zeros(situation.batch, situation.tokens, dtype=torch.int64, device="meta")
    ledger.watch([*model.parameters(), *model.buffers()], Purpose.WEIGHTS)
    ledger.watch([ids], Purpose.HIDDEN)
    with ledger, torch.set_grad_enabled(situation.train):
        ledger.begin("before")
        loss = call(model, ids)
        if situation.train:
            loss.backward()
        del loss
        ledger.finish()


def _mark_segments(model: nn.Module, named: NamedLayers, ledger: Ledger) -> list[Any]:
    """Begins a segment with each layer, forward and back, by hooks."""
    hooks: list[Any] = []

    def before(index: int) -> Callable[..., None]:
        return lambda *_: ledger.begin(f"forward {index}")

    def after(index: int) -> Callable[..., None]:
        def mark(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            if hidden.requires_grad:
                hidden.register_hook(lambda _: ledger.begin(f"backward {index}"))
            if index == len(named) - 1:
                ledger.begin("head")

        return mark

    def take_gradient(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            ledger.watch([parameter.grad], Purpose.GRADIENTS)

    for index, (_, layer) in enumerate(named):
        hooks.append(layer.register_forward_pre_hook(before(index)))
        hooks.append(layer.register_forward_hook(after(index)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            register: Any = parameter.register_post_accumulate_grad_hook
            hooks.append(register(take_gradient))
    return hooks


def outside_modules(model: nn.Module, named: NamedLayers) -> list[tuple[str, nn.Module]]:
    """Returns the largest modules that hold tensors and no layer, and are not in one.

    Args:
        model: the layers are in.
        named: its layers.

    Returns:
        Names and modules, in the order of `named_modules`.
    """
    layers = [name for name, _ in named]
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        holds_layer = any(layer == name or layer.startswith(f"{name}.") for layer in layers)
        inside = any(name.startswith(f"{other}.") for other in [*layers, *(n for n, _ in found)])
        holds = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
        if name and holds and not holds_layer and not inside:
            found.append((name, module))
    return found


def called_after_layers(model: nn.Module, named: NamedLayers, call: Call) -> set[str]:
    """Finds out which modules outside of the layers are called after them, on a few tokens.

    Args:
        model: on meta, not wrapped.
        named: its layers.
        call: runs it.

    Returns:
        Their names.
    """
    last = named[-1][1]
    after: set[str] = set()
    begun: list[bool] = []
    hooks = [last.register_forward_hook(lambda *_: begun.append(True))]

    def note(name: str) -> Callable[..., None]:
        def remember(*_: Any) -> None:
            if begun:
                after.add(name)

        return remember

    for name, module in outside_modules(model, named):
        hooks.append(module.register_forward_pre_hook(note(name)))
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with fused_on_meta(), Ledger(), torch.no_grad():
            call(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return after


def _recording(segments: list[Segment], layers: int) -> Recording:
    by_name = {segment.name: segment for segment in segments}
    return Recording(
        by_name["before"],
        [by_name[f"forward {index}"] for index in range(layers)],
        by_name["head"],
        [by_name.get(f"backward {index}") for index in range(layers)],
    )


def call_of(model: nn.Module, *, train: bool) -> Call:
    """Returns how a model is called where the caller does not say it.

    Args:
        model: any.
        train: whether a loss is wanted.

    Returns:
        For models of transformers a call with labels, or without gradients one that computes the
        last token's logits alone; for others `model(ids)`, whose output is summed unless it is a
        loss already.
    """
    if not hf.pretrained_modules(model):
        return lambda module, ids: _loss_of(module(ids))
    if train:
        return lambda module, ids: module(input_ids=ids, labels=ids, use_cache=False).loss
    last = {"logits_to_keep": 1} if _takes(model, "logits_to_keep") else {}
    return lambda module, ids: module(input_ids=ids, use_cache=False, **last)


def _takes(model: nn.Module, name: str) -> bool:
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return name in inspect.signature(base.forward).parameters


def _loss_of(output: Any) -> torch.Tensor:
    tensors = [output] if isinstance(output, torch.Tensor) else list(output)
    losses = [x for x in tensors if isinstance(x, torch.Tensor) and x.dim() == 0]
    floating = [x for x in tensors if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return losses[0] if losses else floating[0].sum()
