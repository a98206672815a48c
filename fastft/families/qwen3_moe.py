"""Qwen3-MoE: q and k are normalised per head; one sliding window for all layers, if the config sets one."""

from __future__ import annotations

from ..family_spec import FamilySpec

SPEC = FamilySpec(
    name="qwen3_moe",
    module="transformers.models.qwen3_moe.modeling_qwen3_moe",
    backbone="Qwen3MoeModel",
    decoder_layer="Qwen3MoeDecoderLayer",
    attention="Qwen3MoeAttention",
    mlp="Qwen3MoeMLP",
    rms_norm="Qwen3MoeRMSNorm",
    qk_norm=True,
    sliding_window="module",
)
