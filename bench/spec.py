"""What one measurement is: the settings that the parent hands to each worker."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """One training step or forward pass of one model, without the method that runs it.

    Sizes that are None take the default of the model family (`models.SHAPES`), `tier` and `tile`
    that of `offload.Policy`; `disk` and `host_bytes` are for `offload-disk` alone. With `upcast`
    the weights are rounded to `dtype` and computed with in that wider type.
    """

    model: str
    tokens: int
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    mlp: int | None = None
    vocab: int | None = None
    dtype: str = "float32"
    lora: int = 0
    steps: int = 2
    lr: float = 0.0
    device: str = "cpu"
    tier: str | None = None
    tile: int | None = None
    disk: str | None = None
    host_bytes: int | None = None
    memory_limit: int | None = None
    seed: int = 0
    input_directory: str = ""
    upcast: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, ready for JSON."""
        return dataclasses.asdict(self)


REPOSITORY = Path(__file__).resolve().parent.parent
