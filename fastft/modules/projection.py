"""Projections as patched modules call them: with their LoRA adapters fused where that computes the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from .state import ModelState


def project(shared: ModelState, projections: tuple[nn.Module, ...], x: torch.Tensor) -> list[torch.Tensor]:
    """`[projection(x) for projection in projections]`, with the adapters of all of them in common GEMMs.

    What is at hand is looked at on each call, because adapters come and go after patching.
    """
    projector = shared.projector
    if projector is None or not any("lora_A" in projection.__dict__["_modules"] for projection in projections):
        return [projection(x) for projection in projections]
    outputs, reasons = projector(projections, x)
    for projection, reason in zip(projections, reasons, strict=True):
        if reason is None:
            shared.counters["lora"] += 1
        elif "lora_A" in projection.__dict__["_modules"]:  # without an adapter there was nothing to fuse
            shared.counters[f"lora not fused: {reason}"] += 1
    return outputs


def is_repeatable(projections: tuple[nn.Module, ...]) -> bool:
    """Whether the projections give the same values when they are called again: no dropout, no code of others."""
    return not _has_global_hooks() and all(map(_is_repeatable, projections))


def is_repeatable_activation(activation: Any) -> bool:
    """Whether an activation is one that is known to draw no random numbers, with no code of others."""
    known = type(activation).__module__ in ("torch.nn.modules.activation", "transformers.activations")
    return known and type(activation) is not nn.RReLU and not _has_global_hooks() and not _is_changed(activation)


def _is_repeatable(projection: nn.Module) -> bool:
    if any(map(_is_changed, projection.modules())):
        return False
    if type(projection) is nn.Linear:
        return True
    base, dropouts = getattr(projection, "base_layer", None), getattr(projection, "lora_dropout", None)
    if type(base) is not nn.Linear or dropouts is None:
        return False
    return all(isinstance(dropout, nn.Identity) or not dropout.training for dropout in dropouts.values())


def _is_changed(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _has_global_hooks() -> bool:
    return bool(nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks)
