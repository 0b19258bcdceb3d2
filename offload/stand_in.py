"""Callables that stand in for a module's `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

SLOTS = ("forward", "_old_forward")
"""Attributes that hold a forward; the second is what accelerate's hooks call."""


class ForwardStandIn:
    """An attribute `forward` of a module instance, in front of the module's own.

    Hooks, names, parameters and the class stay as they are, and it copies and pickles with its
    module. The forward behind it is looked up at every call, since others (FSDP2) swap a module's
    class; a forward that stood on the instance before is kept and called instead.

    Args:
        module: the module to stand on; `put` does it.
    """

    stands_for_layer = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._slot = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
        self.instance_forward: Callable[..., Any] | None = module.__dict__.get(self._slot)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward behind this one, bound; `inspect.signature` finds it here."""
        if self.instance_forward is not None:
            return self.instance_forward
        forward: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return forward

    def put(self) -> None:
        """Takes the module's forward over; behind accelerate's hooks, where there are some."""
        self.module.__dict__[self._slot] = self

    def remove(self) -> None:
        """Gives the forward back; does nothing where another has been put in front of this one."""
        attributes = self.module.__dict__
        slot = next((name for name in SLOTS if attributes.get(name) is self), None)
        if slot is None:
            return
        if self.instance_forward is not None or slot != "forward":
            attributes[slot] = self.__wrapped__
        else:
            del attributes[slot]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module with the arguments of its own forward."""
        return self.__wrapped__(*args, **kwargs)


StandIn = TypeVar("StandIn", bound=ForwardStandIn)


def stand_in_of(module: nn.Module | None, kind: type[StandIn]) -> StandIn | None:
    """Returns the stand-in of a kind that is on a module; None where another is in front of it.

    Args:
        module: any module, or None.
        kind: class of the stand-in.

    Returns:
        The stand-in that stands for the module's forward, or for the one accelerate's hooks call.
    """
    attributes = module.__dict__ if module is not None else {}
    calls = (attributes.get(slot) for slot in SLOTS)
    return next((call for call in calls if isinstance(call, kind)), None)
