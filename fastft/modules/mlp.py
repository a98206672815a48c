"""The forward bound onto gated MLP modules."""

from __future__ import annotations

from typing import Any

import torch

from .projection import project
from .state import ATTRIBUTE


def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) for [..., H], with fused LoRA projections.

    Under torch.compile the class's own forward runs, for the compiler to fuse.
    """
    if torch.compiler.is_compiling():
        return type(self).forward(self, x)
    shared = self.__dict__[ATTRIBUTE].shared
    gate, up = project(shared, (self.gate_proj, self.up_proj), x)
    return project(shared, (self.down_proj,), self.act_fn(gate) * up)[0]
