"""The gate between an expert's two products.

    forward:   a[s, :]        = gate(h[s, :] + bias[e, :])                        h [S, 2 * I], a [S, I]
    backward:  dh[s, :]       = w[pairs[s]] * da[s, :] * gate'(h[s, :] + bias[e, :])
               dw[pairs[s]]   = <da[s, :], a[s, :]>
               wa[s, :]       = w[pairs[s]] * a[s, :]                             if the next weight is trained

Shapes: rows by expert, e the expert of a row: the number of offsets [E] at or below it. w [T, K] any strides, dw
[T * K] fp32, zero for rows at or beyond offsets[E - 1], which belong to nobody and whose h and da may be anything; dh
and wa are anything there as well. Halves side by side or interleaved; all sums in fp32.
Bytes a row: forward 2 * I read and I written, backward 3 * I read and 2 * I (3 * I with wa) written.
Any card that Triton compiles for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from ..launching import Launcher
from ..triton_activations import activate
from .gate import Gate
from .order import ExpertOrder

MOST_COLUMNS = 512
TILE = 2048


@triton.jit
def _expert_of_rows(row, offsets_ptr, E: tl.constexpr, BUCKETS: tl.constexpr):
    """The expert of each row; the last one for rows without."""
    bucket = tl.arange(0, BUCKETS)
    ends = tl.load(offsets_ptr + bucket, mask=bucket < E - 1, other=2**31 - 1)
    return tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1).to(tl.int64)


@triton.jit
def _load_halves(row_ptr, first, row, exists, I: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):  # noqa: E741
    """g and u of COLUMNS columns from `first` on, in fp32; the row's number times 2 * I is where it begins."""
    if INTERLEAVED:  # two loads with a step of two would ask for every line twice
        column = 2 * first + tl.arange(0, 2 * COLUMNS)
        mask = exists[:, None] & (column < 2 * I)[None, :]
        both = tl.load(row_ptr + row[:, None] * (2 * I) + column[None, :], mask=mask, other=0).to(tl.float32)
        g, u = tl.split(tl.reshape(both, [both.shape[0], COLUMNS, 2]))
    else:
        column = first + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (column < I)[None, :]
        places = row_ptr + row[:, None] * (2 * I) + column[None, :]
        g = tl.load(places, mask=mask, other=0).to(tl.float32)
        u = tl.load(places + I, mask=mask, other=0).to(tl.float32)
    return g, u


