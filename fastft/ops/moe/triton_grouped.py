"""Grouped matrix products over rows that are sorted by expert, and the products of their gradients.

    grouped_matmul:  out[s] = alpha * rows[s] @ weight[e(s)] (+ out[s])    0 where no expert owns s, unless adding
    grouped_outer:   out[e] = alpha * sum of left[s]^T right[s] over the rows s of expert e

Shapes: rows [S, K], weight [E, K, N], out [S, N]; left [S, M], right [S, N], out [E, M, N]; offsets int32 [E], the end
of the rows of each expert. Any strides, so that a parameter [E, N, K] comes as a view. K, M and N need not be multiples
of anything, and low ranks are padded to 16 on the chip.
Rounding: products and sums in fp32 (without TF32; short sums of fp32 in fp64), alpha and what is added to in fp32, one
rounding at the store.
Dtypes fp32, fp16, bf16; tensor cores for the last two. Cards: sm80 and newer.
Bytes: rows once for each BLOCK_N columns of out, weight once for each BLOCK_M rows of its expert, both mostly from L2;
out written once. grouped_outer reads left N / BLOCK_N times and right M / BLOCK_M times.

Where experts begin is known to the device only, and the host never waits for it: the grid is an upper bound, each
program of grouped_matmul finds its expert in the cumulative numbers of tiles, and programs beyond the last tile leave.
Sums are in a fixed order, without atomics. Rows of other experts may hold anything, NaN too: they are never multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...errors import KernelInputError
from ..launching import Launcher

# Tiles of rows whose programs run together: they share a tile of weight if one expert owns them, and stay in L2 for
# the next columns of weight.
GROUP_M = 8
# Products in a sum, on average, up to which one of fp32 numbers is made in fp64: few enough that it costs little.
SHORT_SUM = 64


@triton.jit
def _tile_of(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Down GROUP_M tiles of a column, then the next column; with 2 x 3 tiles a group: 0 2 4 / 1 3 5."""
    first = program // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    inside = program % (GROUP_M * tiles_n)
    return first + inside % height, inside // height


@triton.jit
def _start_and_end(offsets_ptr, expert, num_rows, E: tl.constexpr):
    """The rows of experts, one or a block of them; those of expert E are the rows that nobody owns."""
    start = tl.load(offsets_ptr + expert - 1, mask=(expert > 0) & (expert <= E), other=0)
    end = tl.load(offsets_ptr + expert, mask=expert < E, other=num_rows)
    return tl.minimum(start, num_rows), tl.minimum(end, num_rows)


