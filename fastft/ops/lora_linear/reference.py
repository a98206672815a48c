"""A linear layer with a LoRA update in plain torch: the oracle, and what torch.compile is given to fuse."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """y = x W^T + b + scaling (x A^T) B^T, each step rounded. See `fastft.ops.lora_linear.lora_linear`."""
    return F.linear(x, weight, bias) + F.linear(F.linear(x, lora_A), lora_B) * scaling
