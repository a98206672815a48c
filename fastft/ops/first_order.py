"""Backward passes that have no derivative of their own say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..errors import UnsupportedOptionError

Backward = Callable[..., Any]


def first_order(op: str) -> Callable[[Backward], Backward]:
    """Makes a Function's backward refuse `create_graph=True`.

    `torch.autograd.function.once_differentiable` raises only where the incoming gradient requires one itself, and cuts
    the graph without a word where it does not (`grad(y.sum(), x, create_graph=True)`).

    Args:
        op: the option of `patch_model` that names the op, for the message.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def checked(ctx: Any, *grads: torch.Tensor | None) -> Any:
            if torch.is_grad_enabled():
                raise UnsupportedOptionError(
                    f"create_graph=True: the fused {op} has no second derivative; patch the model with {op}=False for "
                    "losses that contain gradients"
                )
            return backward(ctx, *grads)

        return checked

    return decorate
