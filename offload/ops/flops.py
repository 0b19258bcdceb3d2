"""How much work attention is, for torch's counter of FLOPs.

The counter's module imports Triton, so formulas are registered when somebody imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

COUNTER = "torch.utils.flop_counter"


def register_flops(operator: Any, formula: Callable[..., int]) -> None:
    """Lets torch's counter of FLOPs know an operator, now or when its module is imported.

    Args:
        operator: a packet of `torch.ops`.
        formula: FLOPs from the operator's arguments, tensors given by their shapes.
    """

    def register() -> None:
        sys.modules[COUNTER].register_flop_formula(operator)(formula)

    if COUNTER in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _AfterImport(COUNTER, register))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Does something once, behind the first import of a module."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self._module = module
        self._action = action

    def find_spec(
        self, fullname: str, path: Any = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: types.ModuleType) -> None:
                execute(module)
                self._action()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def product_flops(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    *,
    of_keys: int,
    of_values: int,
) -> int:
    """Counts products between all queries and all keys; what a mask spares too, as torch does.

    Args:
        q_shape: `[B, H, T, D]`.
        k_shape: `[B, Hk, N, D]`.
        v_shape: `[B, Hk, N, Dv]`.
        of_keys: matrix products along `D`.
        of_values: matrix products along `Dv`.

    Returns:
        FLOPs, two for each multiplication and addition.
    """
    batch, heads, rows, head_dim = q_shape
    elements = of_keys * head_dim + of_values * v_shape[3]
    return 2 * batch * heads * rows * k_shape[2] * elements
