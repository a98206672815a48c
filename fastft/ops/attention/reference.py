"""Packed attention in plain torch: the oracle, and the implementation of last resort. Any device, any dtype."""

from __future__ import annotations

import math

import torch

from ...packing import PackedSequences

# A block of queries at a time bounds the scores that are held at once (all are kept where a gradient is wanted).
_QUERY_BLOCK = 1024


def varlen_attention_reference(
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
    """o[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j] over the keys that query i sees, document by document.

    The softmax is computed in fp32 (fp64 stays fp64).
    See `fastft.ops.attention.varlen_attention` for the arguments.
    """
    group = q.shape[1] // k.shape[1]
    parts = []
    for start, end in packed.segments:
        keys = k[start:end].repeat_interleave(group, dim=1).transpose(0, 1)  # [Hq, S, D]
        values = v[start:end].repeat_interleave(group, dim=1).transpose(0, 1)
        for first in range(start, end, _QUERY_BLOCK):
            last = min(first + _QUERY_BLOCK, end)
            queries = q[first:last].transpose(0, 1)  # [Hq, block, D]
            visible = visible_keys((first, last), (start, end), causal, window_size, q.device)
            parts.append(_attend(queries, keys, values, visible, softmax_scale, dropout).transpose(0, 1))
    return torch.cat(parts) if parts else q.new_empty(0, q.shape[1], v.shape[2]) + 0 * (q.sum() + k.sum() + v.sum())


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float, dropout: float
) -> torch.Tensor:
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    probabilities = scores.softmax(dim=-1).to(q.dtype)  # every query sees itself, so no row is all -inf
    probabilities = torch.nn.functional.dropout(probabilities, dropout, training=dropout > 0)
    return probabilities @ v


def visible_keys(
    queries: tuple[int, int],
    keys: tuple[int, int],
    causal: bool,
    window_size: tuple[int | None, int | None],
    device: torch.device,
) -> torch.Tensor | None:
    """bool `[queries, keys]` for two (first, end) ranges of one document's tokens, or None if each sees all."""
    left, right = window_size
    if causal:
        right = 0
    if left is None and right is None:
        return None
    query = torch.arange(*queries, device=device)[:, None]
    key = torch.arange(*keys, device=device)[None, :]
    visible = torch.ones(query.shape[0], key.shape[1], dtype=torch.bool, device=device)
    if right is not None:
        visible &= key <= query + right
    if left is not None:
        visible &= key >= query - left
    return visible
