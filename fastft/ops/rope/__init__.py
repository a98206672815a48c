"""Rotary position embedding of q and k, fused into one launch, with its gradient."""

from __future__ import annotations

from .api import rope_qk, rope_qk_, verdicts
from .in_place import in_place_verdict

__all__ = ["in_place_verdict", "rope_qk", "rope_qk_", "verdicts"]
