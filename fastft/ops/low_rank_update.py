"""The sum of a tall matrix and a product of low rank, in one pass over the matrix.

    out += a @ b        out [T, N], a [T, r], b [r, N]; r at most `MOST_RANK`

A GEMM that adds to its output reads and writes it as slowly as it multiplies: with 16 terms to a sum cuBLAS takes 125
us for 8,192 x 8,192 in bf16 on an H200, called alone. Here a program loads its tile of out beside the two thin operands
and stores it again, in 92; the bytes would take 64.
Rounding: products and the sum in fp32, one rounding at the store. Dtypes fp16, bf16. Cards: sm80 and newer, for the
product is one of tensor cores; elsewhere, and for what does not fit, torch's addmm does it.
Bytes: out read and written once, a once for each BLOCK_N columns of out, b once for each BLOCK_M rows, both from L2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..capability import probe
from .tiles import power_of_two_at_least

# Beyond it the product takes as long as the bytes do, and cuBLAS is as fast.
MOST_RANK = 64
# Elements of out from which it pays (H200, us): 8,192 x 12,288 124 against cuBLAS's 183, x 4,096 59 against 64, x 2,048
# 33 against 28.
FEWEST_ELEMENTS = 2**25
_DTYPES = (torch.bfloat16, torch.float16)


def add_low_rank_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """out += a @ b, written to memory that no graph knows yet: nothing is told of it.

    Args:
        out: [T, N], of the same dtype as both others.
        a: [T, r], any strides.
        b: [r, N], any strides.

    Returns:
        out.
    """
    fits = out.dtype in _DTYPES and a.shape[1] <= MOST_RANK and out.numel() >= FEWEST_ELEMENTS
    if not fits or not out.is_contiguous() or a.stride(1) != 1 or not _runs_on(out.device, out.dtype):
        return out.addmm_(a, b)
    from .triton_low_rank import add_low_rank_ as launch

    launch(out, a, b)
    return out


@lru_cache(maxsize=64)
def _runs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Not in the interpreter, whose results torch gives sooner."""
    if device.type != "cuda":
        return False
    capability = probe(device)
    return bool(capability.triton_for(dtype)) and bool(capability.tensor_core_dots)


@lru_cache(maxsize=256)
def constants_of(width: int, rank: int) -> dict[str, Any]:
    """A specialisation, launch options included."""
    block_n = min(max(power_of_two_at_least(width), 16), 128)
    return {
        "N": width,
        "R": rank,
        "BLOCK_M": 128,
        "BLOCK_N": block_n,
        "BLOCK_R": max(power_of_two_at_least(rank), 16),
        "num_warps": 8 if block_n == 128 else 4,
    }
