"""How much work attention is, for counters of FLOPs."""

from __future__ import annotations

from collections.abc import Sequence


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
