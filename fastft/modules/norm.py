"""The forward bound onto RMSNorm modules."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..ops.rms_norm import rms_norm
from .state import ATTRIBUTE


def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Normalises [..., H] in the rounding order of the module's family.

    Under torch.compile the class's own forward runs, for the compiler to fuse.
    """
    if torch.compiler.is_compiling():
        return type(self).forward(self, hidden_states)
    state = self.__dict__[ATTRIBUTE]
    shared, family = state.shared, state.family
    shared.counters["rms_norm"] += 1
    normalise = functools.partial(
        rms_norm,
        weight=self.weight,
        eps=getattr(self, family.rms_norm_eps),
        rounding=family.rms_norm_rounding,
        impl=shared.config.rms_norm,
    )
    tape = shared.tape
    if tape is None:
        return normalise(hidden_states)
    tape.root(hidden_states, "residual")
    normalised = normalise(hidden_states)
    tape.made(normalised, "norm", normalise, hidden_states)
    return normalised
