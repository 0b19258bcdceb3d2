"""THE registry of methods: name -> how a model is prepared so that a step runs that way."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from bench.spec import REPOSITORY, StepSpec

if TYPE_CHECKING:
    import offload


def _plain(model: Any, spec: StepSpec) -> Any:
    return model


def _checkpoint(model: Any, spec: StepSpec) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _checkpoint_loss(model: Any, spec: StepSpec) -> Any:
    from offload.adapters.transformers import install_head

    install_head(_without_peft(model), None)
    return _checkpoint(model, spec)


def _save_on_cpu(model: Any, spec: StepSpec) -> Any:
    # What transformers 5.24 does for `activation_checkpointing_enable(offload=True)`, written out
    # because older releases lack it and because that one asks for pinned memory on a machine
    # without an accelerator, which torch refuses. Without a card nothing is copied.
    pin = spec.device.startswith("cuda")

    def run_layer(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    base = _without_peft(model)
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run_layer)
    base.enable_input_require_grads()
    return model


def spill_directory(asked: str | None) -> str:
    """Returns the directory that --disk names, or makes the default one."""
    if asked is None:
        directory = REPOSITORY / "build" / "bench"
        directory.mkdir(parents=True, exist_ok=True)
        return str(directory)
    return asked


def _without_peft(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to run a training step.

    Args:
        summary: One line for tables and help.
        prepare_baseline: Takes the model and the spec, returns the model to call; None where
            `offload.wrap` prepares.
        policy: Fields of `offload.Policy` that make the method; the others come from the spec.
        exact: Whether it promises, on the CPU, the plain model's results bit for bit. Another
            method may differ from it by rounding.
        runs_forward: Whether it changes anything without gradients, or is the plain model.
        spills: Whether --disk and --host-bytes are for it.
    """

    summary: str
    prepare_baseline: Callable[[Any, StepSpec], Any] | None = None
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)
    exact: bool = False
    runs_forward: bool = False
    spills: bool = False

    def make_policy(self, spec: StepSpec) -> offload.Policy:
        """Returns the policy of a method of offload: its own fields, then the spec's."""
        import offload

        asked = {"tier": spec.tier, "tile_tokens": spec.tile}
        if self.spills:
            asked |= {"disk": spill_directory(spec.disk), "host_bytes": spec.host_bytes}
        given = {name: value for name, value in asked.items() if value is not None}
        return offload.Policy(**(given | self.policy))

    def prepare(self, model: Any, spec: StepSpec) -> Any:
        """Returns the model to call, which is the given one or around it."""
        if self.prepare_baseline is not None:
            return self.prepare_baseline(model, spec)
        import offload

        return offload.wrap(model, policy=self.make_policy(spec))

    def describe(self, model: Any, spec: StepSpec) -> dict[str, Any]:
        """Returns how layers ran and the length of a tile; nothing for a baseline.

        Args:
            model: What `prepare` returned, after a step.
            spec: What was run.

        Returns:
            `layer_modes`, a count for each mode that training steps ran in, and `tile_tokens`
            where tiles were possible.
        """
        if self.prepare_baseline is not None:
            return {}
        import offload

        policy = self.make_policy(spec)
        layers = offload.report(model).layers
        modes = collections.Counter(layer.mode for layer in layers if layer.mode)
        tiled = {"tile_tokens": policy.tile_tokens} if policy.mode in ("auto", "tiled") else {}
        return {"layer_modes": dict(modes), **tiled}

    def totals(self, model: Any) -> dict[str, float]:
        """Returns the method's own counters, summed since the start; none for a baseline."""
        if self.prepare_baseline is not None:
            return {}
        import offload

        report = offload.report(model)
        totals = {"moved_bytes": report.moved_bytes, "stall_ms": report.stall_ms}
        if report.disk is not None:
            totals["written_bytes"] = report.disk.written_bytes
        return totals


METHODS: dict[str, Method] = {
    "plain": Method("the model as it is", _plain, exact=True, runs_forward=True),
    "checkpoint": Method("torch.utils.checkpoint around each layer", _checkpoint, exact=True),
    "checkpoint+loss": Method("that, and offload's loss by chunks", _checkpoint_loss),
    "save_on_cpu": Method("checkpoint, layer inputs in host memory", _save_on_cpu, exact=True),
    "offload": Method("offload.wrap as it comes, tier by --tier", runs_forward=True),
    "offload-host": Method("that, tier host", policy={"tier": "host"}, runs_forward=True),
    "offload-tiled": Method("every layer by tiles", policy={"mode": "tiled"}, runs_forward=True),
    "offload-disk": Method(
        "that, what exceeds --host-bytes on --disk",
        policy={"mode": "tiled", "tier": "host"},
        spills=True,
    ),
    "offload-checkpoint": Method(
        "every layer recomputed whole, the model's own loss",
        policy={"mode": "checkpoint", "loss_chunk_tokens": 0},
        exact=True,
    ),
}


def select_methods(names: str, known: Iterable[str] = METHODS) -> list[str]:
    """Splits and checks a list of method names.

    Args:
        names: Names with commas between them.
        known: The names to choose from.

    Returns:
        The names in the order given.

    Raises:
        ValueError: If a name is not known, or stands twice.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    known = list(known)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(known):
        raise ValueError(
            f"--methods: expected some of {', '.join(known)}, each once, got {names!r}. "
            "Correct the list."
        )
    return chosen
