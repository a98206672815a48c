"""Mixture of experts: the order in which tokens go to experts."""

from .api import sort_by_expert, verdicts
from .order import ExpertOrder

__all__ = ["ExpertOrder", "sort_by_expert", "verdicts"]
