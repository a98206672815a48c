"""RoPE for q and k in one launch.

    half:         y[i] = x[i] * cos[i] - x[i + R/2] * sin[i]     y[i + R/2] = x[i + R/2] * cos[i] + x[i] * sin[i]
    interleaved:  the same with the pair (2i, 2i + 1)            i < R/2; elements from R on pass through
    backward:     the same with -sin (a rotation's transpose is its inverse)

Rounding: fp32 inside whatever the dtype of cos and sin, one rounding at the store. Dtypes fp32, fp16, bf16 (sm80 on).
Shapes: q [batch, length, HQ, D], k [batch, length, HK, D] of any strides; out of place the results are contiguous.
    cos, sin [batch, length, HALF] (a stride of 0 broadcasts), or a table [num_positions, HALF] with position_ids
    [batch, length]; HALF = R/2.
Bytes: q and k read once and written once, 4 an element at 16 bits; cos and sin once per token, for all heads.

One program rotates all heads of BLOCK_T tokens, in tiles of heads whose size comes from a budget of elements, so that
64 heads of 256 compile as 8 of 64 do. A tile of q and a tile of k are both loaded before either is stored: in place
the compiler cannot move loads over stores, and the loads are what has to be in flight.
A position outside the table gives NaN (on a GPU there is no other way to be loud without a synchronisation), and
nothing is read for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..compiling import CompileCase, compile_case
from ..tiles import heads_a_tile, power_of_two_at_least
from ..triton_pairs import index, load_angles, load_pairs, store_pairs

# Pairs a tile: 16 a thread at 4 warps, that is four 16-byte loads of 16-bit elements in flight, in about 64 registers.
TILE_PAIRS = 2048
NUM_WARPS = 4
MAX_BLOCK_TOKENS = 8


@triton.jit
def _copy_tail(
    rows,
    out_rows,
    row_mask,
    dim_stride,
    out_dim_stride,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):
    dim = index(2 * HALF, BLOCK_TAIL, LONG_INDEXING)[None, None, :]
    mask = row_mask & (dim < D)
    tl.store(out_rows + dim * out_dim_stride, tl.load(rows + dim * dim_stride, mask=mask, other=0.0), mask=mask)


@triton.jit
def _head_rows(
    x_ptr,
    out_ptr,
    batch,
    token,  # [BLOCK_T]
    length,
    first_head,
    batch_stride,
    length_stride,
    head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    IN_PLACE: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):
    head = index(first_head, BLOCK_H, LONG_INDEXING)[None, :, None]
    token = token[:, None, None]
    rows = x_ptr + (batch * batch_stride + token * length_stride + head * head_stride)
    out_rows = rows if IN_PLACE else out_ptr + ((batch * length + token) * (HEADS * D) + head * D)
    return rows, out_rows, (token < length) & (head < HEADS)


@triton.jit(do_not_specialize=["length", "num_positions", "position_batch_stride"])
def rope_kernel(
    q_ptr,  # [batch, length, HQ, D]
    k_ptr,  # [batch, length, HK, D]
    q_out_ptr,  # contiguous, unused in place
    k_out_ptr,
    cos_ptr,  # [batch, length, HALF], or [num_positions, HALF] under GATHER
    sin_ptr,  # strides of cos
    position_ptr,  # [batch, length] integers under GATHER, else None
    length,
    num_positions,
    q_batch_stride,
    q_length_stride,
    q_head_stride,
    q_dim_stride,
    k_batch_stride,
    k_length_stride,
    k_head_stride,
    k_dim_stride,
    angle_batch_stride,
    angle_length_stride,  # under GATHER: the stride of a row of the table
    angle_dim_stride,
    position_batch_stride,
    position_length_stride,
    HQ: tl.constexpr,
    HK: tl.constexpr,  # 0: no k
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    GATHER: tl.constexpr,
    IN_PLACE: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,  # 0: nothing to copy past the rotary width
):
    blocks = tl.cdiv(length, BLOCK_T)
    batch = tl.program_id(0) // blocks
    token = index(tl.program_id(0) % blocks * BLOCK_T, BLOCK_T, LONG_INDEXING)
    if LONG_INDEXING:
        batch = batch.to(tl.int64)

    angle_mask = token < length
    if GATHER:
        position = tl.load(
            position_ptr + (batch * position_batch_stride + token * position_length_stride),
            mask=token < length,
            other=0,
        )
        in_table = (position >= 0) & (position < num_positions)
        row = tl.where(in_table, position, 0).to(token.dtype)
        angle_offset = row * angle_length_stride
        angle_mask = angle_mask & in_table
    else:
        angle_offset = batch * angle_batch_stride + token * angle_length_stride
    cos, sin = load_angles(
        cos_ptr, sin_ptr, angle_offset[:, None, None], angle_mask[:, None, None], angle_dim_stride,
        HALF, LONG_INDEXING, BLOCK_HALF,
    )  # fmt: skip
    if GATHER:
        cos = tl.where(in_table[:, None, None], cos, float("nan"))
    if INVERSE:
        sin = -sin

    Q_TILES: tl.constexpr = (HQ + BLOCK_HQ - 1) // BLOCK_HQ
    K_TILES: tl.constexpr = (HK + BLOCK_HK - 1) // BLOCK_HK
    NUM_TILES: tl.constexpr = Q_TILES if Q_TILES > K_TILES else K_TILES
    for tile in tl.static_range(NUM_TILES):
        if tile < Q_TILES:
            q_rows, q_out, q_mask = _head_rows(
                q_ptr, q_out_ptr, batch, token, length, tile * BLOCK_HQ,
                q_batch_stride, q_length_stride, q_head_stride, HQ, D, BLOCK_HQ, IN_PLACE, LONG_INDEXING,
            )  # fmt: skip
            q_first, q_second = load_pairs(q_rows, q_mask, q_dim_stride, HALF, BLOCK_HALF, INTERLEAVED, LONG_INDEXING)
        if tile < K_TILES:
            k_rows, k_out, k_mask = _head_rows(
                k_ptr, k_out_ptr, batch, token, length, tile * BLOCK_HK,
                k_batch_stride, k_length_stride, k_head_stride, HK, D, BLOCK_HK, IN_PLACE, LONG_INDEXING,
            )  # fmt: skip
            k_first, k_second = load_pairs(k_rows, k_mask, k_dim_stride, HALF, BLOCK_HALF, INTERLEAVED, LONG_INDEXING)
        if tile < Q_TILES:
            q_out_dim_stride = q_dim_stride if IN_PLACE else 1
            store_pairs(
                q_out, q_mask, q_out_dim_stride, q_first * cos - q_second * sin, q_second * cos + q_first * sin,
                HALF, BLOCK_HALF, INTERLEAVED, LONG_INDEXING,
            )  # fmt: skip
            if BLOCK_TAIL > 0:
                _copy_tail(q_rows, q_out, q_mask, q_dim_stride, q_out_dim_stride, D, HALF, BLOCK_TAIL, LONG_INDEXING)
        if tile < K_TILES:
            k_out_dim_stride = k_dim_stride if IN_PLACE else 1
            store_pairs(
                k_out, k_mask, k_out_dim_stride, k_first * cos - k_second * sin, k_second * cos + k_first * sin,
                HALF, BLOCK_HALF, INTERLEAVED, LONG_INDEXING,
            )  # fmt: skip
            if BLOCK_TAIL > 0:
                _copy_tail(k_rows, k_out, k_mask, k_dim_stride, k_out_dim_stride, D, HALF, BLOCK_TAIL, LONG_INDEXING)


# ------------------------------------------------------------------------------------------------ specialisation


class Tile(NamedTuple):
    """What one program holds at once."""

    block_t: int
    block_hq: int
    block_hk: int
    num_warps: int


def choose_tile(
    num_q_heads: int, num_k_heads: int, pairs_a_head: int, tile_pairs: int = TILE_PAIRS, num_warps: int = NUM_WARPS
) -> Tile:
    """Tile sizes from the budget of pairs that a program may hold of q, and again of k."""
    limit = max(1, tile_pairs // power_of_two_at_least(pairs_a_head))
    block_hq, block_hk = heads_a_tile(num_q_heads, limit), heads_a_tile(num_k_heads, limit)
    block_t = min(MAX_BLOCK_TOKENS, max(1, limit // max(block_hq, block_hk)))
    return Tile(block_t, block_hq, block_hk, num_warps)


@lru_cache(maxsize=256)
def specialise(
    num_q_heads: int, num_k_heads: int, head_dim: int, half: int, tile: Tile | None, **flags: bool
) -> dict[str, Any]:
    """Everything a specialisation is compiled for, launch options included."""
    tail = 0 if flags["IN_PLACE"] else head_dim - 2 * half
    tile = tile or choose_tile(num_q_heads, num_k_heads, max(half, (tail + 1) // 2))
    return {
        "HQ": num_q_heads, "HK": num_k_heads, "D": head_dim, "HALF": half, **flags,
        "BLOCK_T": tile.block_t, "BLOCK_HQ": tile.block_hq, "BLOCK_HK": tile.block_hk,
        "BLOCK_HALF": power_of_two_at_least(half), "BLOCK_TAIL": power_of_two_at_least(tail) if tail else 0,
        # Without fused multiply-add the fp32 result is bitwise that of eager torch; the kernel waits for memory anyway.
        "num_warps": tile.num_warps, "enable_fp_fusion": False,
    }  # fmt: skip


def _compile_case(
    element: str, num_q_heads: int, num_k_heads: int, head_dim: int, half: int, **flags: bool
) -> CompileCase:
    constexprs = specialise(num_q_heads, num_k_heads, head_dim, half, None, **flags)
    constexprs = constexprs | {"q_dim_stride": 1, "k_dim_stride": 1, "angle_dim_stride": 1}
    if not flags["GATHER"]:
        constexprs["position_ptr"] = None

    def kind_of(name: str) -> str:
        if name.endswith("_ptr"):
            return {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "position_ptr": "*i64"}.get(name, f"*{element}")
        return "i64" if flags["LONG_INDEXING"] and name.endswith("_stride") else "i32"

    return compile_case(rope_kernel, constexprs, kind_of)


def compile_cases() -> Iterator[CompileCase]:
    """Representative specialisations, for compiling without a GPU (not under TRITON_INTERPRET=1)."""
    plain = {"INTERLEAVED": False, "INVERSE": False, "GATHER": False, "IN_PLACE": False, "LONG_INDEXING": False}
    for element in ("bf16", "fp16", "fp32"):
        for head_dim in (64, 128, 256):
            yield _compile_case(element, 32, 8, head_dim, head_dim // 2, **plain)
    yield _compile_case("bf16", 64, 64, 256, 128, **{**plain, "IN_PLACE": True})
    yield _compile_case("bf16", 64, 64, 192, 32, **plain)
    yield _compile_case("bf16", 28, 4, 80, 16, **{**plain, "INTERLEAVED": True, "INVERSE": True})
    yield _compile_case("bf16", 32, 8, 128, 64, **{**plain, "INTERLEAVED": True, "IN_PLACE": True})
    yield _compile_case("bf16", 32, 8, 128, 64, **{**plain, "LONG_INDEXING": True})
    yield _compile_case("bf16", 32, 8, 128, 64, **{**plain, "LONG_INDEXING": True, "GATHER": True, "INTERLEAVED": True})
    yield _compile_case("bf16", 32, 0, 128, 64, **{**plain, "INVERSE": True, "GATHER": True})
