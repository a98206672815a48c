"""Which activation a module is, as the ops name it."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_TRANSFORMERS = {  # what transformers' own classes compute, whichever way they write it
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}


def activation_of(module: Any) -> str | None:
    """The name that `fastft.ops.gated_mlp` has for an activation, or None if it has none."""
    cls = type(module)
    if cls is nn.SiLU:
        return "silu"
    if cls is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}[module.approximate]
    ours = sys.modules.get("transformers.activations")
    return _TRANSFORMERS.get(cls.__name__) if getattr(ours, cls.__name__, None) is cls else None
