"""A linear layer with a LoRA update, without the passes over [T, N] that adding the update separately takes."""

from __future__ import annotations

from .api import lora_linear, lora_linear_group, verdicts

__all__ = ["lora_linear", "lora_linear_group", "verdicts"]
