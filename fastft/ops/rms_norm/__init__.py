"""RMSNorm in the three rounding orders that Hugging Face models use, alone or after the addition of a residual."""

from __future__ import annotations

from .api import add_rms_norm, add_verdicts, rms_norm, verdicts

__all__ = ["add_rms_norm", "add_verdicts", "rms_norm", "verdicts"]
