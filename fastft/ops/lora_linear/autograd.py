"""Linear layers of one input, each with a LoRA update, as GEMMs alone: nothing else goes over [T, N] or [T, K].

    forward    t = [s_i x A_i^T]    y_i = x W_i^T + b_i, then y_i += t_i B_i^T
    backward   g = [s_i dy_i B_i]   dx = sum_i dy_i W_i + g A   dA = g^T x   dB_i = dy_i^T t_i   (A: the A_i stacked)

A sum is made by the product that is its last term: it reads y, adds t B^T in fp32 and writes y once. The
scaling is the alpha of the products t and g, which then serve both the tensors of [T, ...] and the gradients of A and
B, so that it costs no kernel and no rounding. A group costs one product with A for all, and one autograd node.

Saved are x and t. Weights, and A and B in the dtype computed in, are kept on the node itself (see `fastft.ops.kept`).
A packed weight (of 4 bits) is made once in forward and once in backward, in memory that the next one is made in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..adapter_casts import AdapterCasts, cast
from ..first_order import first_order
from ..kept import KeptTensors
from ..packed_weight import PackedWeight, unpacked
from ..products import (
    add_low_rank,
    as_rows,
    columns_of,
    common_dtype,
    in_shape,
    low_rank,
    mm_to,
    scaled_mms,
    sum_mms,
    to_dtype,
)

# The inputs of _LoRALinear before the trained parameters.
_LEADING = 2


class _Group(NamedTuple):
    """A call apart from x. Only trained parameters are inputs of the Function as well: each input costs host time."""

    weights: Sequence[torch.Tensor | PackedWeight]
    biases: Sequence[torch.Tensor | None]
    lora_As: Sequence[torch.Tensor]
    lora_Bs: Sequence[torch.Tensor]
    scalings: Sequence[float]
    dtype: torch.dtype
    casts: AdapterCasts | None
    trained: list[int]  # places in (*weights, *biases, *lora_As, *lora_Bs)

    def needs(self, needs_input_grad: Sequence[bool]) -> tuple[list[bool], list[bool], list[bool], list[bool]]:
        """Whether each weight, bias, A and B needs its gradient."""
        needs = [False] * (4 * len(self.weights))
        for place, need in zip(self.trained, needs_input_grad[_LEADING:], strict=True):
            needs[place] = need
        return _quarters(needs)


def lora_linear_group(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor | PackedWeight],
    biases: Sequence[torch.Tensor | None],
    lora_As: Sequence[torch.Tensor],
    lora_Bs: Sequence[torch.Tensor],
    scalings: Sequence[float],
    dtype: torch.dtype,
    casts: AdapterCasts | None = None,
) -> tuple[torch.Tensor, ...]:
    """See `fastft.ops.lora_linear.lora_linear_group`; dtype is the one to compute in, x not empty, nothing checked."""
    parameters = (*weights, *biases, *lora_As, *lora_Bs)
    trained = [
        place for place, tensor in enumerate(parameters) if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    ]
    group = _Group(weights, biases, lora_As, lora_Bs, scalings, dtype, casts, trained)
    return _LoRALinear.apply(x, group, *[parameters[place] for place in trained])


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: _Group, *trained: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, biases, lora_As, lora_Bs, scalings, dtype, casts, _ = group
        rows = as_rows(x, dtype)
        A, Bs = cast(lora_As, lora_Bs, dtype) if casts is None else casts.get(lora_As, lora_Bs, dtype)
        ranks = [lora_A.shape[0] for lora_A in lora_As]
        # Selective checkpointing is a dispatch mode that keeps the outputs of mm, and refuses ones written later.
        in_place = not torch._C._len_torch_dispatch_stack()
        t = low_rank(rows, A, ranks, scalings, in_place)
        lead, outputs = x.shape[:-1], []
        for weight, bias, B, part in zip(weights, biases, Bs, columns_of(t, ranks), strict=True):
            y = F.linear(rows, unpacked(weight, dtype), bias if bias is None else to_dtype(bias, dtype))
            outputs.append(in_shape(add_low_rank(y, part, B.t(), in_place), lead))

        needs_x = ctx.needs_input_grad[0]
        needs_weight, _, needs_A, needs_B = map(any, group.needs(ctx.needs_input_grad))
        ctx.save_for_backward(x if needs_A or needs_weight else None, t if needs_B else None)
        ctx.adapters = KeptTensors((A, *Bs)) if needs_x or needs_A else None
        ctx.weights = KeptTensors([weight if isinstance(weight, torch.Tensor) else None for weight in weights])
        ctx.set_materialize_grads(False)
        ctx.group, ctx.ranks = group, ranks
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        return tuple(outputs)

    @staticmethod
    @first_order("lora")
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Autocast around backward would lower GEMMs that forward ran in a wider dtype.
        kind = next((dy.device.type for dy in dys if dy is not None), None)
        if kind is not None and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return _gradients(ctx, dys)
        return _gradients(ctx, dys)


def _gradients(ctx: Any, dys: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """Of all inputs, in their order. An output that nobody used has no incoming gradient, and costs nothing."""
    x, t = ctx.saved_tensors
    group, count = ctx.group, len(dys)
    dtype = group.dtype
    needs_x = ctx.needs_input_grad[0]
    needs_weight, needs_bias, needs_A, needs_B = group.needs(ctx.needs_input_grad)
    used = [(i, as_rows(dy, dtype)) for i, dy in enumerate(dys) if dy is not None]
    ranks = [ctx.ranks[i] for i, _ in used]
    needs_any_A = any([needs_A[i] for i, _ in used])

    dx = None
    none: list[torch.Tensor | None] = [None] * count
    dweights, dbiases, dAs, dBs = none.copy(), none.copy(), none.copy(), none.copy()
    if used and (needs_x or needs_any_A):
        in_place = not torch._C._len_torch_dispatch_stack()
        A, *Bs = ctx.adapters.unchanged()
        g = scaled_mms([(dy, Bs[i], group.scalings[i]) for i, dy in used], in_place)
        if needs_x:
            ctx.weights.unchanged()
            if len(used) < count:
                parts = torch.split_with_sizes(A, ctx.ranks)
                A = torch.cat([parts[i] for i, _ in used])
            dx = sum_mms(((dy, unpacked(group.weights[i], dtype)) for i, dy in used), in_place)
            dx = add_low_rank(dx, g, A, in_place)
            dx = to_dtype(dx, ctx.x_dtype).view(ctx.x_shape)
    if needs_any_A or any(needs_weight):
        rows = as_rows(x, dtype)
    if needs_any_A:
        dtypes = [group.lora_As[i].dtype for i, _ in used]
        dA = mm_to(g.t(), rows, common_dtype(dtypes))
        # Views would keep each other from being written in place, and their base alive.
        parts = (dA,) if len(ranks) == 1 else torch.unsafe_split_with_sizes(dA, ranks)
        for (i, _), part, A_dtype in zip(used, parts, dtypes, strict=True):
            dAs[i] = to_dtype(part, A_dtype) if needs_A[i] else None
    ts = columns_of(t, ctx.ranks) if any(needs_B) else ()
    for i, dy in used:
        if needs_B[i]:
            dBs[i] = mm_to(dy.t(), ts[i], group.lora_Bs[i].dtype)
        if needs_weight[i]:
            dweights[i] = mm_to(dy.t(), rows, group.weights[i].dtype)
        if needs_bias[i]:
            dbiases[i] = dy.sum(0, dtype=group.biases[i].dtype)
    gradients = (*dweights, *dbiases, *dAs, *dBs)
    return dx, None, *[gradients[place] for place in group.trained]


def _quarters(items: Any) -> tuple[Any, Any, Any, Any]:
    n = len(items) // 4
    return items[:n], items[n : 2 * n], items[2 * n : 3 * n], items[3 * n :]
