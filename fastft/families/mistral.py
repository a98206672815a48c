"""Mistral: a sliding window on every layer, if the config sets one."""

from __future__ import annotations

from ..family_spec import FamilySpec

SPEC = FamilySpec(
    name="mistral",
    module="transformers.models.mistral.modeling_mistral",
    backbone="MistralModel",
    decoder_layer="MistralDecoderLayer",
    attention="MistralAttention",
    mlp="MistralMLP",
    rms_norm="MistralRMSNorm",
    sliding_window="config",
)
