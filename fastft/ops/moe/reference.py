"""Mixture of experts in plain torch, on any device: what the kernels compute, piece by piece.

S = T * K pairs of a token and an expert; rows are pairs in the order of the experts (`ExpertOrder`).
"""

from __future__ import annotations

import math

import torch

from .gate import Gate
from .order import ExpertOrder


def sort_by_expert(topk_indices: torch.Tensor, num_experts: int) -> ExpertOrder:
    """By a stable `argsort` and a `bincount`; see `fastft.ops.moe.sort_by_expert`."""
    experts = topk_indices.flatten()
    experts = experts.where((experts >= 0) & (experts < num_experts), num_experts)
    pairs = experts.argsort(stable=True)
    numbers = torch.arange(len(pairs), dtype=torch.int32, device=pairs.device)
    rows = torch.empty_like(numbers).scatter_(0, pairs, numbers)
    counts = experts.bincount(minlength=num_experts + 1)[:num_experts]
    return ExpertOrder(pairs.int(), rows, counts.cumsum(0, dtype=torch.int32))


def gather_rows(source: torch.Tensor, order: ExpertOrder, choices: int) -> torch.Tensor:
    """x[s] = source[pairs[s] // K]: [T, H] to [S, H]."""
    return source[order.pairs // choices]


def combine_rows(
    rows: torch.Tensor,
    order: ExpertOrder,
    topk_weights: torch.Tensor | None,
    topk_indices: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """out[t] = sum over k of w[t, k] * (y[row of t, k] + bias[expert of t, k]): [S, H] to [T, H].

    Pairs without an expert add nothing, whatever their rows hold. Without weights each of them is one.
    """
    tokens, choices = topk_indices.shape
    wide = _wide(rows.dtype)
    place = order.rows.view(tokens, choices)
    owned = place < order.offsets[-1]
    found = rows[place].to(wide)
    if bias is not None:
        found = found + bias.to(wide)[topk_indices.where(owned, 0)]
    if topk_weights is not None:
        found = found * topk_weights.to(wide)[..., None]
    return found.where(owned[..., None], 0).sum(1).to(rows.dtype)


def gate_forward(pre: torch.Tensor, order: ExpertOrder, gate: Gate, bias: torch.Tensor | None) -> torch.Tensor:
    """a = gate(h + bias[expert of the row]): [S, 2 * I] to [S, I]."""
    g, u = _halves(pre, order, gate, bias)
    return _activate(g, u, gate)[0].to(pre.dtype)


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
    """Backward of the gate and of the weights of the combination.

    Args:
        pre: h, [S, 2 * I].
        grad: [S, I], of the activation, before the pair's weight is multiplied in.
        order: of the rows.
        topk_weights: [T, K].
        gate: which it is.
        bias: [E, 2 * I].
        with_activation: the weighted activation is wanted, for the gradient of the weights that follow.

    Returns:
        The gradient of h with the pair's weight in it; that of the weights, <grad, a>, [T, K] in fp32 (wider for fp64),
        zero for pairs without an expert; and w * a or None.
    """
    g, u = _halves(pre, order, gate, bias)
    activation, by_g, by_u = _activate(g, u, gate)
    wide = activation.dtype
    pairs = order.pairs.long()
    weight = topk_weights.reshape(-1)[pairs].to(wide)[:, None]
    owned = torch.arange(len(pairs), device=pairs.device) < order.offsets[-1]
    products = (activation * grad.to(wide)).sum(1).where(owned, 0)
    grad_weights = torch.empty_like(products).scatter_(0, pairs, products).view(topk_weights.shape)
    grad = grad.to(wide) * weight
    by_g, by_u = by_g * grad, by_u * grad
    grad_pre = torch.stack((by_g, by_u), -1).flatten(1) if gate.interleaved else torch.cat((by_g, by_u), 1)
    weighted = (activation * weight).to(pre.dtype) if with_activation else None
    return grad_pre.to(pre.dtype), grad_weights, weighted


def gate_of_halves(pre: torch.Tensor, gate: Gate) -> torch.Tensor:
    """gate(pre), [S, 2 * I] to [S, I], in the dtype of pre."""
    return _activate(*_split(pre, gate), gate)[0]


def _split(pre: torch.Tensor, gate: Gate) -> tuple[torch.Tensor, torch.Tensor]:
    if gate.interleaved:
        return pre[:, ::2], pre[:, 1::2]
    g, u = pre.chunk(2, 1)
    return g, u


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _halves(
    pre: torch.Tensor, order: ExpertOrder, gate: Gate, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = pre.to(_wide(pre.dtype))
    if bias is not None:
        wide = wide + bias.to(wide.dtype)[expert_of_rows(order).clamp(max=len(bias) - 1)]
    return _split(wide, gate)


def expert_of_rows(order: ExpertOrder) -> torch.Tensor:
    """int64 [S]; E for rows without an expert."""
    rows = torch.arange(len(order.pairs), dtype=torch.int32, device=order.pairs.device)
    return torch.searchsorted(order.offsets, rows, right=True)


def _activate(g: torch.Tensor, u: torch.Tensor, gate: Gate) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The activation, and its derivatives by g and by u."""
    if gate.activation == "clamped_swish":
        beyond_g, beyond_u = g > gate.limit, u.abs() > gate.limit  # of NaN neither, so that it stays
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit) + 1
        swish, slope = _swish(g, gate.alpha)
        return u * swish, (u * slope).masked_fill(beyond_g, 0), swish.masked_fill(beyond_u, 0)
    if gate.activation == "silu":
        act, slope = _swish(g, 1.0)
    elif gate.activation == "gelu":
        below = 0.5 * (1 + torch.erf(g * math.sqrt(0.5)))
        act, slope = g * below, below + g * torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    else:
        inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
        tanh = torch.tanh(inner)
        inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * g * g)
        act, slope = 0.5 * g * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * g * (1 - tanh * tanh) * inner_slope
    return act * u, slope * u, act


def _swish(x: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    sigmoid = torch.sigmoid(alpha * x)
    return x * sigmoid, sigmoid * (1 + alpha * x * (1 - sigmoid))