@triton.jit
def _rows_of(tile, offsets_ptr, num_rows, E: tl.constexpr, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of a tile of rows, more than E past the last tile; the first row, and where the expert's rows end."""
    experts = tl.arange(0, EXPERTS)
    start, end = _start_and_end(offsets_ptr, experts, num_rows, E)
    last = tl.cumsum(tl.where(experts <= E, tl.cdiv(end - start, BLOCK_M), 0), axis=0)
    expert = tl.sum((last <= tile).to(tl.int32), axis=0)
    earlier = tl.max(tl.where(last <= tile, last, 0), axis=0)
    start, end = _start_and_end(offsets_ptr, expert, num_rows, E)
    return expert, start + (tile - earlier) * BLOCK_M, end


@triton.jit
def _places(first, COUNT: tl.constexpr, AXIS: tl.constexpr, stride):
    """Offsets of COUNT places along one axis of a tile. In int64 always: only vectors are multiplied, not tiles."""
    place = (first + tl.arange(0, COUNT)).to(tl.int64) * stride
    return tl.expand_dims(place, 1 - AXIS)


@triton.jit
def _dot(a, b, total, UPCAST: tl.constexpr):
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if total.dtype == tl.float64:
        total = tl.dot(a.to(tl.float64), b.to(tl.float64), total, out_dtype=tl.float64)
    elif a.dtype == tl.float32:
        # A sum of sums: one chain of products errs two to three times as much as cuBLAS. Of minus the product, because
        # the compiler makes one chain of a product that is added.
        total = total - tl.dot(-a, b, input_precision="ieee")
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit(do_not_specialize=["num_rows", "row_tiles"])
def _matmul_kernel(
    rows_ptr,  # [num_rows, K], any strides
    weight_ptr,  # [E, K, N], any strides
    offsets_ptr,  # [E]
    out_ptr,  # [num_rows, N], any strides
    num_rows,
    row_tiles,  # at least as many as there are
    rows_stride_s,
    rows_stride_k,
    weight_stride_e,
    weight_stride_k,
    weight_stride_n,
    out_stride_s,
    out_stride_n,
    alpha,
    E: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    UPCAST: tl.constexpr,
    WIDE: tl.constexpr,  # sums in fp64: of few numbers in fp32, all would be one chain, for no dot is shorter than 16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two, more than E
    GROUP_M: tl.constexpr,
):
    tile, column = _tile_of(tl.program_id(0), row_tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
    expert, first, end = _rows_of(tile, offsets_ptr, num_rows, E, BLOCK_M, EXPERTS)
    if expert >= (E if ACCUMULATE else E + 1):
        return

    row_mask = (first + tl.arange(0, BLOCK_M) < end)[:, None]
    col_mask = (column * BLOCK_N + tl.arange(0, BLOCK_N) < N)[None, :]
    k = tl.arange(0, BLOCK_K)
    rows = rows_ptr + _places(first, BLOCK_M, 0, rows_stride_s) + _places(0, BLOCK_K, 1, rows_stride_k)
    weight = weight_ptr + expert.to(tl.int64) * weight_stride_e
    weight += _places(0, BLOCK_K, 0, weight_stride_k) + _places(column * BLOCK_N, BLOCK_N, 1, weight_stride_n)
    step = tl.full([], BLOCK_K, tl.int64)

    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float64 if WIDE else tl.float32)
    for done in range(0, tl.where(expert < E, K, 0), BLOCK_K):
        x = tl.load(rows, mask=row_mask & (k < K - done)[None, :], other=0.0)
        w = tl.load(weight, mask=(k < K - done)[:, None] & col_mask, other=0.0)
        total = _dot(x, w, total, UPCAST)
        rows += step * rows_stride_k
        weight += step * weight_stride_k

    out = out_ptr + _places(first, BLOCK_M, 0, out_stride_s) + _places(column * BLOCK_N, BLOCK_N, 1, out_stride_n)
    total = total.to(tl.float32) * alpha
    if ACCUMULATE:
        total += tl.load(out, mask=row_mask & col_mask, other=0.0).to(tl.float32)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=row_mask & col_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _outer_kernel(
    left_ptr,  # [num_rows, M], any strides
    right_ptr,  # [num_rows, N], any strides
    offsets_ptr,  # [E]
    out_ptr,  # [E, M, N], contiguous
    num_rows,
    left_stride_s,
    left_stride_m,
    right_stride_s,
    right_stride_n,
    alpha,
    E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UPCAST: tl.constexpr,
    WIDE: tl.constexpr,  # sums in fp64: of few numbers in fp32, all would be one chain, for no dot is shorter than 16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # rows at a time
    GROUP_M: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = _tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    start, end = _start_and_end(offsets_ptr, expert, num_rows, E)

    m_mask = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M) < M)[:, None]
    n_mask = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N) < N)[None, :]
    row = tl.arange(0, BLOCK_K)
    left = left_ptr + _places(tile_m * BLOCK_M, BLOCK_M, 0, left_stride_m) + _places(start, BLOCK_K, 1, left_stride_s)
    right = right_ptr + _places(start, BLOCK_K, 0, right_stride_s)
    right += _places(tile_n * BLOCK_N, BLOCK_N, 1, right_stride_n)
    step = tl.full([], BLOCK_K, tl.int64)

    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float64 if WIDE else tl.float32)
    for first in range(start, end, BLOCK_K):
        x = tl.load(left, mask=m_mask & (row < end - first)[None, :], other=0.0)
        y = tl.load(right, mask=(row < end - first)[:, None] & n_mask, other=0.0)
        total = _dot(x, y, total, UPCAST)
        left += step * left_stride_s
        right += step * right_stride_s

    out = out_ptr + expert.to(tl.int64) * (M * N)
    out += _places(tile_m * BLOCK_M, BLOCK_M, 0, N) + _places(tile_n * BLOCK_N, BLOCK_N, 1, 1)
    tl.store(out, (total.to(tl.float32) * alpha).to(out_ptr.dtype.element_ty), mask=m_mask & n_mask)


_matmul, _outer = Launcher(_matmul_kernel), Launcher(_outer_kernel)
# The interpreter keeps bf16 as its bits, and its dot multiplies those.
_INTERPRETED = not isinstance(_matmul_kernel, triton.JITFunction)


# ------------------------------------------------------------------------------------------------ specialisation


