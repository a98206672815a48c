"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from ..family_spec import FamilySpec

SPEC = FamilySpec(
    name="mixtral",
    module="transformers.models.mixtral.modeling_mixtral",
    backbone="MixtralModel",
    decoder_layer="MixtralDecoderLayer",
    attention="MixtralAttention",
    mlp=None,
    rms_norm="MixtralRMSNorm",
    sliding_window="config",
)
