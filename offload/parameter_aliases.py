"""Stand-ins for a layer's parameters while it is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class ParameterAliases:
    """The parameters of a layer that need gradients, and where they hang.

    A recompute that differentiated against the parameters themselves would run the user's hooks on
    them once a tile. Against detached aliases they run once a step, on the whole gradient, where
    autograd accumulates it. Values are looked up when the aliases are made, since sharded
    parameters are whole only around the layer's own forward and backward.

    Args:
        layer: the layer about to be called.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.parameters: list[torch.Tensor] = []
        self._slots: list[tuple[nn.Module, str, int]] = []
        index_of: dict[int, int] = {}
        for module in layer.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    index = index_of.setdefault(id(parameter), len(self.parameters))
                    if index == len(self.parameters):
                        self.parameters.append(parameter)
                    self._slots.append((module, key, index))

    @contextmanager
    def replaced(self, dtype: torch.dtype | None = None) -> Iterator[list[torch.Tensor]]:
        """Puts fresh aliases in the parameters' places, and the parameters back afterwards.

        Args:
            dtype: to cast the aliases to; None keeps each one's own, without a copy.

        Yields:
            The aliases, one for each of `parameters`, leaves that require gradients.
        """
        real = [(module, key, module._parameters[key]) for module, key, _ in self._slots]
        aliases: list[torch.Tensor | None] = [None] * len(self.parameters)
        try:
            for (module, key, index), (_, _, current) in zip(self._slots, real, strict=True):
                if aliases[index] is None:
                    assert current is not None
                    aliases[index] = _alias(current, dtype)
                module._parameters[key] = aliases[index]  # type: ignore[assignment]
            yield [alias for alias in aliases if alias is not None]
        finally:
            for module, key, current in real:
                module._parameters[key] = current


def _alias(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    values = parameter.detach() if dtype is None else parameter.detach().to(dtype)
    if isinstance(parameter, nn.Parameter):
        return nn.Parameter(values)
    return values.requires_grad_()
