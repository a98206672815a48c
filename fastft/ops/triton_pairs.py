"""Device functions for the rotary pairs of a tile of heads, in fp32: two contiguous halves, or neighbours."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def index(start, COUNT: tl.constexpr, LONG_INDEXING: tl.constexpr):
    index = start + tl.arange(0, COUNT)
    if LONG_INDEXING:
        index = index.to(tl.int64)
    return index


@triton.jit
def load_pairs(
    rows,  # [BLOCK_T, BLOCK_H, 1] pointers to the first element of each head
    row_mask,  # the same shape
    dim_stride,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):
    """Both sides of each pair, [BLOCK_T, BLOCK_H, BLOCK_HALF]."""
    if INTERLEAVED:
        # One contiguous load, taken apart in registers: a load of every second element would waste half of each.
        dim = index(0, 2 * BLOCK_HALF, LONG_INDEXING)[None, None, :]
        both = tl.load(rows + dim * dim_stride, mask=row_mask & (dim < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK_HALF, 2)))
    else:
        dim = index(0, BLOCK_HALF, LONG_INDEXING)[None, None, :]
        mask = row_mask & (dim < HALF)
        first = tl.load(rows + dim * dim_stride, mask=mask, other=0.0)
        second = tl.load(rows + (dim + HALF) * dim_stride, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(
    rows,
    row_mask,
    dim_stride,
    first,  # [BLOCK_T, BLOCK_H, BLOCK_HALF] fp32
    second,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):
    """The counterpart of `load_pairs`, with one rounding."""
    first, second = first.to(rows.dtype.element_ty), second.to(rows.dtype.element_ty)
    if INTERLEAVED:
        dim = index(0, 2 * BLOCK_HALF, LONG_INDEXING)[None, None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK_HALF))
        tl.store(rows + dim * dim_stride, both, mask=row_mask & (dim < 2 * HALF))
    else:
        dim = index(0, BLOCK_HALF, LONG_INDEXING)[None, None, :]
        mask = row_mask & (dim < HALF)
        tl.store(rows + dim * dim_stride, first, mask=mask)
        tl.store(rows + (dim + HALF) * dim_stride, second, mask=mask)


@triton.jit
def load_angles(
    cos_ptr,
    sin_ptr,
    token_offset,  # [BLOCK_T, 1, 1]
    token_mask,
    dim_stride,
    HALF: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """cos and sin, [BLOCK_T, 1, BLOCK_HALF]."""
    dim = index(0, BLOCK_HALF, LONG_INDEXING)[None, None, :]
    offset, mask = token_offset + dim * dim_stride, token_mask & (dim < HALF)
    cos = tl.load(cos_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    return cos, sin
