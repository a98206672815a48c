"""The head of a language model and its cross-entropy in one, without the logits of all tokens."""

from __future__ import annotations

from .api import linear_cross_entropy, token_log_probs
from .rows import TokenStatistics
from .run import verdicts

__all__ = ["TokenStatistics", "linear_cross_entropy", "token_log_probs", "verdicts"]
