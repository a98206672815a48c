"""Packed attention: attention within each sequence of a batch whose sequences lie one after another."""

from .api import IMPLEMENTATIONS, resolve, varlen_attention, verdicts

__all__ = ["IMPLEMENTATIONS", "resolve", "varlen_attention", "verdicts"]
