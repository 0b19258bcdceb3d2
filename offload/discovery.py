"""Finds the repeated layers of a model."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Iterable

from torch import nn

from offload.adapters import transformers as hf

Selection = type[nn.Module] | str | Iterable[nn.Module | str] | Callable[[str, nn.Module], bool]
NamedLayers = list[tuple[str, nn.Module]]


def find_layers(model: nn.Module, layers: Selection | None = None) -> NamedLayers:
    """Finds the layers to wrap, in the order of `named_modules`.

    Args:
        model: the model to search; itself never a layer.
        layers: a module class, a name pattern such as `"model.layers.*"` (`*` matches dots too), a
            list of modules or names, or a predicate `(name, module) -> bool`; of nested matches the
            outer one. None: the layers that transformers names, else the same-typed children of the
            `ModuleList`, `ModuleDict` or `Sequential` (also the model itself, if it is one) that
            hold the most parameters.

    Returns:
        At least one (name, module).

    Raises:
        ValueError: if nothing is found, or a listed name or module is not in the model.
        TypeError: if `layers` is none of the above.
    """
    if layers is None:
        found = hf.find_layers(model) or _largest_group(model)
        if not found:
            raise ValueError(
                f"wrap: expected repeated layers, found none in {type(model).__name__}. "
                "Pass layers= a class, a name pattern, a list or a predicate."
            )
        return found
    found = _selected(model, layers)
    if not found:
        raise ValueError(
            f"wrap: expected layers={layers!r} to match a module, it matches none in "
            f"{type(model).__name__}. Names are those of model.named_modules()."
        )
    for name, module in found:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"wrap: expected layers that are called, got the {type(module).__name__} '{name}'. "
                f"Select what is in it, such as '{name}.*'."
            )
    return _outermost(found)


def _selected(model: nn.Module, layers: Selection) -> NamedLayers:
    modules = [(name, module) for name, module in model.named_modules() if name]
    if isinstance(layers, type):
        if not issubclass(layers, nn.Module):
            raise TypeError(f"wrap: expected a module class for layers, got {layers!r}.")
        return [(name, module) for name, module in modules if isinstance(module, layers)]
    if isinstance(layers, str):
        return [(name, module) for name, module in modules if fnmatch.fnmatchcase(name, layers)]
    if callable(layers) and not isinstance(layers, nn.Module):
        return [(name, module) for name, module in modules if layers(name, module)]
    if isinstance(layers, nn.Module) and not isinstance(layers, (nn.ModuleList, nn.Sequential)):
        raise TypeError(
            f"wrap: expected a list of modules for layers, got one {type(layers).__name__}."
        )
    if not isinstance(layers, Iterable):
        raise TypeError(
            f"wrap: expected a class, a pattern, a list or a predicate for layers, got {layers!r}."
        )
    listed = list(layers)
    wanted = {item if isinstance(item, str) else id(item) for item in listed}
    found = [(name, module) for name, module in modules if name in wanted or id(module) in wanted]
    if len(found) != len(wanted):
        raise ValueError(
            f"wrap: expected all {len(wanted)} listed layers in {type(model).__name__}, found "
            f"{len(found)}. List names or modules of model.named_modules()."
        )
    return found


def _outermost(found: NamedLayers) -> NamedLayers:
    names = {name for name, _ in found}

    def is_inside(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:end]) in names for end in range(1, len(parts)))

    return [(name, module) for name, module in found if not is_inside(name)]


def _largest_group(model: nn.Module) -> NamedLayers:
    best: NamedLayers = []
    best_size = 0
    for prefix, container in model.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        groups: dict[type, NamedLayers] = defaultdict(list)
        for name, child in container.named_children():
            groups[type(child)].append((f"{prefix}.{name}" if prefix else name, child))
        for group in groups.values():
            size = sum(p.numel() for _, child in group for p in child.parameters())
            if len(group) > 1 and size > best_size:
                best, best_size = group, size
    return best


def find_tokenwise(model: nn.Module, layers: NamedLayers) -> NamedLayers:
    """Finds modules that may act on each token alone, beside the layers: norms and projections.

    They are children, with parameters, of the module that holds the layers or their container. Left
    out are embeddings, and linear modules that widen their input more than fourfold: heads, which
    would only be computed twice.

    Args:
        model: the model that the layers are in.
        layers: what `find_layers` found.

    Returns:
        Maybe none. Whether they may be run by tiles is for the probe to say.
    """
    modules = dict(model.named_modules())
    taken = {name for name, _ in layers}
    parents = {name.rpartition(".")[0] for name, _ in layers}
    holders = {
        parent.rpartition(".")[0] if _is_container(modules[parent]) else parent
        for parent in parents
    }
    found: NamedLayers = []
    for name, module in modules.items():
        holds_layers = any(layer == name or layer.startswith(f"{name}.") for layer in taken)
        if name and not holds_layers and name.rpartition(".")[0] in holders:
            widens = isinstance(module, nn.Linear) and module.out_features > 4 * module.in_features
            has_parameters = next(module.parameters(), None) is not None
            if has_parameters and not widens and not isinstance(module, nn.Embedding):
                found.append((name, module))
    return found


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
