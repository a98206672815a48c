"""RMSNorm of q and k, then their rotation: one kernel forward, one backward.

    rstd = 1 / sqrt(mean(x^2) + eps)        x_hat = x * rstd        over a head, or over all heads of a token
    llama        y = weight * round(x_hat)        fp32_weight  y = weight * x_hat        gemma  y = (1 + weight) * x_hat
    out[a] = y[a] * cos[i] - y[b] * sin[i]        out[b] = y[b] * cos[i] + y[a] * sin[i]          i < R/2
    half: (a, b) = (i, i + R/2)        interleaved: (a, b) = (2i, 2i + 1)        out = y from element R on
    backward: dy = dout rotated back        g = dy * weight, or dy * (1 + weight)
    dx = rstd * (g - x_hat * mean(g * x_hat))        dweight = sum of dy * x_hat, llama: of dy * round(x_hat)

Rounding: x_hat to the dtype of x under llama, whose modules multiply the weight with the rounded number; then only the
result at its store. y itself is never rounded, which separate ops have to do. Everything in between is fp32.
Dtypes: fp32, fp16, bf16 (sm80 on); the weights and the angles may have others. Any card that Triton compiles for.
Shapes: q, dq_out [batch, length, HQ, D], k, dk_out [batch, length, HK, D], cos, sin [batch, length, HALF], all of any
    strides; HALF = R/2. Results contiguous. Weights [D], or [HQ * D] and [HK * D] under WHOLE_WIDTH. rstd fp32, one for
    each head, or for each token under WHOLE_WIDTH.
Bytes an element at 16 bits: forward 4 (x in, out), backward 6 (dout, x in, dx out); angles once a token for all heads.

One program takes all heads of BLOCK_T tokens in tiles of heads, whose size comes from a budget of elements; under
WHOLE_WIDTH a tile is all heads, since nothing is known of a row before all of it is there. Pairs are loaded as two
contiguous halves, so that both sides of a rotation are in the same thread; what is not rotated is a third part.
With a trained weight the backward runs a fixed number of programs, which walk the tokens and keep their part of dweight
in registers, with an element for each place of a tile; sums within a program and over programs have a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_pairs import index, load_angles
from .triton_rows import load_row, load_scale, rounded, row_mean, store_row, zeros


@triton.jit
def _forward_tile(
    x_tokens,  # [BLOCK_T, 1, 1] pointers to the first head of each token
    weight_ptr,
    out_ptr,
    rstd_ptr,
    token,  # [BLOCK_T, 1, 1]
    token_mask,
    first_head,
    cos,  # [BLOCK_T, 1, BLOCK_HALF] fp32
    sin,
    eps,
    head_stride,
    dim_stride,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROUNDING: tl.constexpr,
    WHOLE_WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    WIDTH: tl.constexpr = HEADS * D if WHOLE_WIDTH else D
    head = index(first_head, BLOCK_H, LONG_INDEXING)[None, :, None]
    row, mask = token * HEADS + head, token_mask & (head < HEADS)
    first, second, tail = load_row(
        x_tokens + head * head_stride, mask, dim_stride,
        D, HALF, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL,
    )  # fmt: skip
    squares = row_mean(first * first, second * second, tail * tail, WIDTH, WHOLE_WIDTH, BLOCK_TAIL)
    rstd = tl.rsqrt(squares + eps)
    if WHOLE_WIDTH:
        tl.store(rstd_ptr + token, rstd, mask=token_mask)
    else:
        tl.store(rstd_ptr + row, rstd, mask=mask)
    scale_first, scale_second, scale_tail = load_scale(
        weight_ptr, head, HEADS, D, HALF, ROUNDING, WHOLE_WIDTH, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL
    )
    first = rounded(first * rstd, x_tokens, ROUNDING) * scale_first
    second = rounded(second * rstd, x_tokens, ROUNDING) * scale_second
    if BLOCK_TAIL > 0:
        tail = rounded(tail * rstd, x_tokens, ROUNDING) * scale_tail
    store_row(
        out_ptr + row * D, mask, first * cos - second * sin, second * cos + first * sin, tail,
        D, HALF, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "length"])
def qk_norm_rope_fwd_kernel(
    cos_ptr,  # [batch, length, HALF]
    sin_ptr,  # strides of cos
    q_ptr,  # [batch, length, HQ, D]
    q_weight_ptr,  # [D], or [HQ * D] under WHOLE_WIDTH
    q_out_ptr,  # contiguous
    q_rstd_ptr,  # [num_tokens, HQ] fp32, or [num_tokens] under WHOLE_WIDTH
    k_ptr,
    k_weight_ptr,
    k_out_ptr,
    k_rstd_ptr,
    num_tokens,
    length,
    eps,
    angle_batch_stride,
    angle_length_stride,
    angle_dim_stride,
    q_batch_stride,
    q_length_stride,
    q_head_stride,
    q_dim_stride,
    k_batch_stride,
    k_length_stride,
    k_head_stride,
    k_dim_stride,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROUNDING: tl.constexpr,
    WHOLE_WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    token = index(tl.program_id(0) * BLOCK_T, BLOCK_T, LONG_INDEXING)[:, None, None]
    mask = token < num_tokens
    batch, position = token // length, token % length
    cos, sin = load_angles(
        cos_ptr, sin_ptr, batch * angle_batch_stride + position * angle_length_stride, mask, angle_dim_stride,
        HALF, LONG_INDEXING, BLOCK_HALF,
    )  # fmt: skip
    q_tokens = q_ptr + (batch * q_batch_stride + position * q_length_stride)
    for tile in range((HQ + BLOCK_HQ - 1) // BLOCK_HQ):
        _forward_tile(
            q_tokens, q_weight_ptr, q_out_ptr, q_rstd_ptr, token, mask, tile * BLOCK_HQ, cos, sin, eps,
            q_head_stride, q_dim_stride, HQ, BLOCK_HQ, D, HALF, ROUNDING, WHOLE_WIDTH, INTERLEAVED, LONG_INDEXING,
            BLOCK_HALF, BLOCK_TAIL,
        )  # fmt: skip
    k_tokens = k_ptr + (batch * k_batch_stride + position * k_length_stride)
    for tile in range((HK + BLOCK_HK - 1) // BLOCK_HK):
        _forward_tile(
            k_tokens, k_weight_ptr, k_out_ptr, k_rstd_ptr, token, mask, tile * BLOCK_HK, cos, sin, eps,
            k_head_stride, k_dim_stride, HK, BLOCK_HK, D, HALF, ROUNDING, WHOLE_WIDTH, INTERLEAVED, LONG_INDEXING,
            BLOCK_HALF, BLOCK_TAIL,
        )  # fmt: skip


@triton.jit
def _backward_tile(
    dout_tokens,  # [BLOCK_T, 1, 1] pointers to the first head of each token
    x_tokens,
    weight_ptr,
    rstd_ptr,
    dx_ptr,  # contiguous, or None: x needs no gradient
    sum_first,  # [BLOCK_T, BLOCK_H, BLOCK_HALF] dweight so far, unused without SUM
    sum_second,
    sum_tail,
    token,  # [BLOCK_T, 1, 1]
    token_mask,
    first_head,
    cos,  # [BLOCK_T, 1, BLOCK_HALF] fp32
    sin,
    dout_head_stride,
    dout_dim_stride,
    x_head_stride,
    x_dim_stride,
    SUM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROUNDING: tl.constexpr,
    WHOLE_WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    WIDTH: tl.constexpr = HEADS * D if WHOLE_WIDTH else D
    head = index(first_head, BLOCK_H, LONG_INDEXING)[None, :, None]
    row, mask = token * HEADS + head, token_mask & (head < HEADS)
    turned_first, turned_second, dy_tail = load_row(
        dout_tokens + head * dout_head_stride, mask, dout_dim_stride,
        D, HALF, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL,
    )  # fmt: skip
    first, second, tail = load_row(
        x_tokens + head * x_head_stride, mask, x_dim_stride,
        D, HALF, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL,
    )  # fmt: skip
    if WHOLE_WIDTH:
        rstd = tl.load(rstd_ptr + token, mask=token_mask, other=0.0)
    else:
        rstd = tl.load(rstd_ptr + row, mask=mask, other=0.0)
    dy_first = turned_first * cos + turned_second * sin
    dy_second = turned_second * cos - turned_first * sin
    first, second, tail = first * rstd, second * rstd, tail * rstd  # x_hat from here on
    if SUM:
        sum_first += dy_first * rounded(first, x_tokens, ROUNDING)
        sum_second += dy_second * rounded(second, x_tokens, ROUNDING)
        if BLOCK_TAIL > 0:
            sum_tail += dy_tail * rounded(tail, x_tokens, ROUNDING)
    if dx_ptr is not None:
        scale_first, scale_second, scale_tail = load_scale(
            weight_ptr, head, HEADS, D, HALF, ROUNDING, WHOLE_WIDTH, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL
        )
        dy_first, dy_second, dy_tail = dy_first * scale_first, dy_second * scale_second, dy_tail * scale_tail
        mean = row_mean(dy_first * first, dy_second * second, dy_tail * tail, WIDTH, WHOLE_WIDTH, BLOCK_TAIL)
        dx_tail = dy_tail
        if BLOCK_TAIL > 0:
            dx_tail = (dy_tail - tail * mean) * rstd
        store_row(
            dx_ptr + row * D, mask, (dy_first - first * mean) * rstd, (dy_second - second * mean) * rstd, dx_tail,
            D, HALF, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL,
        )  # fmt: skip
    return sum_first, sum_second, sum_tail


@triton.jit
def _store_sums(
    partials_ptr,  # [programs, D], or [programs, HEADS * D] under WHOLE_WIDTH
    sum_first,
    sum_second,
    sum_tail,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    WHOLE_WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """This program's part of dweight: what it summed, over tokens and, where the weight is shared, heads."""
    WIDTH: tl.constexpr = HEADS * D if WHOLE_WIDTH else D
    if WHOLE_WIDTH:
        head = index(0, BLOCK_H, LONG_INDEXING)[None, :, None]
    else:
        head = tl.zeros([1, 1, 1], dtype=tl.int32)
        sum_first = tl.sum(sum_first, axis=1, keep_dims=True)
        sum_second = tl.sum(sum_second, axis=1, keep_dims=True)
        sum_tail = tl.sum(sum_tail, axis=1, keep_dims=True)
    store_row(
        partials_ptr + (tl.program_id(0) * WIDTH + head * D), head < HEADS, tl.sum(sum_first, axis=0, keep_dims=True),
        tl.sum(sum_second, axis=0, keep_dims=True), tl.sum(sum_tail, axis=0, keep_dims=True),
        D, HALF, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "length"])
