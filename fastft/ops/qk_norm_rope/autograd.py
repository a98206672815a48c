"""Gradients of normalised and rotated q and k: one launch forward, one backward.

Saved for backward: q, k and rstd. The weights, cos and sin live on anyway and are only kept. Backward reads incoming
gradients of any strides (expanded, transposed, shared) and writes none of them; it has no derivative of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from ..first_order import first_order
from ..kept import KeptTensors
from .launch import Side, launch_backward, launch_forward
from .specialise import Kind


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        head_dim: int | None,
        eps: float,
        kind: Kind,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_out, k_out, q_rstd, k_rstd = launch_forward(q, k, q_weight, k_weight, cos, sin, head_dim, eps, kind)
        needs_q, needs_k, needs_q_weight, needs_k_weight = ctx.needs_input_grad[:4]
        of_q = (q, q_rstd) if needs_q or needs_q_weight else (None, None)
        of_k = (k, k_rstd) if needs_k or needs_k_weight else (None, None)
        ctx.save_for_backward(*of_q, *of_k)
        ctx.set_materialize_grads(False)
        ctx.kept = KeptTensors((q_weight, k_weight, cos, sin))
        ctx.head_dim, ctx.kind = head_dim, kind
        return q_out, k_out

    @staticmethod
    @first_order("rms_norm")  # which takes this op away; rotations have second derivatives
    def backward(ctx: Any, dq_out: torch.Tensor | None, dk_out: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, q_rstd, k, k_rstd = ctx.saved_tensors
        q_weight, k_weight, cos, sin = ctx.kept.unchanged()
        needs_q, needs_k, needs_q_weight, needs_k_weight = ctx.needs_input_grad[:4]
        of_q = of_k = None
        if dq_out is not None and (needs_q or needs_q_weight):
            of_q = Side(dq_out, q, q_weight, q_rstd, needs_q, needs_q_weight)
        if dk_out is not None and (needs_k or needs_k_weight):
            of_k = Side(dk_out, k, k_weight, k_rstd, needs_k, needs_k_weight)
        if of_q is None and of_k is None:
            return (None,) * 9
        (dq, dq_weight), (dk, dk_weight) = launch_backward(of_q, of_k, cos, sin, ctx.head_dim, ctx.kind)
        return dq, dk, dq_weight, dk_weight, None, None, None, None, None


def normalise_and_rotate(
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
    """`fastft.ops.qk_norm_rope.qk_norm_rope` for validated arguments with at least one token."""
    kind = Kind(rounding, whole_width, interleaved)
    return _QKNormRope.apply(q, k, q_weight, k_weight, cos, sin, head_dim, eps, kind)
