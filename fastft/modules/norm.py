"""The forward bound onto RMSNorm modules."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.rms_norm import rms_norm
from .projection import has_global_hooks, is_intercepted
from .state import ATTRIBUTE, ModelState, state_of


def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Normalises [..., H] in the rounding order of the module's family.

    Under torch.compile the class's own forward runs, for the compiler to fuse.
    """
    if torch.compiler.is_compiling():
        return type(self).forward(self, hidden_states)
    shared = self.__dict__[ATTRIBUTE].shared
    shared.counters["rms_norm"] += 1
    tape, options = shared.tape, options_of(self)
    if tape is None:
        return rms_norm(hidden_states, **options)
    tape.root(hidden_states, "residual")
    normalised = rms_norm(hidden_states, **options)
    tape.made(normalised, "norm", lambda x: rms_norm(x, **options), hidden_states)
    return normalised


def options_of(module: Any) -> dict[str, Any]:
    """What `rms_norm` needs of a patched norm besides its input."""
    state = module.__dict__[ATTRIBUTE]
    family, weight = state.family, module.weight
    if weight.dtype is torch.float32 and torch.is_autocast_enabled(weight.device.type):
        weight = _within_autocast(state.shared, weight)
    return {
        "weight": weight,
        "eps": getattr(module, family.rms_norm_eps),
        "rounding": family.rms_norm_rounding,
        "impl": state.shared.config.rms_norm,
    }


def _within_autocast(shared: ModelState, weight: torch.Tensor) -> torch.Tensor:
    """A weight of fp32 under autocast, which makes the norm's output fp32, too, in the dtype that is wanted."""
    if shared.config.residual_stream == "autocast":
        return weight.to(torch.get_autocast_dtype(weight.device.type))
    shared.counters["norms in fp32 under autocast; residual_stream='autocast' lowers them"] += 1
    return weight


def cast_embeddings(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
    """Forward hook of input embeddings: their output in autocast's dtype, where the residual stream is to have it."""
    kind = output.device.type
    if output.dtype is not torch.float32 or not torch.is_autocast_enabled(kind):
        return None
    return output.to(torch.get_autocast_dtype(kind))


def why_not_within(module: Any) -> str:
    """Why a norm has to be called by itself, rather than be computed within another op; "" if it may be."""
    state = state_of(module)
    own = dict(module.__dict__)
    if state is None or getattr(own.pop("forward", None), "__func__", None) is not forward:
        return "the norm's forward is not fastft's"
    if is_intercepted((own,)) or has_global_hooks():
        return "the norm has a hook, or was compiled"
    return ""
