"""Mixture of experts: the order in which tokens go to experts, and what these compute."""

from .api import experts, is_aligned, resolve, sort_by_expert, sort_verdicts, verdicts
from .experts import ExpertAdapter, ExpertWeights
from .gate import Gate
from .order import ExpertOrder

__all__ = [
    "ExpertAdapter",
    "ExpertOrder",
    "ExpertWeights",
    "Gate",
    "experts",
    "is_aligned",
    "resolve",
    "sort_by_expert",
    "sort_verdicts",
    "verdicts",
]