class Tile(NamedTuple):
    """What one program computes, and how much of the sum it takes at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int


def _block(size: int, largest: int) -> int:
    """Tensor cores take 16 at least."""
    return min(max(triton.next_power_of_2(size), 16), largest)


def _wide(depth: int, element_size: int) -> bool:
    return element_size == 4 and depth <= SHORT_SUM


def choose_tile(height: int, width: int, depth: int, element_size: int) -> Tile:
    """Tile sizes for products [height, depth] @ [depth, width] of one expert, by what an average expert has.

    All are pipelined in three stages, Triton's default: 96 kB of shared memory for 128 x 128 x 64 at 16 bits, of 99 kB
    that sm86 and sm89 have. fp32 without TF32 runs outside of tensor cores, and errs less in short chains of products.
    """
    largest, deepest = (128, 64) if element_size <= 2 else (64, 16)
    # Short sums are mostly stores, which more and smaller programs overlap better (rank 16 on an H200: by a fifth). Of
    # taller tiles in fp64 Triton would make instructions of sm100 that there are none of.
    tallest = 32 if _wide(depth, element_size) else 64 if depth <= 32 else largest
    tile = _block(height, tallest), _block(width, largest), _block(depth, deepest)
    return Tile(*tile, 8 if tile[0] * tile[1] >= 128 * 128 else 4)


@lru_cache(maxsize=256)
def _specialise(
    height: int, width: int, depth: int, element_size: int, items: tuple[tuple[str, int], ...]
) -> dict[str, Any]:
    """Everything a specialisation is compiled for, launch options included."""
    tile = choose_tile(height, width, depth, element_size)
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    flags = {**dict(items), "UPCAST": _INTERPRETED, "WIDE": _wide(depth, element_size)}
    return {**flags, **blocks, "GROUP_M": GROUP_M, "num_warps": tile.num_warps}


def most_row_tiles(num_rows: int, experts: int, block_m: int) -> int:
    """One that is not full for each of the experts that own rows and for the rows of nobody, at worst."""
    return triton.cdiv(num_rows, block_m) + min(experts, num_rows - 1)


def _matmul_constants(
    num_rows: int, experts: int, depth: int, width: int, element_size: int, accumulate: bool
) -> dict[str, Any]:
    # A power of two that holds what an average expert has: varying token counts share few specialisations.
    height = _block(num_rows // experts, 128)
    flags = {"E": experts, "K": depth, "N": width, "ACCUMULATE": accumulate}
    flags["EXPERTS"] = triton.next_power_of_2(experts + 1)
    return _specialise(height, width, depth, element_size, tuple(flags.items()))


def _outer_constants(num_rows: int, experts: int, height: int, width: int, element_size: int) -> dict[str, Any]:
    flags = {"E": experts, "M": height, "N": width}
    return _specialise(height, width, _block(num_rows // experts, 2 * SHORT_SUM), element_size, tuple(flags.items()))


# ------------------------------------------------------------------------------------------------------ launchers


def grouped_matmul(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    alpha: float = 1.0,
    accumulate: bool = False,
) -> torch.Tensor:
    """Multiply each row by the matrix of its expert.

        out[s] = alpha * rows[s] @ weight[e(s)] (+ out[s] if accumulate)        offsets[e - 1] <= s < offsets[e]

    Rows at or beyond `offsets[-1]` belong to nobody: they become zero, or stay what they are with `accumulate`.

    Args:
        rows: [S, K], any strides; fp32, fp16 or bf16.
        weight: [E, K, N] of the same dtype, any strides.
        offsets: int32 [E], contiguous, never decreasing, at most S.
        out: [S, N] of any strides and any of the dtypes, not overlapping itself or the operands; new by default.
        alpha: rounded to fp32.
        accumulate: add to `out`.

    Returns:
        `out`, or a new contiguous tensor of the dtype of rows.

    Raises:
        KernelInputError: shapes or dtypes that do not go together; accumulate without out.
    """
    (num_rows, depth), (experts, _, width) = rows.shape, weight.shape
    _check("grouped_matmul", rows, weight, offsets, weight.shape[:2] == (len(offsets), depth))
    if out is None:
        if accumulate:
            raise KernelInputError("grouped_matmul: there is no out to accumulate into; give it one")
        out = torch.empty(num_rows, width, dtype=rows.dtype, device=rows.device)
    elif out.shape != (num_rows, width):
        raise KernelInputError(f"grouped_matmul: out is {list(out.shape)}; it has to be {[num_rows, width]}")
    if out.numel() == 0:
        return out
    constants = _matmul_constants(num_rows, experts, depth, width, rows.element_size(), accumulate)
    row_tiles = most_row_tiles(num_rows, experts, constants["BLOCK_M"])
    numbers = (num_rows, row_tiles, *rows.stride(), *weight.stride(), *out.stride(), float(alpha))
    programs = row_tiles * triton.cdiv(width, constants["BLOCK_N"])
    _matmul(programs, (rows, weight, offsets, out), numbers, constants)
    return out


def grouped_outer(
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: torch.Tensor,
    *,
    alpha: float = 1.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Sum the outer products of the rows of each expert: the gradient of its weight.

        out[e] = alpha * sum of left[s]^T right[s]        offsets[e - 1] <= s < offsets[e]

    Experts without rows get zeros.

    Args:
        left: [S, M], any strides; fp32, fp16 or bf16.
        right: [S, N] of the same dtype, any strides.
        offsets: int32 [E], contiguous, never decreasing, at most S.
        alpha: rounded to fp32.
        dtype: of the result; that of left by default.

    Returns:
        [E, M, N], contiguous.

    Raises:
        KernelInputError: shapes or dtypes that do not go together.
    """
    (num_rows, height), (_, width), experts = left.shape, right.shape, len(offsets)
    _check("grouped_outer", left, right, offsets, len(right) == num_rows)
    out = torch.empty(experts, height, width, dtype=dtype or left.dtype, device=left.device)
    if out.numel() == 0:
        return out
    constants = _outer_constants(num_rows, experts, height, width, left.element_size())
    programs = experts * triton.cdiv(height, constants["BLOCK_M"]) * triton.cdiv(width, constants["BLOCK_N"])
    numbers = (num_rows, *left.stride(), *right.stride(), float(alpha))
    _outer(programs, (left, right, offsets, out), numbers, constants)
    return out


