"""The plain cross entropy that `linear_cross_entropy` must equal: all logits at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def reference_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
    shift: bool = False,
) -> torch.Tensor:
    """`linear_cross_entropy` written with plain torch; needs several `tokens x vocab` tensors.

    Args:
        hidden: `[..., E]`.
        weight: `[V, E]`.
        labels: `[...]`, int64.
        bias: `[V]`, or None.
        ignore_index: label of tokens without a loss.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        softcap: cap of the logits; 0 for none.
        logit_scale: factor of the logits, applied before the cap.
        z_loss: weight of the squared log-sum-exp.
        reduction: "mean", "sum" or "none".
        num_items_in_batch: divides the sum.
        shift: hidden state t is scored with label t + 1.

    Returns:
        The loss in float32 or wider.
    """
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits, targets = logits.reshape(-1, weight.shape[0]), labels.reshape(-1)
    losses = F.cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    valid = targets != ignore_index
    losses = losses + z_loss * logits.logsumexp(-1).square() * valid
    if num_items_in_batch is not None:
        return losses.sum() / num_items_in_batch
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / valid.sum().clamp(min=1) if reduction == "mean" else losses.sum()
