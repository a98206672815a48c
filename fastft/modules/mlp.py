"""The forward bound onto gated MLP modules."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..memory.tape import LayerTape
from .activation import activation_of
from .projection import is_repeatable, is_repeatable_activation, project, project_gated, why_not_gated
from .state import ATTRIBUTE


def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) for [..., H], with fused LoRA projections and without keeping the product.

    Under torch.compile the class's own forward runs, for the compiler to fuse.
    """
    if torch.compiler.is_compiling():
        return type(self).forward(self, x)
    shared = self.__dict__[ATTRIBUTE].shared
    projections = (self.gate_proj, self.up_proj)
    gate, up = project(shared, projections, x)
    tape = shared.tape
    if tape is not None and is_repeatable(projections):
        tape.made((gate, up), "gate_up", functools.partial(project, shared, projections), x)
    if shared.config.gated_mlp is not False:
        activation, reason = activation_of(self.act_fn), why_not_gated(self.act_fn, gate, up)
        if activation is not None and not reason:
            return project_gated(shared, self.down_proj, gate, up, activation)
        shared.counters[f"gated_mlp not fused: {reason}"] += 1
    if tape is None:
        return project(shared, (self.down_proj,), self.act_fn(gate) * up)[0]
    return project(shared, (self.down_proj,), _told_product(tape, self.act_fn, gate, up))[0]


def _told_product(tape: LayerTape, act_fn: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """act_fn(gate) * up in two steps, which the memory plan is told of."""
    activated, repeatable = act_fn(gate), is_repeatable_activation(act_fn)
    if repeatable:
        tape.made(activated, "activation", act_fn, gate)
    product = activated * up
    if repeatable:
        tape.made(product, "activation", lambda gate, up: act_fn(gate) * up, gate, up)
    return product
