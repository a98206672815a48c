"""The gated half of an MLP: the product of an activation and a second half, and the projection behind it."""

from __future__ import annotations

from .api import ACTIVATIONS, gated, gated_linear, kernels_for, verdicts
from .autograd import Projection

__all__ = ["ACTIVATIONS", "Projection", "gated", "gated_linear", "kernels_for", "verdicts"]
