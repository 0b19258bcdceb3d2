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
    def replaced(self) -> Iterator[list[torch.Tensor]]:
        """Puts fresh aliases in the parameters' places, and the parameters back afterwards.

        Yields:
            The aliases, one for each of `parameters`, leaves that require gradients.
        """
        real = [(module, key, module._parameters[key]) for module, key, _ in self._slots]
        aliases: dict[int, torch.Tensor] = {}
        try:
            for (module, key, index), (_, _, current) in zip(self._slots, real, strict=True):
                assert current is not None
                if index not in aliases:
                    aliases[index] = _alias(current)
                module._parameters[key] = aliases[index]  # type: ignore[assignment]
            yield [aliases[index] for index in range(len(self.parameters))]
        finally:
            for module, key, current in real:
                module._parameters[key] = current


def _alias(parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, nn.Parameter):
        return nn.Parameter(parameter.detach())
    return parameter.detach().requires_grad_()
