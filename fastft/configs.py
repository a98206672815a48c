"""Config objects of a patched model: its own while it is patched, where fastft's functions are selected."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from .modules.names import ImplementationName
from .modules.state import ModelState, OwnConfig


def own_configs(target: nn.Module, shared: ModelState) -> None:
    """Gives the model config objects of its own, since other models may have been built from the same ones."""
    memo: dict[int, Any] = {}
    for module in target.modules():
        config = module.__dict__.get("config")
        if not hasattr(config, "_attn_implementation"):
            continue
        own = copy.deepcopy(config, memo)
        if not any(entry.original is config for entry in shared.configs):
            shared.configs.append(OwnConfig(config, own, copy.deepcopy(own.__dict__)))
        module.__dict__["config"] = own


def select_attention(config: Any) -> None:
    from .modules.attention import AttentionName

    if not isinstance(config._attn_implementation, AttentionName):
        config._attn_implementation_internal = AttentionName(config._attn_implementation or "eager")


def select_experts(config: Any) -> None:
    from .modules.experts import ExpertsName

    if not isinstance(config._experts_implementation, ExpertsName):
        config._experts_implementation_internal = ExpertsName(config._experts_implementation or "eager")


def restore_configs(target: nn.Module, configs: list[OwnConfig]) -> None:
    former = {id(entry.own): entry.original for entry in configs}
    for entry in configs:
        _carry_over(entry, former)
    for module in target.modules():
        original = former.get(id(module.__dict__.get("config")))
        if original is not None:
            module.__dict__["config"] = original


def _carry_over(entry: OwnConfig, former: dict[int, Any]) -> None:
    """Repeats on the former config what was changed on the one that took its place."""
    original, own, at_patching = entry
    for name, value in own.__dict__.items():
        ours = isinstance(value, ImplementationName) or id(value) in former
        if not ours and (name not in at_patching or at_patching[name] != value):
            original.__dict__[name] = value
    for name in at_patching.keys() - own.__dict__.keys():
        original.__dict__.pop(name, None)
