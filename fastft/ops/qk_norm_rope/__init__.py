"""RMSNorm of q and k followed by their rotation, fused into one launch, with its gradient."""

from __future__ import annotations

from .api import qk_norm_rope, verdicts

__all__ = ["qk_norm_rope", "verdicts"]
