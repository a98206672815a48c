"""How a module of transformers' experts interface holds its weights, and what its gate computes.

The layout is what the class declares to transformers (`is_transposed`, `is_concatenated`, `has_bias` ...), never what
shapes suggest: with 2 * I == H both readings fit. The gate is found by what `_apply_gate` returns for numbers that tell
all known gates apart, in fp64; one that no known gate agrees with stays the module's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations import moe as interface

from ..ops.moe import ExpertWeights, Gate, PackedWeight
from ..ops.moe.reference import gate_of_halves
from .state import ReadPacked

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_AGREEMENT = 1e-9
_PARAMETERS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


class ExpertLayout(NamedTuple):
    """What a call of the experts needs of their module."""

    weights: ExpertWeights
    gate: Gate


def asks_interface(module: nn.Module) -> bool:
    """Whether the class asks transformers' `ALL_EXPERTS_FUNCTIONS` which function to run."""
    forward = type(module).forward
    code, cells = getattr(forward, "__code__", None), getattr(forward, "__closure__", None)
    if code is None or cells is None or "experts_interface" not in code.co_freevars:
        return False
    chosen = cells[code.co_freevars.index("experts_interface")].cell_contents
    return chosen is interface.ALL_EXPERTS_FUNCTIONS


def why_not_experts(module: Any, read_packed: ReadPacked) -> str:
    """Why fastft cannot compute these experts, or ""."""
    missing = [flag for flag in FLAGS if not isinstance(getattr(module, flag, None), bool)]
    if missing:
        return f"its class does not say {missing[0]}"
    if not module.has_gate:
        return "experts without a gate are not fused"
    if getattr(module, "has_post_expert_norm", False):
        return "the outputs of its experts are normalised before they are weighted"
    for name in _PARAMETERS[: 4 if module.has_bias else 2]:
        parameter = module._parameters.get(name)
        if parameter is None and read_packed(module, name) is not None:
            continue
        if parameter is None:
            return f"it has no parameter {name} of its own"
        if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
            return f"{name} is {str(parameter.dtype).removeprefix('torch.')}"
    if find_gate(module) is None:
        return f"its gate ({_name_of_gate(module)}) is none that fastft knows"
    return ""


def read_layout(module: Any, read_packed: ReadPacked) -> ExpertLayout:
    """The weights from input to output, and the gate, of a module for which `why_not_experts` finds nothing."""
    gate_up, down = (read_packed(module, name) or getattr(module, name) for name in _PARAMETERS[:2])
    if not module.is_transposed:
        gate_up, down = _turned(gate_up), _turned(down)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    gate = find_gate(module)
    assert gate is not None
    return ExpertLayout(ExpertWeights(gate_up, down, *biases), gate)


def _turned(weight: torch.Tensor | PackedWeight) -> torch.Tensor | PackedWeight:
    if isinstance(weight, torch.Tensor):
        return weight.mT
    make, (experts, rows, columns) = weight.make, weight.shape
    return weight._replace(make=lambda: make().mT, shape=torch.Size((experts, columns, rows)))


def find_gate(module: Any) -> Gate | None:
    """The known gate that computes what the module's `_apply_gate` does, if there is one."""
    if "_apply_gate" in module.__dict__:
        return None
    facts = (getattr(module, name, None) for name in ("act_fn", "alpha", "limit"))
    return _find_gate(type(module)._apply_gate, *facts, module.is_concatenated)


@lru_cache(maxsize=1024)  # asked at each call, of activations that hold nothing
def _find_gate(apply_gate: Any, act_fn: Any, alpha: Any, limit: Any, is_concatenated: bool) -> Gate | None:
    module = SimpleNamespace(act_fn=act_fn, alpha=alpha, limit=limit, is_concatenated=is_concatenated)
    halves = torch.linspace(-12, 12, 97, dtype=torch.float64)
    g, u = (half.reshape(-1, 1) for half in torch.meshgrid(halves, halves[::8] + 0.1, indexing="ij"))
    for gate in _candidates(module):
        # Two columns a half: with one, interleaved halves and halves side by side are the same.
        pre = torch.cat((g, u, u, g), 1)
        try:
            found = apply_gate(module, pre)
        except (TypeError, ValueError, RuntimeError, AttributeError):  # it wants something else: not ours to compute
            return None
        if found.shape != (len(pre), 2):
            return None
        if (found - gate_of_halves(pre, gate)).abs().max() < _AGREEMENT:
            return gate
    return None


def _candidates(module: SimpleNamespace) -> Iterator[Gate]:
    interleaved = not module.is_concatenated
    for activation in ("silu", "gelu", "gelu_tanh"):
        yield Gate(activation, interleaved)
    if isinstance(module.alpha, (int, float)) and isinstance(module.limit, (int, float)):
        yield Gate("clamped_swish", interleaved, float(module.alpha), float(module.limit))


def _name_of_gate(module: Any) -> str:
    activation = getattr(module, "act_fn", None)
    own = type(module)._apply_gate is not interface._default_apply_gate
    return f"{type(module).__name__}._apply_gate" if own or activation is None else type(activation).__name__
