"""Plans: what a step will take, and the fastest way to run it that fits."""

from offload.planner.planning import plan
from offload.planner.result import Plan

__all__ = ["Plan", "plan"]
