"""What Llama 4 asks of attention besides causality, for packed batches: chunks, and a temperature that grows."""

from __future__ import annotations

from typing import Any

import torch

from ..packing import PackedSequences


def sequences_seen_by(module: Any, packed: PackedSequences) -> PackedSequences:
    """The sequences in which a layer's tokens see each other: the chunks of each document in a chunked layer."""
    types, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    if not types or index is None or types[index] != "chunked_attention":
        return packed
    return packed.chunks(module.config.attention_chunk_size)


def with_temperature_of_documents(module: Any, query: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
    """query [B, H, L, D] as if each document stood alone, where the module has scaled it by the place in the row.

        scale(i) = 1 + attn_scale * log(1 + floor((i + 1) / floor_scale))

    which is 1 in rows shorter than floor_scale.
    """
    batch, _, length, _ = query.shape
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope or length < module.floor_scale:
        return query
    in_row = torch.arange(length, device=query.device).repeat(batch)
    wanted, applied = (_scale(module, places) for places in (packed.position_ids, in_row))
    ratio = (wanted / applied).view(batch, 1, length, 1)
    return (query * ratio).to(query.dtype)


def _scale(module: Any, places: torch.Tensor) -> torch.Tensor:
    return torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
