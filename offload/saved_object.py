"""Objects that an autograd node keeps as it keeps a saved tensor: until its backward has run."""

from __future__ import annotations

from typing import Any

import torch


class SavedObject(torch.autograd.graph.saved_tensors_hooks):
    """Lets a `torch.autograd.Function` save any object, not only tensors.

    What hangs on `ctx` itself lives as long as the node, and so as long as the caller's `loss`,
    well into the next step. A saved tensor goes after the node's backward, unless the graph is
    retained, and is missed with torch's own message after that. So a tensor without elements is
    saved in place of the object, and hooks exchange the two::

        saved = SavedObject(value)
        with saved:
            output = Function.apply(saved, ...)  # forward: ctx.save_for_backward(saved.carrier)
                                                 # backward: SavedObject.of(ctx)

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.carrier = torch.empty(0, device="cpu")
        carrier_storage = self.carrier.untyped_storage()._cdata

        def pack(tensor: torch.Tensor) -> Any:
            # Hooks get an alias; a tensor that somebody else saves meanwhile passes as it is.
            is_carrier = tensor.untyped_storage()._cdata == carrier_storage
            return _Packed(value) if is_carrier else tensor

        super().__init__(pack, _unpack)

    @staticmethod
    def of(ctx: Any) -> Any:
        """Returns the object that a node saved, and nothing else with it.

        Args:
            ctx: of the node, in its backward.

        Returns:
            The object.

        Raises:
            RuntimeError: torch's own, where an earlier backward has freed what was saved.
        """
        (carrier,) = ctx.saved_tensors
        return carrier.offload_value


class _Packed:
    def __init__(self, value: Any) -> None:
        self.value = value


def _unpack(packed: Any) -> torch.Tensor:
    if not isinstance(packed, _Packed):
        tensor: torch.Tensor = packed
        return tensor
    carrier = torch.empty(0, device="cpu")
    carrier.offload_value = packed.value  # type: ignore[attr-defined]
    return carrier