@triton.jit
def _store_halves(row_ptr, g, u, first, row, exists, I: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):  # noqa: E741
    if INTERLEAVED:
        column = 2 * first + tl.arange(0, 2 * COLUMNS)
        mask = exists[:, None] & (column < 2 * I)[None, :]
        tl.store(row_ptr + row[:, None] * (2 * I) + column[None, :], tl.interleave(g, u), mask=mask)
    else:
        column = first + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (column < I)[None, :]
        places = row_ptr + row[:, None] * (2 * I) + column[None, :]
        tl.store(places, g, mask=mask)
        tl.store(places + I, u, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_forward_kernel(
    pre_ptr,  # [S, 2 * I]
    offsets_ptr,  # [E]
    bias_ptr,  # [E, 2 * I] or none
    out_ptr,  # [S, I]
    num_rows,
    E: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    if BIASED:
        expert = _expert_of_rows(row, offsets_ptr, E, BUCKETS)
    for first in range(0, I, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (column < I)[None, :]
        g, u = _load_halves(pre_ptr, first, row, exists, I, COLUMNS, INTERLEAVED)
        if BIASED:
            bias_g, bias_u = _load_halves(bias_ptr, first, expert, exists, I, COLUMNS, INTERLEAVED)
            g += bias_g
            u += bias_u
        activation, _, _ = activate(g, u, ACTIVATION, ALPHA, LIMIT, pre_ptr.dtype.element_ty == tl.float32)
        tl.store(out_ptr + row[:, None] * I + column[None, :], activation, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_backward_kernel(
    pre_ptr,  # [S, 2 * I]
    grad_ptr,  # [S, I], of the activation, without the pair's weight
    offsets_ptr,  # [E]
    pairs_ptr,  # [S]
    weights_ptr,  # [T, K]
    bias_ptr,  # [E, 2 * I] or none
    grad_pre_ptr,  # [S, 2 * I]
    grad_weights_ptr,  # [S], in the order of pairs
    weighted_ptr,  # [S, I] or none
    num_rows,
    stride_token,
    stride_choice,
    E: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    WITH_ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    pair = tl.load(pairs_ptr + row, mask=exists, other=0)
    weights = weights_ptr + (pair // K).to(tl.int64) * stride_token + (pair % K) * stride_choice
    weight = tl.load(weights, mask=exists, other=0).to(tl.float32)
    if BIASED:
        expert = _expert_of_rows(row, offsets_ptr, E, BUCKETS)
    product = tl.zeros([ROWS], dtype=tl.float32)
    for first in range(0, I, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (column < I)[None, :]
        narrow = row[:, None] * I + column[None, :]
        g, u = _load_halves(pre_ptr, first, row, exists, I, COLUMNS, INTERLEAVED)
        if BIASED:
            bias_g, bias_u = _load_halves(bias_ptr, first, expert, exists, I, COLUMNS, INTERLEAVED)
            g += bias_g
            u += bias_u
        grad = tl.load(grad_ptr + narrow, mask=mask, other=0).to(tl.float32)
        activation, by_g, by_u = activate(g, u, ACTIVATION, ALPHA, LIMIT, pre_ptr.dtype.element_ty == tl.float32)
        product += tl.sum(tl.where(mask, activation * grad, 0.0), axis=1)
        grad *= weight[:, None]
        _store_halves(grad_pre_ptr, by_g * grad, by_u * grad, first, row, exists, I, COLUMNS, INTERLEAVED)
        if WITH_ACTIVATION:
            tl.store(weighted_ptr + narrow, activation * weight[:, None], mask=mask)
    owned = row < tl.load(offsets_ptr + E - 1)
    tl.store(grad_weights_ptr + pair, tl.where(owned, product, 0.0), mask=exists)


_gate_forward, _gate_backward = Launcher(_gate_forward_kernel), Launcher(_gate_backward_kernel)


def gate_forward(pre: torch.Tensor, order: ExpertOrder, gate: Gate, bias: torch.Tensor | None) -> torch.Tensor:
    """See `reference.gate_forward`; pre is contiguous."""
    count, size = pre.shape[0], pre.shape[1] // 2
    out = torch.empty(count, size, dtype=pre.dtype, device=pre.device)
    if out.numel():
        constants = _constants(size, len(order.offsets), gate, bias, {})
        pointers = (pre, order.offsets, out if bias is None else bias.contiguous(), out)
        _gate_forward(triton.cdiv(count, constants["ROWS"]), pointers, (count,), constants)
    return out


def gate_backward(
    pre: torch.Tensor,
    grad: torch.Tensor,
    order: ExpertOrder,
    topk_weights: torch.Tensor,
    gate: Gate,
    bias: torch.Tensor | None,
    *,
    with_activation: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `reference.gate_backward`; pre and grad are contiguous."""
    count, size = grad.shape
    grad_pre = torch.empty_like(pre)
    grad_weights = torch.empty(topk_weights.shape, dtype=torch.float32, device=pre.device)
    weighted = torch.empty_like(grad) if with_activation else None
    if count:
        own = {"K": topk_weights.shape[1], "WITH_ACTIVATION": with_activation}
        constants = _constants(size, len(order.offsets), gate, bias, own)
        pointers = (
            pre, grad, order.offsets, order.pairs, topk_weights, grad if bias is None else bias.contiguous(),
            grad_pre, grad_weights, grad if weighted is None else weighted,
        )  # fmt: skip
        numbers = (count, *topk_weights.stride())
        _gate_backward(triton.cdiv(count, constants["ROWS"]), pointers, numbers, constants)
    return grad_pre, grad_weights, weighted


def _constants(size: int, experts: int, gate: Gate, bias: torch.Tensor | None, own: dict[str, Any]) -> dict[str, Any]:
    columns = min(triton.next_power_of_2(size), MOST_COLUMNS)
    return {
        "E": experts,
        "I": size,
        "ACTIVATION": gate.activation,
        "INTERLEAVED": gate.interleaved,
        "ALPHA": gate.alpha,
        "LIMIT": gate.limit,
        "BIASED": bias is not None,
        **own,
        "ROWS": max(1, TILE // columns),
        "COLUMNS": columns,
        "BUCKETS": triton.next_power_of_2(experts),
        "num_warps": 4,
    }


def compile_cases() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """Both kernels with every gate, for `tests/cross_compile.py`."""
    gates = (Gate("silu"), Gate("gelu"), Gate("gelu_tanh", interleaved=True), Gate("clamped_swish", interleaved=True))
    for dtype, size, gate in zip(("*bf16", "*fp16", "*fp32", "*bf16"), (768, 1024, 24, 2880), gates, strict=True):
        for flag in (True, False):
            own = {"K": 4, "WITH_ACTIVATION": flag}
            constants = _constants(size, 32, gate, torch.empty(0) if flag else None, own)
            warps = constants.pop("num_warps")
            names = dict.fromkeys(constants, "constexpr")
            pointers = {"pre_ptr": dtype, "grad_ptr": dtype, "offsets_ptr": "*i32", "pairs_ptr": "*i32"}
            pointers |= {"weights_ptr": "*fp32", "bias_ptr": dtype, "grad_pre_ptr": dtype}
            pointers |= {"grad_weights_ptr": "*fp32", "weighted_ptr": dtype}
            numbers = {"num_rows": "i32", "stride_token": "i64", "stride_choice": "i64"}
            yield _gate_backward_kernel, {**pointers, **numbers, **names}, constants, warps
            constants = {name: value for name, value in constants.items() if name not in own}
            pointers = {"pre_ptr": dtype, "offsets_ptr": "*i32", "bias_ptr": dtype, "out_ptr": dtype}
            names = dict.fromkeys(constants, "constexpr")
            yield _gate_forward_kernel, {**pointers, "num_rows": "i32", **names}, constants, warps
