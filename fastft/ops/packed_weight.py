"""Frozen weights that are held in another form than the one they are multiplied in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class PackedWeight(NamedTuple):
    """A frozen weight that is made when it is needed, and once more for backward: one of 4 bits.

    Attributes:
        make: the weight, in memory that the next one may be made in.
        shape, dtype: of what it makes.
        device: where.
    """

    make: Callable[[], torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def unpacked(weight: torch.Tensor | PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight in a dtype; of a packed one to be used up before the next is asked for."""
    made = weight.make() if isinstance(weight, PackedWeight) else weight
    return made if made.dtype is dtype else made.to(dtype)
