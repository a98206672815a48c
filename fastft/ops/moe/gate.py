"""How the two halves of an expert's pre-activation become one: data, for kernels and reference alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swish"]


@dataclass(frozen=True, slots=True)
class Gate:
    """What makes an activation [S, I] of a pre-activation [S, 2 * I].

        "silu", "gelu", "gelu_tanh":  a = act(g) * u
        "clamped_swish":              a = (clamp(u, -limit, limit) + 1) * c * sigmoid(alpha * c),  c = min(g, limit)

    Attributes:
        activation: one of these; "gelu" is the exact one with erf, "clamped_swish" is that of gpt-oss.
        interleaved: columns are g0, u0, g1, u1 ...; otherwise all of g come before all of u.
        alpha, limit: of "clamped_swish".
    """

    activation: Activation
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0
