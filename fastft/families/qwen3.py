"""Qwen3: q and k are normalised per head before the rotation."""

from __future__ import annotations

from ..family_spec import FamilySpec

SPEC = FamilySpec(
    name="qwen3",
    module="transformers.models.qwen3.modeling_qwen3",
    backbone="Qwen3Model",
    decoder_layer="Qwen3DecoderLayer",
    attention="Qwen3Attention",
    mlp="Qwen3MLP",
    rms_norm="Qwen3RMSNorm",
    qk_norm=True,
    sliding_window="module",
)
