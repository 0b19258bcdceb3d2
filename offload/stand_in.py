"""Callables that stand in for a module's `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class ForwardStandIn:
    """An attribute `forward` of a module instance, in front of the module's own.

    Hooks, names, parameters and the class stay as they are, and it copies and pickles with its
    module. The forward behind it is looked up at every call, since others (FSDP2) swap a module's
    class; a forward that stood on the instance before is kept and called instead.

    Args:
        module: the module to stand on; `put` does it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.instance_forward: Callable[..., Any] | None = module.__dict__.get("forward")

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward behind this one, bound; `inspect.signature` finds it here."""
        if self.instance_forward is not None:
            return self.instance_forward
        forward: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return forward

    def put(self) -> None:
        """Takes the module's forward over."""
        self.module.forward = self

    def remove(self) -> None:
        """Gives the forward back, unless somebody has put another in front of this one."""
        if self.module.__dict__.get("forward") is not self:
            return
        if self.instance_forward is not None:
            self.module.forward = self.instance_forward
        else:
            del self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module with the arguments of its own forward."""
        return self.__wrapped__(*args, **kwargs)
