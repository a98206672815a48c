"""The loss in plain torch: once for all logits and differentiable, as an oracle, and once for a chunk of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .rows import RowOptions, RowOutputs, TokenStatistics, accumulation_dtype


def transformed(logits: torch.Tensor, options: RowOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled, capped and divided by the temperature, in fp32 or fp64; and the tanh of the cap."""
    x, tanh = logits.to(accumulation_dtype(logits.dtype)), None
    if options.logit_scale != 1:
        x = x * options.logit_scale
    if options.softcap:
        tanh = torch.tanh(x / options.softcap)
        x = tanh * options.softcap
    return x if options.temperature == 1 else x / options.temperature, tanh


def losses_of(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    options: RowOptions,
    with_statistics: bool,
) -> RowOutputs:
    """Of each row, all logits at once, for torch to differentiate.

    Args:
        hidden: [N, H].
        weight, bias: [V, H] and [V] or None; the product is F.linear's, in whatever dtype that computes.
        targets: [N] int64.
    """
    x, _ = transformed(F.linear(hidden, weight, bias), options)
    log_p = torch.log_softmax(x, -1)
    ignored, known, place = _places(targets, x, options)
    log_p_target = log_p.gather(-1, place[:, None])[:, 0] * known
    losses = -log_p_target
    if options.label_smoothing:
        losses = (1 - options.label_smoothing) * losses - options.label_smoothing * log_p.mean(-1)
    if options.z_loss:
        losses = losses + options.z_loss * torch.logsumexp(x, -1).square()
    losses = losses.masked_fill(ignored, 0)
    if not with_statistics:
        return RowOutputs(losses)
    return RowOutputs(losses, _statistics(x.detach(), log_p.detach(), log_p_target.detach(), ignored))


def cross_entropy_rows_(
    logits: torch.Tensor, vocab_size: int, targets: torch.Tensor, options: RowOptions, outputs: RowOutputs, *,
    with_gradient: bool,
) -> None:  # fmt: skip
    """See `triton.cross_entropy_rows_`; holds a few fp32 copies of the chunk."""
    logits = logits[:, :vocab_size]
    x, tanh = transformed(logits, options)
    lse = torch.logsumexp(x, -1, keepdim=True)
    log_p = torch.log_softmax(x, -1)
    ignored, known, place = _places(targets, x, options)
    place, smoothing = place[:, None], options.label_smoothing
    log_p_target = log_p.gather(-1, place)[:, 0] * known
    losses = -log_p_target
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * log_p.mean(-1)
    if options.z_loss:
        losses = losses + options.z_loss * lse[:, 0].square()
    outputs.losses.copy_(losses.masked_fill_(ignored, 0))
    if outputs.statistics is not None:
        for written, value in zip(outputs.statistics, _statistics(x, log_p, log_p_target, ignored), strict=True):
            written.copy_(value)
    if with_gradient:
        p = log_p.exp_()
        if options.z_loss:
            p.mul_(1 + 2 * options.z_loss * lse)
        p.scatter_add_(-1, place, (-(1 - smoothing) * known)[:, None])
        if smoothing:
            p.sub_(smoothing / x.shape[-1])
        p.mul_(known[:, None] * (options.logit_scale / options.temperature))
        if tanh is not None:
            p.mul_(1 - tanh.square_())
        logits.copy_(p.masked_fill_(ignored[:, None], 0))


def _places(
    targets: torch.Tensor, x: torch.Tensor, options: RowOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which rows are ignored; 1, or NaN where the target is none of the logits; and places that can be gathered."""
    ignored = targets == options.ignore_index
    unknown = ~ignored & ((targets < 0) | (targets >= x.shape[-1]))
    known = torch.ones(targets.shape, dtype=x.dtype, device=x.device).masked_fill(unknown, float("nan"))
    return ignored, known, targets.masked_fill(ignored | unknown, 0)


def _statistics(
    x: torch.Tensor, log_p: torch.Tensor, log_p_target: torch.Tensor, ignored: torch.Tensor
) -> TokenStatistics:
    # By their sum, since what the softmax's denominator lost is in all of them. A logit of -inf has no part in it.
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(x == float("-inf"), 0)).sum(-1) / p.sum(-1)
    return TokenStatistics(
        log_p_target.masked_fill(ignored, 0),
        entropy.masked_fill(ignored, 0),
        x.argmax(-1).masked_fill(ignored, -1),
    )
