"""The kernel of `low_rank_update`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from .compiling import CompileCase, compile_case
from .launching import Launcher
from .low_rank_update import constants_of


@triton.jit(do_not_specialize=["num_rows"])
def _add_low_rank_kernel(
    out_ptr,  # [num_rows, N], contiguous
    a_ptr,  # [num_rows, R], rows contiguous
    b_ptr,  # [R, N], any strides
    num_rows,
    a_stride,
    b_stride_r,
    b_stride_n,
    N: tl.constexpr,
    R: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,  # a power of two, at least R
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ranks = tl.arange(0, BLOCK_R)
    row_mask, column_mask, rank_mask = rows < num_rows, columns < N, ranks < R
    rows = rows.to(tl.int64)[:, None]  # multiplied by strides, as columns of b are

    place = out_ptr + rows * N + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    out = tl.load(place, mask=mask, other=0.0)
    a = tl.load(a_ptr + rows * a_stride + ranks[None, :], mask=row_mask[:, None] & rank_mask[None, :], other=0.0)
    b_place = ranks.to(tl.int64)[:, None] * b_stride_r + columns.to(tl.int64)[None, :] * b_stride_n
    b = tl.load(b_ptr + b_place, mask=rank_mask[:, None] & column_mask[None, :], other=0.0)
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    total = tl.dot(a, b, input_precision="ieee") + out.to(tl.float32)
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=mask)


_launch = Launcher(_add_low_rank_kernel)
# The interpreter keeps bf16 as its bits, and its dot multiplies those.
_INTERPRETED = not isinstance(_add_low_rank_kernel, triton.JITFunction)


def add_low_rank_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a @ b; see `low_rank_update`.

    Args:
        out: [T, N], contiguous, not empty; fp16 or bf16.
        a: [T, r] of the same dtype, stride 1 along r.
        b: [r, N] of the same dtype, any strides.
    """
    (num_rows, width), rank = out.shape, a.shape[1]
    constants = {**constants_of(width, rank), "UPCAST": _INTERPRETED}
    programs = triton.cdiv(num_rows, constants["BLOCK_M"]) * triton.cdiv(width, constants["BLOCK_N"])
    _launch(programs, (out, a, b), (num_rows, a.stride(0), *b.stride()), constants)


def compile_cases() -> Iterator[CompileCase]:
    """B as it lies in memory and A, one and three adapters, for `tests/cross_compile.py`."""
    for element, width, rank, unit in (("bf16", 8192, 16, "b_stride_r"), ("fp16", 2048, 48, "b_stride_n")):
        constants = {**constants_of(width, rank), "UPCAST": False, unit: 1}
        yield compile_case(_add_low_rank_kernel, constants, partial(_kind_of, element))


def _kind_of(element: str, name: str) -> str:
    return f"*{element}" if name.endswith("_ptr") else "i32"
