"""Qwen2-MoE: a shared expert beside the others. Its attention is not told the window, which is in its masks alone."""

from __future__ import annotations

from ..family_spec import FamilySpec

SPEC = FamilySpec(
    name="qwen2_moe",
    module="transformers.models.qwen2_moe.modeling_qwen2_moe",
    backbone="Qwen2MoeModel",
    decoder_layer="Qwen2MoeDecoderLayer",
    attention="Qwen2MoeAttention",
    mlp="Qwen2MoeMLP",
    rms_norm="Qwen2MoeRMSNorm",
)
