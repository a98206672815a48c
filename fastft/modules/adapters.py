"""PEFT's adapters in a backbone: those that look at the rows of a batch, or at its padding, want the batch as it is."""

from __future__ import annotations

from torch import nn

# Tuners that treat each token by itself. Others may average over a row, or know the rows of a batch by their number.
_BY_TOKEN = frozenset({
    "adalora", "boft", "c3a", "fourierft", "gralora", "hra", "ia3", "loha", "lokr", "lora", "oft", "trainable_tokens",
    "tuners_utils", "vera",
})  # fmt: skip


def why_adapters_need_rows(backbone: nn.Module) -> str:
    """Why a batch has to keep its rows for an adapter's sake; empty if every adapter treats each token by itself."""
    for module in backbone.modules():
        package, _, tuner = type(module).__module__.partition("peft.tuners.")
        if package or not tuner:
            continue
        kind = tuner.partition(".")[0]
        if kind not in _BY_TOKEN:
            return f"adapters of the kind {kind!r} may look at whole rows"
        variants = module.__dict__.get("lora_variant") or {}
        name = next((type(variant).__name__ for variant in variants.values()), "")
        if "alora" in name.lower():
            return "aLoRA counts tokens from the end of a row"
    return ""
