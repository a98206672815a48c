"""RMSNorm and rotation of q and k in plain torch: the oracle, and the implementation of CPUs and of torch.compile.

Bitwise `rms_norm` followed by `rope_qk`, of which each op keeps its own plain form (an op sees no other one).
"""

from __future__ import annotations

import torch


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    rounding: str,
    head_dim: int | None,
    interleaved: bool,
    whole_width: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise and rotate q and k; see `fastft.ops.qk_norm_rope.qk_norm_rope`. An fp64 q or k is computed in fp64."""

    def apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_token_dims = x.ndim - (2 if head_dim is None else 1)
        heads = x if head_dim is None else x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)
        if whole_width:
            normalised = _normalise(heads.flatten(-2), weight, eps, rounding).view(heads.shape)
        else:
            normalised = _normalise(heads, weight, eps, rounding)
        # Packed tokens take angles with a batch of one.
        of_tokens = [table[0] if table.ndim > num_token_dims + 1 else table for table in (cos, sin)]
        return _rotate(normalised, of_tokens[0].unsqueeze(-2), of_tokens[1].unsqueeze(-2), interleaved).view(x.shape)

    return apply(q, q_weight), apply(k, k_weight)


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: str) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    x_hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if rounding == "llama":
        return weight * x_hat.to(x.dtype)
    if rounding == "fp32_weight":
        return (weight * x_hat).to(x.dtype)
    return (x_hat * (1.0 + weight.to(wide.dtype))).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate x [..., H, D] by the angles of its tokens, [..., 1, R/2]."""
    half = cos.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    rotary, tail = wide[..., : 2 * half], wide[..., 2 * half :]
    if interleaved:
        first, second = rotary[..., ::2], rotary[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = rotary[..., :half], rotary[..., half:]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated, tail), dim=-1).to(x.dtype)
