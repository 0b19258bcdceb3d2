"""Train language models on long inputs in little device memory: `offload.wrap(model)`."""

from offload._native import VERSION as __version__
from offload._report import Report, report
from offload._wrap import unwrap, wrap
from offload.errors import ArenaFull, DoesNotFit, LayerRefused, OffloadError, TicketPoisoned
from offload.ops.attention import attention
from offload.ops.linear_cross_entropy import linear_cross_entropy
from offload.planner import Plan, plan
from offload.policy import Policy

__all__ = [
    "ArenaFull",
    "DoesNotFit",
    "LayerRefused",
    "OffloadError",
    "Plan",
    "Policy",
    "Report",
    "TicketPoisoned",
    "__version__",
    "attention",
    "linear_cross_entropy",
    "plan",
    "report",
    "unwrap",
    "wrap",
]
