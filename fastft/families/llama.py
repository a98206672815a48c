"""Llama: the layout that most families follow (SmolLM2 and TinyLlama are Llama models too)."""

from __future__ import annotations

from ..family_spec import FamilySpec

SPEC = FamilySpec(
    name="llama",
    module="transformers.models.llama.modeling_llama",
    backbone="LlamaModel",
    decoder_layer="LlamaDecoderLayer",
    attention="LlamaAttention",
    mlp="LlamaMLP",
    rms_norm="LlamaRMSNorm",
)
