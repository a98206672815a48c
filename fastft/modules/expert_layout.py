"""How a module of transformers' experts interface holds its weights, and what its gate computes.

The layout is what the class declares to transformers (`is_transposed`, `is_concatenated`, `has_bias` ...), never what
shapes suggest: with 2 * I == H both readings fit. The gate is found by what `_apply_gate` returns for numbers that tell
all known gates apart, in fp64; one that no known gate agrees with stays the module's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations import moe as interface

from ..ops.moe import ExpertWeights, Gate
from ..ops.moe.gate import Activation
from ..ops.moe.reference import gate_of_halves
from ..ops.packed_weight import PackedWeight
from .state import ReadPacked

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_AGREEMENT = 1e-9
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
_PARAMETERS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


class ExpertLayout(NamedTuple):
    """What a call of the experts needs of their module."""

    weights: ExpertWeights
    gate: Gate


def asks_interface(module: nn.Module) -> bool:
    """Whether the class asks transformers' `ALL_EXPERTS_FUNCTIONS` which function to run."""
    return _is_asking(type(module).forward)


def inherits_interface(module: nn.Module) -> bool:
    """Whether a class asks it that this one only builds on."""
    return not asks_interface(module) and _asking_forward(type(module)) is not None


def eager_forward(module: nn.Module) -> Any:
    """What the class computes without the interface: the function below the one that asks."""
    asking = _asking_forward(type(module))
    assert asking is not None
    return asking.__wrapped__


def _asking_forward(cls: type) -> Any:
    found = (base.__dict__["forward"] for base in cls.__mro__ if "forward" in base.__dict__)
    return next((forward for forward in found if _is_asking(forward)), None)


def _is_asking(forward: Any) -> bool:
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
    dtypes: dict[torch.dtype, str] = {}
    for name in _PARAMETERS[: 4 if module.has_bias else 2]:
        parameter = module._parameters.get(name)
        held = read_packed(module, name) if parameter is None else parameter
        if held is None:
            return f"it has no parameter {name} of its own"
        if not held.dtype.is_floating_point or held.dtype.itemsize < 2:
            return f"{name} is {_short(held.dtype)}"
        dtypes.setdefault(held.dtype, name)
    if len(dtypes) > 1:
        return "its weights differ in dtype: " + ", ".join(f"{name} {_short(dtype)}" for dtype, name in dtypes.items())
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    # Two columns a half: with one, interleaved halves and halves side by side are the same.
    g, u = (half.reshape(-1, 1) for half in torch.meshgrid(_numbers(limit), _numbers(limit), indexing="ij"))
    pre = torch.cat((g, u, u, g), 1)
    module = _StandIn(act_fn=act_fn, alpha=alpha, limit=limit)
    try:
        found = apply_gate(module, pre)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it wants something else: not ours to compute
        return None
    if module.asked_for_more or found.shape != (len(pre), 2):
        return None
    for gate in _candidates(alpha, limit, not is_concatenated):
        expected = gate_of_halves(pre, gate)
        if ((found - expected).abs() <= _AGREEMENT * (1 + expected.abs())).all():
            return gate
    return None


class _StandIn:
    """In place of the module: a gate that reads anything else of it cannot be told by numbers."""

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts, asked_for_more=False)

    def __getattr__(self, name: str) -> Any:
        self.__dict__["asked_for_more"] = True
        raise AttributeError(name)


def _numbers(limit: Any) -> torch.Tensor:
    """Where activations bend, far beyond where anybody would clamp, and around the limit that the module has."""
    small, large = torch.linspace(-12, 12, 25, dtype=torch.float64) + 0.1, 2.0 ** torch.arange(4, 20).double()
    around = [limit - 0.1, limit + 0.1, -limit - 0.1, -limit + 0.1] if isinstance(limit, (int, float)) else []
    return torch.cat((small, large, -large, torch.tensor(around, dtype=torch.float64)))


def _candidates(alpha: Any, limit: Any, interleaved: bool) -> Iterator[Gate]:
    """A limit that a gate does not use is one that these numbers may not have found."""
    if isinstance(alpha, (int, float)) and isinstance(limit, (int, float)):
        yield Gate("clamped_swish", interleaved, float(alpha), float(limit))
    elif limit is None:
        for activation in _ACTIVATIONS:
            yield Gate(activation, interleaved)


def _name_of_gate(module: Any) -> str:
    activation = getattr(module, "act_fn", None)
    own = type(module)._apply_gate is not interface._default_apply_gate
    return f"{type(module).__name__}._apply_gate" if own or activation is None else type(activation).__name__
