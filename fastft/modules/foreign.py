"""What others have put into a backbone, and whether it wants a batch as it came: with its rows and their padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

# Tuners of PEFT that treat each token by itself. Others may average over a row, or number the rows of a batch.
_BY_TOKEN = frozenset({
    "_buffer_dict", "adalora", "boft", "c3a", "fourierft", "gralora", "hra", "ia3", "loha", "lokr", "lora", "oft",
    "trainable_tokens", "vera",
})  # fmt: skip
# Whose hooks leave outputs alone, or are asked for on their own (recorded states, NEFTune, aLoRA).
_KNOWN = ("fastft", "transformers", "torch", "peft", "accelerate")


def why_rows_matter(backbone: nn.Module) -> str:
    """Why a batch has to keep its rows for the sake of a hook or an adapter; empty if it need not."""
    for module in backbone.modules():
        hook = foreign_hook(module._forward_pre_hooks) or foreign_hook(module._forward_hooks)
        if hook:
            return f"a hook sees what a layer computes ({hook})"
        reason = _why_adapter_needs_rows(module)
        if reason:
            return reason
    return ""


def foreign_hook(hooks: Mapping[int, Any]) -> str:
    """The name of a hook that none of the libraries has registered, or an empty string."""
    for hook in hooks.values():
        function = getattr(hook, "func", hook)  # of a partial
        owner = getattr(function, "__module__", None) or type(function).__module__
        if owner.partition(".")[0] not in _KNOWN:
            return f"{owner}.{getattr(function, '__qualname__', type(function).__name__)}"
    return ""


def _why_adapter_needs_rows(module: nn.Module) -> str:
    before, found, tuner = type(module).__module__.partition("peft.tuners.")
    if before or not found:
        return ""
    kind = tuner.partition(".")[0]
    if kind not in _BY_TOKEN:
        return f"adapters of the kind {kind!r} may look at whole rows"
    variants = module.__dict__.get("lora_variant") or {}
    if any("alora" in type(variant).__name__.lower() for variant in variants.values()):
        return "aLoRA counts tokens from the end of a row"
    return ""
