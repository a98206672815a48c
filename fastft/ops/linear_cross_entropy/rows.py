"""What the loss of one row of logits depends on and what is told about it: shared by kernels, plain torch and autograd.

With z a row of logits, y its target, V their number and e the label smoothing:

    x    = s z,  then  cap tanh(x / cap)  where there is a cap,  then  x / temperature
    lse  = log sum_j exp(x_j)                       p = exp(x - lse)
    loss = (1 - e) (lse - x_y) + e (lse - mean(x)) + z_loss lse^2
    dx   = (1 + 2 z_loss lse) p - (1 - e) onehot(y) - e / V          dz = dx * (dx/dz)
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowOptions(NamedTuple):
    """Plain numbers, the same for all rows; see above."""

    ignore_index: int = -100  # a row with this target has no loss, no gradient, and may hold anything
    logit_scale: float = 1.0
    softcap: float = 0.0  # 0: none
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0


class TokenStatistics(NamedTuple):
    """What the pass over the logits tells beside the loss; all [...] like targets, none of it differentiable."""

    log_probs: torch.Tensor  # fp32 (fp64 of fp64): log p of the target; 0 where it is ignored
    entropy: torch.Tensor  # likewise, -sum p log p in nats; 0 where the target is ignored
    argmax: (
        torch.Tensor
    )  # int64, the first of the largest; -1 where the target is ignored, anything where logits are NaN


class RowOutputs(NamedTuple):
    """Where a pass over M rows writes; all contiguous."""

    losses: torch.Tensor  # [M] fp32 (fp64 of fp64)
    statistics: TokenStatistics | None = None  # of [M]

    def slice(self, start: int, end: int) -> RowOutputs:
        statistics = self.statistics
        if statistics is not None:
            statistics = TokenStatistics(*(each[start:end] for each in statistics))
        return RowOutputs(self.losses[start:end], statistics)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What losses and sums are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
