"""GraniteMoE: scores, embeddings, residuals and logits are scaled by the config; experts in every layer."""

from __future__ import annotations

from ..family_spec import FamilySpec

SPEC = FamilySpec(
    name="granitemoe",
    module="transformers.models.granitemoe.modeling_granitemoe",
    backbone="GraniteMoeModel",
    attention="GraniteMoeAttention",
    mlp=None,
    rms_norm="GraniteMoeRMSNorm",
)
