"""Rotary position embedding in plain torch: the oracle, and the implementation of CPUs and of torch.compile.

    half:         y[i] = x[i] * cos[i] - x[i + R/2] * sin[i]     y[i + R/2] = x[i + R/2] * cos[i] + x[i] * sin[i]
    interleaved:  the same with the pair (2i, 2i + 1)            i < R/2; elements from R on pass through

Computed in fp32 (fp64 stays fp64) and rounded once, to the dtype of x. In fp32 it is bitwise what
`x * cos + rotate_half(x) * sin` gives, since both round the two products and their sum.
"""

from __future__ import annotations

import torch

from .geometry import align_angles


def rope_qk_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    head_dim: int | None = None,
    position_ids: torch.Tensor | None = None,
    layout: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k by their positions; arguments and shapes are those of `rope_qk`, already checked."""
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    token_dims = q.shape[: q.ndim - (2 if head_dim is None else 1)]
    cos, sin = align_angles(cos, token_dims), align_angles(sin, token_dims)
    return _rotate(q, cos, sin, head_dim, layout), _rotate(k, cos, sin, head_dim, layout)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_dim: int | None, layout: str) -> torch.Tensor:
    heads = x if head_dim is None else x.unflatten(-1, (-1, head_dim))
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(compute_dtype).unsqueeze(-2), sin.to(compute_dtype).unsqueeze(-2)
    half = cos.shape[-1]
    rotary = heads[..., : 2 * half].to(compute_dtype)
    if layout == "half":
        first, second = rotary[..., :half], rotary[..., half:]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = rotary[..., ::2], rotary[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    rotated = rotated.to(x.dtype)
    if 2 * half < heads.shape[-1]:
        rotated = torch.cat((rotated, heads[..., 2 * half :]), dim=-1)
    return rotated if head_dim is None else rotated.flatten(-2)
