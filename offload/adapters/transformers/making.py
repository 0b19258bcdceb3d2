"""Makes models of transformers that hold no weights, from sizes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.adapters.transformers.library import class_of, pretrained_modules


def _library() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plan: expected the package transformers for a configuration, found none. Install it "
            "(pip install transformers), or give a model."
        ) from error
    return transformers


def build_config(model_type: str, sizes: dict[str, Any]) -> Any:
    """Returns a configuration of transformers.

    Args:
        model_type: as the library names it, such as `"llama"`.
        sizes: its fields.

    Returns:
        The configuration.
    """
    return _library().AutoConfig.for_model(model_type, **sizes)


def load_config(folder: str) -> Any:
    """Returns the configuration in a folder.

    Args:
        folder: holds a `config.json`.

    Returns:
        The configuration.

    Raises:
        ValueError: if there is none.
    """
    try:
        return _library().AutoConfig.from_pretrained(folder, local_files_only=True)
    except OSError as error:
        raise ValueError(
            f"plan: expected a config.json of transformers in {folder!r}, got: {error}"
        ) from error


def is_config(value: Any) -> bool:
    """Whether a value is a configuration of transformers."""
    kinds = class_of("transformers.configuration_utils", "PreTrainedConfig")
    older = class_of("transformers.configuration_utils", "PretrainedConfig")
    return bool(kinds or older) and isinstance(value, kinds or older)


def vocabulary_of(model: nn.Module) -> int | None:
    """Returns the size of a model's vocabulary; None for one that is not the library's."""
    return _of_config(model, "vocab_size")


def hidden_size_of(model: nn.Module) -> int | None:
    """Returns a model's dim; None for one that is not the library's."""
    return _of_config(model, "hidden_size")


def positions_of(model: nn.Module) -> int | None:
    """Returns how many positions a model knows; None for one that is not the library's."""
    return _of_config(model, "max_position_embeddings")


def _of_config(model: nn.Module, name: str) -> int | None:
    bodies = pretrained_modules(model)
    config = getattr(bodies[0], "config", None) if bodies else None
    value = getattr(config, name, None)
    return int(value) if value is not None else None


def build_on_meta(config: Any, dtype: torch.dtype | None) -> nn.Module:
    """Makes a causal language model on meta, in training mode.

    Args:
        config: of transformers.
        dtype: of its weights; None takes the configuration's, or bfloat16.

    Returns:
        The model.
    """
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        model: nn.Module = _library().AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()
