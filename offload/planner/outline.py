"""A model as a plan needs it: on meta, with its layers, and with what it weighs as it is stored."""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.adapters import peft
from offload.adapters import transformers as hf
from offload.discovery import NamedLayers, Selection, find_layers
from offload.installer import uninstall
from offload.planner.presets import PRESETS
from offload.planner.quantised import (
    QuantisedLinear,
    is_quantised,
    quantise,
    replace_quantised,
)

_TRAITS = ("attention_type", "layer_type", "is_sliding", "sliding_window", "is_moe")
"""Attributes of modules that make a layer another kind than one with the same weights."""


@dataclass(frozen=True)
class Unit:
    """A part of a model that is placed as one.

    Attributes:
        name: of the module.
        weight_bytes: of its parameters and buffers as stored.
        trained_bytes: of those that get gradients.
    """

    name: str
    weight_bytes: int
    trained_bytes: int


@dataclass(frozen=True)
class Outline:
    """A model on meta.

    Attributes:
        model: may be run on meta tensors, but not changed.
        named: its layers, first to last.
        name: for people.
    """

    model: nn.Module
    named: NamedLayers
    name: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers, each storage once."""
        return _bytes_of([*self.model.parameters(), *self.model.buffers()])

    @property
    def trained_bytes(self) -> int:
        """Bytes of all parameters that get gradients."""
        return _bytes_of([p for p in self.model.parameters() if p.requires_grad])

    @property
    def parameter_count(self) -> int:
        """Values of all parameters as the model computes with them."""
        packed: dict[int, int] = {
            id(module.weight): module.in_features * module.out_features
            for module in self.model.modules()
            if isinstance(module, QuantisedLinear)
        }
        return sum(packed.get(id(p), p.numel()) for p in self.model.parameters())

    @property
    def is_quantised(self) -> bool:
        """Whether some weights are held in other bytes than they are computed with."""
        return any(isinstance(module, QuantisedLinear) for module in self.model.modules())

    def sizes(self) -> tuple[int, int] | None:
        """Returns the model dim and the bytes of an activation; None where it does not say so."""
        hidden = hf.hidden_size_of(self.model)
        floating = [p for p in self.model.parameters() if p.is_floating_point()]
        return (hidden, floating[0].element_size()) if hidden and floating else None

    def unit(self, name: str) -> Unit:
        """Returns what a module weighs."""
        module = self.model.get_submodule(name)
        tensors = [*module.parameters(), *module.buffers()]
        trained = [p for p in module.parameters() if p.requires_grad]
        return Unit(name, _bytes_of(tensors), _bytes_of(trained))

    def kinds(self) -> list[Hashable]:
        """Returns for each layer what tells it from layers of another kind."""
        return [_kind_of(layer) for _, layer in self.named]

    def shortened(self, count: int) -> tuple[nn.Module, NamedLayers]:
        """Makes a model with the first layers only, which shares the parameters.

        Args:
            count: how many layers.

        Returns:
            The model and its layers; the whole model where its layers cannot be left out.
        """
        names = [name for name, _ in self.named]
        paths = {name.rpartition(".")[0] for name in names}
        path = paths.pop() if len(paths) == 1 else ""
        container = self.model.get_submodule(path) if path else None
        if count >= len(names) or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            model = _shared_copy(self.model, {})
            return model, [(name, model.get_submodule(name)) for name in names]
        hole = nn.Identity()
        model = _shared_copy(self.model, {id(layer): hole for _, layer in self.named[count:]})
        kept = [child for child in model.get_submodule(path).children() if child is not hole]
        is_list = isinstance(container, nn.ModuleList)
        model.set_submodule(path, nn.ModuleList(kept) if is_list else nn.Sequential(*kept))
        return model, [(name, model.get_submodule(name)) for name in names[:count]]


def outline_of(
    model: Any,
    *,
    layers: Selection | None = None,
    dtype: torch.dtype | None = None,
    lora: int = 0,
    four_bit: bool = False,
    train: bool = True,
) -> Outline:
    """Makes the outline of a model, without memory for weights.

    Args:
        model: a module with weights anywhere or on meta, a configuration of transformers, a folder
            that holds one, or the name of a preset.
        layers: as for `wrap`.
        dtype: of the weights of a model that is made here; None takes the configuration's, or
            bfloat16.
        lora: rank of LoRA adapters to put on all linear layers; 0 for none.
        four_bit: whether the linear layers' frozen weights are held in NF4.
        train: whether it will train: a model in evaluation mode, as it is loaded, is planned in
            training mode then.

    Returns:
        The outline.

    Raises:
        ValueError: if there is no such preset or folder, or options do not fit the model.
        TypeError: if `model` is none of these.
    """
    name = model if isinstance(model, str) else type(model).__name__
    if isinstance(model, nn.Module):
        if dtype is not None:
            raise ValueError("plan: expected no dtype with a model, got one. Cast the model.")
        made = to_meta(model)
        names = [found for found, _ in find_layers(model, layers)]
    else:
        config = _config_of(model)
        name = name if isinstance(model, str) else type(config).__name__.removesuffix("Config")
        made = hf.build_on_meta(config, dtype)
        names = [found for found, _ in find_layers(made, layers)]
    if lora:
        made = peft.add_lora(made, lora)
        names = [f"{peft.PREFIX}{found}" for found in names]
    if train and not made.training:
        made.train()
    named = [(found, made.get_submodule(found)) for found in names]
    if four_bit:
        quantise([layer for _, layer in named])
    return Outline(made, named, str(name))


def _config_of(model: Any) -> Any:
    if isinstance(model, (str, os.PathLike)):
        text = os.fspath(model)
        if text.lower() in PRESETS:
            return hf.build_config(*PRESETS[text.lower()])
        if os.path.isdir(text):
            return hf.load_config(text)
        raise ValueError(
            f"plan: expected a folder with a config.json, or one of {', '.join(PRESETS)}, got "
            f"{text!r}. Download the model's config.json, or choose one of these."
        )
    if hf.is_config(model):
        return model
    raise TypeError(
        f"plan: expected a module, a transformers configuration, a folder or the name of a preset, "
        f"got {type(model).__name__}."
    )


def to_meta(model: nn.Module) -> nn.Module:
    """Copies a model to meta: modules, hooks and flags, but no values; ties stay ties.

    Args:
        model: with weights anywhere; not changed.

    Returns:
        The copy, unwrapped.
    """
    memo: dict[int, Any] = {}
    stored = {
        name: nbytes_stored(module.weight)
        for name, module in model.named_modules()
        if is_quantised(module)
    }
    for parameter in model.parameters():
        empty = torch.empty_strided(
            parameter.shape, _strides_of(parameter), dtype=parameter.dtype, device="meta"
        )
        memo[id(parameter)] = nn.Parameter(
            empty, requires_grad=parameter.requires_grad and empty.is_floating_point()
        )
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(model, memo)
    uninstall(copied)
    replace_quantised(copied, stored)
    return copied


def nbytes_stored(tensor: torch.Tensor) -> int:
    """Returns the bytes that a weight holds, those of the tensors inside a subclass included."""
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is not None:
        names, _ = inner()
        return sum(nbytes_stored(getattr(tensor, name)) for name in names)
    state = getattr(tensor, "quant_state", None)
    extra = [getattr(state, "absmax", None)]
    nested = getattr(state, "state2", None)
    extra += [getattr(nested, "absmax", None)]
    return int(tensor.nbytes + sum(part.nbytes for part in extra if part is not None))


def _shared_copy(model: nn.Module, left_out: dict[int, Any]) -> nn.Module:
    """Copies the modules of a model and shares its parameters, buffers and configuration."""
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    memo |= left_out
    config = getattr(model, "config", None)
    memo |= {id(config): config} if config is not None else {}
    return copy.deepcopy(model, memo)


def _strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    plain = type(parameter.data) is torch.Tensor
    return parameter.stride() if plain else torch.empty(parameter.shape, device="meta").stride()


def _bytes_of(tensors: list[Any]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _kind_of(layer: nn.Module) -> Hashable:
    weights = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()
    )
    traits = tuple(
        (name, trait, str(getattr(module, trait)))
        for name, module in layer.named_modules()
        for trait in _TRAITS
        if hasattr(module, trait)
    )
    return type(layer), weights, traits