def qk_norm_rope_bwd_kernel(
    cos_ptr,  # [batch, length, HALF]
    sin_ptr,  # strides of cos
    dq_out_ptr,  # [batch, length, HQ, D]; None with all others of q if HQ = 0
    q_ptr,
    q_weight_ptr,
    q_rstd_ptr,
    dq_ptr,  # contiguous, or None: q needs no gradient
    q_partials_ptr,  # [programs, D] fp32, or [programs, HQ * D] under WHOLE_WIDTH, or None: the weight is frozen
    dk_out_ptr,
    k_ptr,
    k_weight_ptr,
    k_rstd_ptr,
    dk_ptr,
    k_partials_ptr,
    num_tokens,
    length,
    angle_batch_stride,
    angle_length_stride,
    angle_dim_stride,
    dq_out_batch_stride,
    dq_out_length_stride,
    dq_out_head_stride,
    dq_out_dim_stride,
    q_batch_stride,
    q_length_stride,
    q_head_stride,
    q_dim_stride,
    dk_out_batch_stride,
    dk_out_length_stride,
    dk_out_head_stride,
    dk_out_dim_stride,
    k_batch_stride,
    k_length_stride,
    k_head_stride,
    k_dim_stride,
    HQ: tl.constexpr,  # 0: nothing of q is needed
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROUNDING: tl.constexpr,
    WHOLE_WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    SUM_Q: tl.constexpr = q_partials_ptr is not None
    SUM_K: tl.constexpr = k_partials_ptr is not None
    q_first, q_second = zeros(BLOCK_T, BLOCK_HQ, BLOCK_HALF), zeros(BLOCK_T, BLOCK_HQ, BLOCK_HALF)
    k_first, k_second = zeros(BLOCK_T, BLOCK_HK, BLOCK_HALF), zeros(BLOCK_T, BLOCK_HK, BLOCK_HALF)
    q_tail, k_tail = zeros(BLOCK_T, BLOCK_HQ, BLOCK_TAIL), zeros(BLOCK_T, BLOCK_HK, BLOCK_TAIL)
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = index(block * BLOCK_T, BLOCK_T, LONG_INDEXING)[:, None, None]
        mask = token < num_tokens
        batch, position = token // length, token % length
        cos, sin = load_angles(
            cos_ptr, sin_ptr, batch * angle_batch_stride + position * angle_length_stride, mask, angle_dim_stride,
            HALF, LONG_INDEXING, BLOCK_HALF,
        )  # fmt: skip
        if HQ > 0:
            dq_out_tokens = dq_out_ptr + (batch * dq_out_batch_stride + position * dq_out_length_stride)
            q_tokens = q_ptr + (batch * q_batch_stride + position * q_length_stride)
            for tile in range((HQ + BLOCK_HQ - 1) // BLOCK_HQ):
                q_first, q_second, q_tail = _backward_tile(
                    dq_out_tokens, q_tokens, q_weight_ptr, q_rstd_ptr, dq_ptr, q_first, q_second, q_tail,
                    token, mask, tile * BLOCK_HQ, cos, sin,
                    dq_out_head_stride, dq_out_dim_stride, q_head_stride, q_dim_stride, SUM_Q, HQ, BLOCK_HQ,
                    D, HALF, ROUNDING, WHOLE_WIDTH, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL,
                )  # fmt: skip
        if HK > 0:
            dk_out_tokens = dk_out_ptr + (batch * dk_out_batch_stride + position * dk_out_length_stride)
            k_tokens = k_ptr + (batch * k_batch_stride + position * k_length_stride)
            for tile in range((HK + BLOCK_HK - 1) // BLOCK_HK):
                k_first, k_second, k_tail = _backward_tile(
                    dk_out_tokens, k_tokens, k_weight_ptr, k_rstd_ptr, dk_ptr, k_first, k_second, k_tail,
                    token, mask, tile * BLOCK_HK, cos, sin,
                    dk_out_head_stride, dk_out_dim_stride, k_head_stride, k_dim_stride, SUM_K, HK, BLOCK_HK,
                    D, HALF, ROUNDING, WHOLE_WIDTH, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL,
                )  # fmt: skip
    if SUM_Q:
        _store_sums(
            q_partials_ptr, q_first, q_second, q_tail,
            HQ, BLOCK_HQ, D, HALF, WHOLE_WIDTH, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL,
        )  # fmt: skip
    if SUM_K:
        _store_sums(
            k_partials_ptr, k_first, k_second, k_tail,
            HK, BLOCK_HK, D, HALF, WHOLE_WIDTH, INTERLEAVED, LONG_INDEXING, BLOCK_HALF, BLOCK_TAIL,
        )  # fmt: skip
