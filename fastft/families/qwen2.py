"""Qwen2: biased q, k and v projections; some layers may have a sliding window."""

from __future__ import annotations

from ..family_spec import FamilySpec

SPEC = FamilySpec(
    name="qwen2",
    module="transformers.models.qwen2.modeling_qwen2",
    backbone="Qwen2Model",
    decoder_layer="Qwen2DecoderLayer",
    attention="Qwen2Attention",
    mlp="Qwen2MLP",
    rms_norm="Qwen2RMSNorm",
    sliding_window="module",
)
