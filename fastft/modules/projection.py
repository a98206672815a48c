"""Projections as patched modules call them: with their LoRA adapters fused where that computes the same."""

from __future__ import annotations

import torch
from torch import nn

from .state import ModelState


def project(shared: ModelState, projections: tuple[nn.Module, ...], x: torch.Tensor) -> list[torch.Tensor]:
    """`[projection(x) for projection in projections]`, with the adapters of all of them in common GEMMs.

    What is at hand is looked at on each call, because adapters come and go after patching.
    """
    projector = shared.projector
    if projector is None or not any("lora_A" in projection.__dict__["_modules"] for projection in projections):
        return [projection(x) for projection in projections]
    outputs, reasons = projector(projections, x)
    for reason in reasons:
        shared.counters["lora" if reason is None else f"lora not fused: {reason}"] += 1
    return outputs
