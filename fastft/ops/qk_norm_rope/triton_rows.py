"""What the forward and the backward kernel do with a tile of rows, a row being one head of one token.

A row is three parts: `first` and `second`, the two sides of its rotary pairs, [BLOCK_T, BLOCK_H, BLOCK_HALF] each, and
`tail`, which is not rotated, [BLOCK_T, BLOCK_H, BLOCK_TAIL]. With BLOCK_TAIL = 0 there is no tail, and one zero stands
in its place. All computation is fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_pairs import index, load_pairs, store_pairs


@triton.jit
def zeros(BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr):
    if BLOCK > 0:
        return tl.zeros([BLOCK_T, BLOCK_H, BLOCK], dtype=tl.float32)
    else:
        return tl.zeros([1, 1, 1], dtype=tl.float32)


@triton.jit
def load_row(
    rows,  # [BLOCK_T, BLOCK_H, 1] pointers to the first element of each head
    row_mask,  # the same shape
    dim_stride,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """Both sides of each pair and what is not rotated, in fp32; without the latter, one zero in its place."""
    first, second = load_pairs(rows, row_mask, dim_stride, HALF, BLOCK_HALF, INTERLEAVED, LONG_INDEXING)
    tail = zeros(1, 1, 0)
    if BLOCK_TAIL > 0:
        dim = index(2 * HALF, BLOCK_TAIL, LONG_INDEXING)[None, None, :]
        tail = tl.load(rows + dim * dim_stride, mask=row_mask & (dim < D), other=0.0).to(tl.float32)
    return first, second, tail


@triton.jit
def store_row(
    rows,
    row_mask,
    first,  # [BLOCK_T, BLOCK_H, BLOCK_HALF] fp32
    second,
    tail,  # [BLOCK_T, BLOCK_H, BLOCK_TAIL] fp32
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """Contiguous rows, with one rounding."""
    store_pairs(rows, row_mask, 1, first, second, HALF, BLOCK_HALF, INTERLEAVED, LONG_INDEXING)
    if BLOCK_TAIL > 0:
        dim = index(2 * HALF, BLOCK_TAIL, LONG_INDEXING)[None, None, :]
        tl.store(rows + dim, tail.to(rows.dtype.element_ty), mask=row_mask & (dim < D))


@triton.jit
def row_mean(first, second, tail, WIDTH: tl.constexpr, WHOLE_WIDTH: tl.constexpr, BLOCK_TAIL: tl.constexpr):
    """The mean over a head, or over a token's heads: [BLOCK_T, BLOCK_H, 1] or [BLOCK_T, 1, 1]."""
    total = tl.sum(first + second, axis=2, keep_dims=True)
    if BLOCK_TAIL > 0:
        total += tl.sum(tail, axis=2, keep_dims=True)
    if WHOLE_WIDTH:
        total = tl.sum(total, axis=1, keep_dims=True)
    return total / WIDTH


@triton.jit
def rounded(x_hat, like, ROUNDING: tl.constexpr):
    """x_hat as the weight is multiplied with it; `like` points to numbers of x's dtype."""
    if ROUNDING == "llama":
        x_hat = x_hat.to(like.dtype.element_ty).to(tl.float32)
    return x_hat


@triton.jit
def load_scale(
    weight_ptr,
    head,  # [1, BLOCK_H, 1]
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROUNDING: tl.constexpr,
    WHOLE_WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """What x_hat is multiplied with, as `load_row` gives it: of every head, or one for all of them."""
    if not WHOLE_WIDTH:
        head = tl.zeros([1, 1, 1], dtype=tl.int32)
    first, second, tail = load_row(
        weight_ptr + head * D, head < HEADS, 1, D, HALF, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL
    )
    if ROUNDING == "gemma":
        first, second, tail = first + 1.0, second + 1.0, tail + 1.0
    return first, second, tail
