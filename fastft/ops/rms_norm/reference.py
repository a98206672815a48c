"""RMSNorm in plain torch: any device, differentiable, and bitwise what the Hugging Face modules compute."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, rounding: str) -> torch.Tensor:
    """Normalise the last dimension by its root mean square; see `fastft.ops.rms_norm.rms_norm`.

    An fp64 `x` is computed in fp64, so that the same code serves as the oracle of the tests.
    """
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    x_hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return x_hat.to(x.dtype)
    if rounding == "llama":
        return weight * x_hat.to(x.dtype)
    if rounding == "fp32_weight":
        return (weight * x_hat).to(x.dtype)
    return (x_hat * (1.0 + weight.to(wide.dtype))).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, and normalise the sum; see `fastft.ops.rms_norm.add_rms_norm`."""
    h = residual + x
    return h, rms_norm(h, weight, eps, rounding)