def _check(name: str, first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor, fits: bool) -> None:
    if not fits or first.dtype != second.dtype or offsets.dtype != torch.int32 or not offsets.is_contiguous():
        given = ", ".join(f"{x.dtype} {list(x.shape)}" for x in (first, second, offsets))
        raise KernelInputError(
            f"{name}: {given} do not go together; give it operands of one dtype and contiguous int32 offsets [E]"
        )


def _compile_case(
    kernel: Any, element: str, out: str, constants: dict[str, Any], unit: tuple[str, ...]
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    constexprs = {name: value for name, value in constants.items() if name in kernel.arg_names}
    constexprs |= dict.fromkeys(unit, 1)
    kinds = {"offsets_ptr": "*i32", "out_ptr": f"*{out}", "alpha": "fp32"}
    signature = {}
    for name in kernel.arg_names:
        usual = f"*{element}" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constexprs else kinds.get(name, usual)
    return kernel, signature, constexprs, constants["num_warps"]


def compile_cases() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """Wide and thin products of every dtype, for `tests/cross_compile.py`."""
    row_major = ("rows_stride_k", "weight_stride_n", "out_stride_n")
    transposed = ("rows_stride_k", "weight_stride_k", "out_stride_n")
    for element, size in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        wide = _matmul_constants(65536, 128, 2048, 1536, size, False)
        yield _compile_case(_matmul_kernel, element, element, wide, transposed)
        outer = _outer_constants(65536, 128, 1536, 2048, size)
        yield _compile_case(_outer_kernel, element, "fp32", outer, ("left_stride_m", "right_stride_n"))
    # Low rank: into it, out of it and added; and few rows.
    for shape, unit in (((65536, 128, 2048, 16), transposed), ((65536, 128, 16, 1536), row_major)):
        yield _compile_case(_matmul_kernel, "bf16", "bf16", _matmul_constants(*shape, 2, True), unit)
    for element, size in (("bf16", 2), ("fp32", 4)):
        yield _compile_case(
            _matmul_kernel, element, element, _matmul_constants(700, 130, 101, 77, size, False), row_major
        )
    added = _matmul_constants(65536, 128, 16, 1536, 4, True)
    yield _compile_case(_matmul_kernel, "fp32", "fp32", added, row_major)
    few = _outer_constants(8192, 128, 1536, 2048, 4)
    yield _compile_case(_outer_kernel, "fp32", "fp32", few, ("left_stride_m", "right_stride_n"))
    thin = _outer_constants(65536, 128, 16, 2048, 2)
    yield _compile_case(_outer_kernel, "bf16", "bf16", thin, ("left_stride_m", "right_stride_n"))
