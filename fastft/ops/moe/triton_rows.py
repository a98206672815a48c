"""Tokens to the rows of their experts, and back.

    gather:   x[rows[t * K + k], :] = source[t, :]                                       [T, H] to [S, H]
    combine:  out[t, :] = sum over k of w[t, k] * (y[rows[t * K + k], :] + bias[e, :])   [S, H] to [T, H]

Shapes: S = T * K pairs; rows int32 [S]; w [T, K] or none; bias [E, H] or none, e the expert of t, k. Rows at or beyond
offsets[E - 1] belong to no expert: combine does not read them. Sums are in fp32, over k in order.
Elements moved: gather reads T * H and writes S * H, combine the other way round. Any card that Triton compiles for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from ..launching import Launcher
from .order import ExpertOrder

MOST_COLUMNS = 2048
# Elements that a program holds at a time.
TILE = 4096


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_kernel(
    source_ptr,  # [T, H], strides stride_token, stride_column
    place_ptr,  # [S]: the row of each pair
    out_ptr,  # [S, H]
    num_tokens,
    stride_token,
    stride_column,
    H: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = token < num_tokens
    for first in range(0, H, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (column < H)[None, :]
        x = tl.load(source_ptr + token[:, None] * stride_token + column[None, :] * stride_column, mask=mask, other=0)
        for choice in tl.static_range(K):
            row = tl.load(place_ptr + token * K + choice, mask=exists, other=0).to(tl.int64)
            tl.store(out_ptr + row[:, None] * H + column[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    rows_ptr,  # [S, H]
    place_ptr,  # [S]: the row of each pair
    offsets_ptr,  # [E]
    weights_ptr,  # [T, K] or none, strides stride_token, stride_choice
    experts_ptr,  # [T, K] where there is a bias, contiguous
    bias_ptr,  # [E, H] or none
    out_ptr,  # [T, H]
    num_tokens,
    stride_token,
    stride_choice,
    E: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = token < num_tokens
    owned_rows = tl.load(offsets_ptr + E - 1)
    for first in range(0, H, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (column < H)[None, :]
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for choice in tl.static_range(K):
            place = tl.load(place_ptr + token * K + choice, mask=exists, other=owned_rows)
            owned = place < owned_rows
            mask = owned[:, None] & inside
            found = tl.load(rows_ptr + place[:, None].to(tl.int64) * H + column[None, :], mask=mask, other=0)
            found = found.to(tl.float32)
            if BIASED:
                expert = tl.load(experts_ptr + token * K + choice, mask=owned, other=0).to(tl.int64)
                found += tl.load(bias_ptr + expert[:, None] * H + column[None, :], mask=mask, other=0).to(tl.float32)
            if WEIGHTED:
                weight = tl.load(weights_ptr + token * stride_token + choice * stride_choice, mask=owned, other=0)
                # A row that nobody owns may not become NaN by an infinite weight.
                found = tl.where(mask, found * weight[:, None].to(tl.float32), 0.0)
            total += found
        tl.store(out_ptr + token[:, None] * H + column[None, :], total, mask=exists[:, None] & inside)


_gather, _combine = Launcher(_gather_kernel), Launcher(_combine_kernel)


def gather_rows(source: torch.Tensor, order: ExpertOrder, choices: int) -> torch.Tensor:
    """See `reference.gather_rows`; source may have any strides."""
    tokens, size = source.shape
    out = torch.empty(tokens * choices, size, dtype=source.dtype, device=source.device)
    if out.numel():
        constants = {"H": size, "K": choices, **_tile(size, choices)}
        numbers = (tokens, *source.stride())
        _gather(triton.cdiv(tokens, constants["ROWS"]), (source, order.rows, out), numbers, constants)
    return out


def combine_rows(
    rows: torch.Tensor,
    order: ExpertOrder,
    topk_weights: torch.Tensor | None,
    topk_indices: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """See `reference.combine_rows`; rows are contiguous."""
    tokens, choices = topk_indices.shape
    size = rows.shape[1]
    out = torch.empty(tokens, size, dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    constants = {
        "E": len(order.offsets),
        "H": size,
        "K": choices,
        "WEIGHTED": topk_weights is not None,
        "BIASED": bias is not None,
        **_tile(size, choices),
    }
    weights = out if topk_weights is None else topk_weights
    experts = order.rows if bias is None else topk_indices.contiguous()
    pointers = (rows, order.rows, order.offsets, weights, experts, out if bias is None else bias.contiguous(), out)
    numbers = (tokens, *weights.stride())
    _combine(triton.cdiv(tokens, constants["ROWS"]), pointers, numbers, constants)
    return out


def _tile(size: int, choices: int) -> dict[str, int]:
    """Narrow rows go several to a program; the more experts a token has, the more a program has to do for each."""
    columns = min(triton.next_power_of_2(size), MOST_COLUMNS)
    rows = max(1, TILE // columns // min(triton.next_power_of_2(choices), 4))
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": 8 if rows * columns >= TILE else 4}


def compile_cases() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """Every kernel with and without weights and bias, for `tests/cross_compile.py`."""
    for dtype, size in (("*bf16", 2048), ("*fp16", 2880), ("*fp32", 64)):
        tile = _tile(size, 1)
        warps = tile.pop("num_warps")
        constants = {"H": size, "K": 8, **tile}
        pointers = {"source_ptr": dtype, "place_ptr": "*i32", "out_ptr": dtype}
        numbers = {"num_tokens": "i32", "stride_token": "i64", "stride_column": "i64"}
        yield _gather_kernel, {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}, constants, warps
        for flag in (True, False):
            tile = _tile(size, 8)
            warps = tile.pop("num_warps")
            constants = {"E": 32, "H": size, "K": 8, "WEIGHTED": flag, "BIASED": flag, **tile}
            pointers = {"rows_ptr": dtype, "place_ptr": "*i32", "offsets_ptr": "*i32", "weights_ptr": "*fp32"}
            pointers |= {"experts_ptr": "*i64", "bias_ptr": dtype, "out_ptr": dtype}
            numbers = {"num_tokens": "i32", "stride_token": "i64", "stride_choice": "i64"}
            yield _combine_kernel, {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}, constants, warps
