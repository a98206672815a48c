"""The order of experts in plain torch, on any device: the oracle of the kernels."""

from __future__ import annotations

import torch

from .order import ExpertOrder


def sort_by_expert(topk_indices: torch.Tensor, num_experts: int) -> ExpertOrder:
    """By a stable `argsort` and a `bincount`; see `fastft.ops.moe.sort_by_expert`."""
    experts = topk_indices.flatten()
    experts = experts.where((experts >= 0) & (experts < num_experts), num_experts)
    pairs = experts.argsort(stable=True)
    numbers = torch.arange(len(pairs), dtype=torch.int32, device=pairs.device)
    rows = torch.empty_like(numbers).scatter_(0, pairs, numbers)
    counts = experts.bincount(minlength=num_experts + 1)[:num_experts]
    return ExpertOrder(pairs.int(), rows, counts.cumsum(0, dtype=torch.int32))
