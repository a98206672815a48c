"""Packed attention through the FlashAttention-2 kernels that PyTorch carries itself (sm80 and newer, fp16 and bf16).

The two calls are registered as operators whose names contain `flash_attn`, because selective checkpointing (TRL's
among others) keeps attention outputs by that name. They are defined on the raw dispatcher and not with
`torch.library.custom_op`, whose wrapper costs host time in every call (QuACK, which avoids it too, cites 60 us).

The window is passed as torch.nn.attention.varlen does: -1 is unbounded on that side, causal is (-1, 0) together with
the causal flag, a causal window is (left, 0) without it. Forward and backward read it alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...packing import PackedSequences
from ..first_order import first_order
from .alignment import is_aligned

# FlashAttention-2 wants head dimensions that are multiples of 8 and at most 256.
HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = 256

_FORWARD = (
    "flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, SymInt max_seqlen, float dropout, "
    "bool causal, float softmax_scale, SymInt window_left, SymInt window_right) -> (Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "flash_attn_varlen_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, "
    "SymInt max_seqlen, float dropout, bool causal, Tensor rng_state, Tensor unused, float softmax_scale, "
    "SymInt window_left, SymInt window_right) -> (Tensor, Tensor, Tensor)"
)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy of it whose rows all start on 16-byte boundaries."""
    # A clone lies as empty_like would lay it out, so that the fake kernels tell the truth.
    return x if is_aligned(x) else x.clone()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout: float,
    causal: bool,
    softmax_scale: float,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, ...]:
    boundaries = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = {"scale": softmax_scale, "window_size_left": window_left, "window_size_right": window_right}
    q, k, v = map(_aligned, (q, k, v))
    # The fifth result is the debug mask, which is switched off.
    return torch.ops.aten._flash_attention_forward(q, k, v, *boundaries, dropout, causal, False, **options)[:4]


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout: float,
    causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, ...]:
    boundaries = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = {"scale": softmax_scale, "window_size_left": window_left, "window_size_right": window_right}
    grad, q, k, v = map(_aligned, (grad, q, k, v))
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *boundaries, dropout, causal, rng_state, unused, **options
    )


def _fake_forward(q: Tensor, *others: Any) -> tuple[Tensor, ...]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# Registered at import, like any operator: torch.compile cannot trace a registration. The object keeps them alive.
_LIBRARY = torch.library.Library("fastft", "FRAGMENT")
_LIBRARY.define(_FORWARD)
_LIBRARY.define(_BACKWARD)
_LIBRARY.impl("flash_attn_varlen_forward", _forward, "CUDA")
_LIBRARY.impl("flash_attn_varlen_backward", _backward, "CUDA")
torch.library.register_fake("fastft::flash_attn_varlen_forward", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("fastft::flash_attn_varlen_backward", _fake_backward, lib=_LIBRARY)
_forward_operator = torch.ops.fastft.flash_attn_varlen_forward.default
_backward_operator = torch.ops.fastft.flash_attn_varlen_backward.default


class _FlashAttnVarlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout: float,
        causal: bool,
        softmax_scale: float,
        window_left: int,
        window_right: int,
    ) -> Tensor:
        out, lse, rng_state, unused = _forward_operator(
            q, k, v, cu_seqlens, max_seqlen, dropout, causal, softmax_scale, window_left, window_right
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.cu_seqlens = cu_seqlens  # PackedSequences owns it, and never writes it
        ctx.before_rng = (max_seqlen, dropout, causal)
        ctx.rng = (rng_state, unused)  # of the first forward; a recompute restores the generator and draws the same
        ctx.after_rng = (softmax_scale, window_left, window_right)
        return out

    @staticmethod
    @first_order("attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _backward_operator(
            grad.contiguous(), q, k, v, out, lse, ctx.cu_seqlens, *ctx.before_rng, *ctx.rng, *ctx.after_rng
        )
        return dq, dk, dv, *(None,) * 7


def varlen_attention_fa2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequences,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int | None, int | None],
    dropout: float,
) -> Tensor:
    """See `fastft.ops.attention.varlen_attention`."""
    if packed.total_tokens == 0:
        return q.new_empty(q.shape) + 0 * (q.sum() + k.sum() + v.sum())
    head_dim = q.shape[-1]
    padding = -head_dim % HEAD_DIM_MULTIPLE
    if padding:
        q, k, v = (torch.nn.functional.pad(x, (0, padding)) for x in (q, k, v))
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    left, right = (_kernel_window(side, packed.max_seqlen) for side in window_size)
    if causal:
        right = 0
    # At max_seqlen 1 the kernel takes a decoding shortcut that assumes one token per sequence, empty ones included.
    max_seqlen = max(packed.max_seqlen, 2)
    out = _FlashAttnVarlen.apply(
        q, k, v, packed.cu_seqlens, max_seqlen, dropout, causal and left < 0, softmax_scale, left, right
    )
    return out[..., :head_dim] if padding else out


def _kernel_window(side: int | None, max_seqlen: int) -> int:
    """A side that reaches past the longest sequence is unbounded; as a number it would take the slower local kernel,
    and could overflow the kernel's 32 bits."""
    return -1 if side is None or side >= max_seqlen - 1 else side
