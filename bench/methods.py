"""THE registry of methods: name -> how a model is prepared so that a step runs that way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from bench.spec import StepSpec


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to run a training step.

    Args:
        prepare: Takes the model and the spec, returns the model to call.
        summary: One line for tables and help.
        totals: Takes the prepared model, returns the method's own counters, summed since the start.
    """

    prepare: Callable[[Any, StepSpec], Any]
    summary: str
    totals: Callable[[Any], dict[str, float]] = lambda model: {}


def _plain(model: Any, spec: StepSpec) -> Any:
    return model


def _checkpoint(model: Any, spec: StepSpec) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _save_on_cpu(model: Any, spec: StepSpec) -> Any:
    # What transformers 5.24 does for `activation_checkpointing_enable(offload=True)`, written out
    # because older releases lack it and because that one asks for pinned memory on a machine
    # without an accelerator, which torch refuses. Without a card nothing is copied.
    pin = spec.device.startswith("cuda")

    def run_layer(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run_layer)
    base.enable_input_require_grads()
    return model


def _offload(tier: str) -> Callable[[Any, StepSpec], Any]:
    def prepare(model: Any, spec: StepSpec) -> Any:
        import offload

        chosen = tier if tier != "auto" else spec.tier or "auto"
        return offload.wrap(model, policy=offload.Policy(tier=chosen))

    return prepare


def _offload_totals(model: Any) -> dict[str, float]:
    import offload

    report = offload.report(model)
    return {"moved_bytes": report.moved_bytes, "stall_ms": report.stall_ms}


METHODS: dict[str, Method] = {
    "plain": Method(_plain, "the model as it is"),
    "checkpoint": Method(_checkpoint, "torch.utils.checkpoint around each layer"),
    "save_on_cpu": Method(_save_on_cpu, "that, layer inputs held in host memory"),
    "offload": Method(_offload("auto"), "offload.wrap, tier by --tier", _offload_totals),
    "offload-host": Method(_offload("host"), "offload.wrap, tier host", _offload_totals),
}


def select_methods(names: str) -> list[str]:
    """Splits and checks a list of method names.

    Args:
        names: Names with commas between them.

    Returns:
        The names in the order given.

    Raises:
        ValueError: If a name is not registered.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in METHODS]
    if unknown or not chosen:
        raise ValueError(
            f"--methods: expected some of {', '.join(METHODS)}, got {names!r}. Correct the list."
        )
    return chosen
