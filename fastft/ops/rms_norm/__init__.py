"""RMSNorm in the three rounding orders that Hugging Face models use."""

from __future__ import annotations

from .api import rms_norm, verdicts

__all__ = ["rms_norm", "verdicts"]
