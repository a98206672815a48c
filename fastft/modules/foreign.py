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
    kinds: set[type[nn.Module]] = set()
    waiting: list[nn.Module] = [backbone]
    while waiting:  # with `modules()` it takes twice as long, and an adapted model has thousands
        module = waiting.pop()
        state = module.__dict__
        children = state["_modules"]
        if children:
            waiting += [child for child in children.values() if child is not None]
        if state["_forward_hooks"] or state["_forward_pre_hooks"]:
            hook = foreign_hook(state["_forward_pre_hooks"]) or foreign_hook(state["_forward_hooks"])
            if hook:
                return f"a hook sees what a layer computes ({hook})"
        variants = state.get("lora_variant")
        if variants and any("alora" in type(variant).__name__.lower() for variant in variants.values()):
            return "aLoRA counts tokens from the end of a row"
        kinds.add(type(module))
    return next((reason for reason in map(_why_adapter_needs_rows, kinds) if reason), "")


def foreign_hook(hooks: Mapping[int, Any]) -> str:
    """The name of a hook that none of the libraries has registered, or an empty string."""
    for hook in hooks.values():
        function = getattr(hook, "func", hook)  # of a partial
        owner = getattr(function, "__module__", None) or type(function).__module__
        if owner.partition(".")[0] not in _KNOWN:
            return f"{owner}.{getattr(function, '__qualname__', type(function).__name__)}"
    return ""


def _why_adapter_needs_rows(cls: type[nn.Module]) -> str:
    before, found, tuner = cls.__module__.partition("peft.tuners.")
    kind = tuner.partition(".")[0]
    if before or not found or kind in _BY_TOKEN:
        return ""
    return f"adapters of the kind {kind!r} may look at whole rows"
