"""A linear layer with a LoRA update, without the passes over [T, N] that adding the update separately takes."""

from __future__ import annotations

from .api import AUTOCAST_DTYPES, lora_linear, lora_linear_group, verdicts
from .casts import AdapterCasts

__all__ = ["AUTOCAST_DTYPES", "AdapterCasts", "lora_linear", "lora_linear_group", "verdicts"]
