"""What the tests of LoRA projections share: one projection at a time, through the projector of the package."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fastft.integrations import peft as integration
from fastft.integrations.bitsandbytes import FourBitWeights
from fastft.integrations.peft import LoRAProjection, LoRAProjector


def project(
    module: nn.Module, x: torch.Tensor, on_fused: Callable[[], None] | None = None
) -> tuple[torch.Tensor, str | None]:
    """What module(x) returns and why its own forward ran (None: the fused op did), by a projector without copies."""
    (y,), (reason,) = LoRAProjector()((module,), x)
    if reason is None and on_fused is not None:
        on_fused()
    return y, reason


def fused_lora(module: nn.Module, x: torch.Tensor) -> LoRAProjection | str:
    """The parts of a projection as the fused op would get them, or the reason why it would not."""
    return integration._fused_lora(module, integration._input_facts(x, FourBitWeights()))


def randomize(model: nn.Module) -> None:
    """B starts at zero, which would hide everything."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)


def halve(monkeypatch) -> None:
    """A mutant: half of the update."""
    original = integration._fused_lora

    def halved(module, facts):
        found = original(module, facts)
        return found._replace(scaling=found.scaling / 2) if isinstance(found, LoRAProjection) else found

    monkeypatch.setattr(integration, "_fused_lora", halved)
