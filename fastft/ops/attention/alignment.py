"""Where rows of q, k and v have to start: the CUDA kernels move 16 bytes at a time and check no address."""

from __future__ import annotations

import torch

BYTES = 16


def is_aligned(x: torch.Tensor) -> bool:
    """Whether every row of x [T, H, D] starts on a 16-byte boundary."""
    step = BYTES // x.element_size()
    return not (x.stride(0) % step or x.stride(1) % step or x.data_ptr() % BYTES)
