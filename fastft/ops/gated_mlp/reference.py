"""Gated activations in plain torch: any device and dtype, to the bit what autograd makes of `act(gate) * up`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

_aten = torch.ops.aten


class _Activation(NamedTuple):
    value: Callable[[torch.Tensor], torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of (incoming gradient, input)


_ACTIVATIONS = {
    "silu": _Activation(F.silu, _aten.silu_backward),
    "gelu": _Activation(F.gelu, _aten.gelu_backward),
    "gelu_tanh": _Activation(
        partial(F.gelu, approximate="tanh"), partial(_aten.gelu_backward, approximate="tanh")
    ),
}  # fmt: skip


def gated_forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up."""
    return _ACTIVATIONS[activation].value(gate) * up


def gated_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, *, with_product: bool, owned: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `triton.gated_backward`."""
    del owned  # the kernels save memory by it
    act = _ACTIVATIONS[activation]
    activated = act.value(gate)
    grad = grad.to(gate.dtype)
    return act.gradient(grad * up, gate), grad * activated, activated * up if with_product else None
