"""Packed attention through torch's scaled_dot_product_attention, one call per document.

No document sees another because it is never handed another, so no mask over all tokens exists. A sliding window
needs a mask, built for one block of queries at a time.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from ...packing import PackedSequences
from .alignment import BYTES, is_aligned
from .reference import visible_keys

_QUERY_BLOCK = 1024


def varlen_attention_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: PackedSequences,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int | None, int | None],
    dropout: float,
) -> torch.Tensor:
    """See `fastft.ops.attention.varlen_attention`."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        # On a CPU enable_gqa leaves the flash kernel, and on CUDA the memory-efficient one.
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    head_dim = v.shape[2]
    queries, keys, values = (_aligned(x).transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D]
    left, right = window_size
    if causal:
        right = 0
    parts = []
    for start, end in packed.segments:
        length = end - start
        windowed = (left is not None and left < length - 1) or (right is not None and right < length - 1 and not causal)
        for first in range(start, end, _QUERY_BLOCK if windowed else max(length, 1)):
            last = min(first + _QUERY_BLOCK, end) if windowed else end
            # Keys outside every window of this block are left out, so a window's cost does not grow with the document.
            low = max(start, first - left) if windowed and left is not None else start
            high = min(end, last + right) if windowed and right is not None else end
            mask = visible_keys((first, last), (low, high), causal, (left, right), q.device) if windowed else None
            out = scaled_dot_product_attention(
                queries[:, :, first:last],
                keys[:, :, low:high],
                values[:, :, low:high],
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=causal and mask is None,
                scale=softmax_scale,
            )
            parts.append(out[0, :, :, :head_dim].transpose(0, 1))
    if not parts:
        return q.new_empty(q.shape) + 0 * (q.sum() + k.sum() + v.sum())
    out = torch.cat(parts)
    if out.is_cuda and out.requires_grad:
        out.register_hook(_aligned_gradient)
    return out


def _aligned_gradient(grad: torch.Tensor | None) -> torch.Tensor | None:
    if grad is None or is_aligned(grad):
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] on CUDA with every row on a 16-byte boundary, if need be with zeros behind D, which add nothing.

    For others torch (2.11) finds no kernel in fp32, and in fp16 and bf16 gives wrong numbers without an error.
    """
    if x.device.type != "cuda":
        return x
    padding = -x.shape[2] % (BYTES // x.element_size())
    if padding:
        return torch.nn.functional.pad(x, (0, padding))
    return x if is_aligned(x) and x.stride(2) == 1 else x.clone(memory_format=torch.contiguous_format)
