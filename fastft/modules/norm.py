"""The forward bound onto RMSNorm modules."""

from __future__ import annotations

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
    return rms_norm(
        hidden_states,
        self.weight,
        getattr(self, family.rms_norm_eps),
        rounding=family.rms_norm_rounding,
        impl=shared.config.rms_norm,
    )
