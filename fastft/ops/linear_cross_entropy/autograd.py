"""The loss as one autograd node. Which gradients are made when follows from who needs them:

    summed to one number    all in forward. The upstream gradient is a number that backward multiplies them with.
    one loss a token,       dh in forward: a row of it depends on its own loss alone, so backward multiplies rows.
    frozen head             Two GEMMs in all, of 2 H V FLOPs a token each: logits, and dlogits W.
    one loss a token,       in backward, from logits made again: dW mixes tokens, so their upstream gradients have to
    trained weight or bias  be known. Four GEMMs, where to keep the logits would take three.

What is made in forward is not scaled there: of a mean over 8,192 tokens fp16 would lose what is below 5e-4 of a logit's
gradient. Backward multiplies in fp32 and rounds once, into fresh tensors, so that it may run again. For the same reason
the scale of a loss in fp16 comes too late: probabilities below 6e-8 are lost, and rows of small losses erred up to 8
times as much as eager's (V = 50,000, logits scaled by 1/16).

Rows without a target are dropped before anything is computed, if their number is known on the host: `torch.argsort`
moves the others to the front without a synchronisation. Otherwise they cost their part of the products.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ..first_order import first_order
from ..kept import KeptTensors
from .chunks import Head, Sums, Way, walk
from .rows import TokenStatistics, accumulation_dtype

_NAN = float("nan")


class Call(NamedTuple):
    """A call apart from its tensors."""

    way: Way
    reduction: str  # "none", "sum" or "mean"
    divisor: torch.Tensor | float | None  # of a sum: num_items_in_batch
    num_valid: int | None  # at most so many targets are not ignored; None if only the device knows
    num_rows: int  # N, with and without targets
    with_statistics: bool
    needs: tuple[bool, bool, bool]  # gradients of hidden, weight and bias


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, call: Call
) -> tuple[torch.Tensor, TokenStatistics | None]:
    """See `fastft.ops.linear_cross_entropy.linear_cross_entropy`; hidden [N, H], targets [N] int64, contiguous."""
    loss, *statistics = _LinearCrossEntropy.apply(hidden, weight, bias, targets, call)
    return loss, TokenStatistics(*statistics) if call.with_statistics else None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        call: Call,
    ) -> tuple[torch.Tensor | None, ...]:
        with without_autocast(hidden.device):
            ignored = targets == call.way.options.ignore_index
            count = (~ignored).sum()
            rows = _rows_with_targets(ignored, call.num_valid)
            picked = targets if rows is None else targets[rows]
            recomputes = call.reduction == "none" and any(call.needs[1:])
            needs = (False, False, False) if recomputes else call.needs
            head = Head(hidden, weight, bias, picked, rows)
            outputs, sums = walk(head, call.way, needs, with_statistics=call.with_statistics)
            loss, factor = _reduced(outputs.losses, rows, count, call)
            if rows is not None and targets.device.type != "cpu":
                # Only the device knows whether the host's number was right. A loss without some tokens must not pass.
                doubt = torch.where(count > len(rows), _NAN, 1.0)
                loss, factor = loss * doubt, doubt if factor is None else factor * doubt
            statistics: tuple[torch.Tensor | None, ...] = (None, None, None)
            if outputs.statistics is not None:
                fills = (0, 0, -1)
                statistics = tuple(
                    _spread(x, rows, call.num_rows, fill) for x, fill in zip(outputs.statistics, fills, strict=True)
                )
                ctx.mark_non_differentiable(*statistics)
        if any(call.needs):
            ctx.save_for_backward(*sums, hidden if recomputes else None, picked, rows, factor)
            ctx.head = KeptTensors((weight, bias) if recomputes else ())
        ctx.set_materialize_grads(False)
        ctx.call, ctx.recomputes = call, recomputes
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return loss, *statistics

    @staticmethod
    @first_order("loss")
    def backward(ctx: Any, dloss: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        if dloss is None:
            return None, None, None, None, None
        with without_autocast(dloss.device):
            return *_gradients(ctx, dloss), None, None


def _gradients(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Of hidden, weight and bias, where they are needed."""
    *made, hidden, targets, rows, factor = ctx.saved_tensors
    way: Way = ctx.call.way
    sums, dloss = Sums(*made), dloss.to(accumulation_dtype(way.dtype))
    if factor is not None:
        dloss = dloss * factor
    of_rows = of_matrices = dloss.reshape(-1)
    if ctx.call.reduction == "none":
        of_rows = dloss if rows is None else dloss[rows]
        of_rows = of_rows.masked_fill(targets == way.options.ignore_index, 0)  # whatever it is: zero times NaN is NaN
    if ctx.recomputes:
        weight, bias = ctx.head.unchanged()
        # Rows are multiplied by numbers up to one, so that 16 bits hold them, and the sum by the largest.
        of_matrices = of_rows.abs().amax(0, keepdim=True) if len(of_rows) else of_rows.new_zeros(1)
        shares = of_rows / of_matrices.masked_fill(of_matrices == 0, 1)
        needs = ctx.needs_input_grad[:3]
        _, sums = walk(Head(hidden, weight, bias, targets, rows), way, needs, row_weights=shares)

    of_hidden, of_weight, of_bias = ctx.dtypes
    dhidden = _scaled(sums.hidden, of_rows[:, None], of_hidden)
    return (
        None if dhidden is None else _spread(dhidden, rows, ctx.call.num_rows, 0),
        _scaled(sums.weight, of_matrices[:, None], of_weight),
        _scaled(sums.bias, of_matrices, of_bias),
    )


def _scaled(x: torch.Tensor | None, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """x * scale in dtype, multiplied in fp32 in one pass: a 0-d scale would be rounded to x's dtype before."""
    if x is None:
        return None
    assert scale.ndim == x.ndim
    return torch.mul(x, scale, out=torch.empty(x.shape, dtype=dtype, device=x.device))


def _rows_with_targets(ignored: torch.Tensor, num_valid: int | None) -> torch.Tensor | None:
    """Places of num_valid rows, those with targets first and in order; None where there is nothing to drop."""
    if num_valid is None or num_valid >= len(ignored):
        return None
    return torch.argsort(ignored.to(torch.uint8), stable=True)[:num_valid]


def _spread(values: torch.Tensor, rows: torch.Tensor | None, num_rows: int, fill: int) -> torch.Tensor:
    """Values [M, ...] of rows at their places among num_rows."""
    if rows is None:
        return values
    return values.new_full((num_rows, *values.shape[1:]), fill).index_copy_(0, rows, values)


def _reduced(
    losses: torch.Tensor, rows: torch.Tensor | None, count: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is returned, and what its upstream gradient is multiplied with."""
    if call.reduction == "none":
        return _spread(losses, rows, call.num_rows, 0), None
    total = losses.sum()
    if call.divisor is not None:
        divisor = torch.as_tensor(call.divisor, dtype=total.dtype)
        return total / divisor, 1 / divisor
    if call.reduction == "sum":
        return total, None
    # Of no token at all the mean is NaN, as torch has it, and the gradient zero.
    return total / count, 1 / count.clamp(min=1).to(total.dtype)


def without_autocast(device: torch.device) -> Any:
    """The dtype to multiply in is decided; autocast around forward or backward would change it."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
