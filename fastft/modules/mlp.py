"""The forward bound onto gated MLP modules."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .projection import is_repeatable, is_repeatable_activation, project
from .state import ATTRIBUTE


def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) for [..., H], with fused LoRA projections.

    Under torch.compile the class's own forward runs, for the compiler to fuse.
    """
    if torch.compiler.is_compiling():
        return type(self).forward(self, x)
    shared = self.__dict__[ATTRIBUTE].shared
    projections = (self.gate_proj, self.up_proj)
    gate, up = project(shared, projections, x)
    tape = shared.tape
    if tape is None:
        return project(shared, (self.down_proj,), self.act_fn(gate) * up)[0]
    if is_repeatable(projections):
        tape.made((gate, up), "gate_up", functools.partial(project, shared, projections), x)
    activated, repeatable = self.act_fn(gate), is_repeatable_activation(self.act_fn)
    if repeatable:
        tape.made(activated, "activation", self.act_fn, gate)
    product = activated * up
    if repeatable:
        tape.made(product, "activation", lambda gate, up: self.act_fn(gate) * up, gate, up)
    return project(shared, (self.down_proj,), product)[0]
