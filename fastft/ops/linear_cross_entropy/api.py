"""The public linear cross-entropy, and the log-probabilities of tokens that are the same thing."""

from __future__ import annotations

from typing import Literal, overload

import torch

from ..selection import AUTO
from .rows import RowOptions, TokenStatistics
from .run import Limits, Reduction, run


@overload
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = ...,
    ignore_index: int = ...,
    reduction: str = ...,
    num_items_in_batch: torch.Tensor | float | None = ...,
    num_valid: int | None = ...,
    logit_scale: float = ...,
    softcap: float | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    return_statistics: Literal[False] = ...,
    max_logits_bytes: int | None = ...,
    check_targets: bool = ...,
    impl: str = ...,
) -> torch.Tensor: ...


@overload
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = ...,
    ignore_index: int = ...,
    reduction: str = ...,
    num_items_in_batch: torch.Tensor | float | None = ...,
    num_valid: int | None = ...,
    logit_scale: float = ...,
    softcap: float | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    return_statistics: Literal[True],
    max_logits_bytes: int | None = ...,
    check_targets: bool = ...,
    impl: str = ...,
) -> tuple[torch.Tensor, TokenStatistics]: ...


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items_in_batch: torch.Tensor | float | None = None,
    num_valid: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_statistics: bool = False,
    max_logits_bytes: int | None = None,
    check_targets: bool = False,
    impl: str = AUTO,
) -> torch.Tensor | tuple[torch.Tensor, TokenStatistics]:
    """The cross-entropy of a linear layer's outputs, which are made and used up chunk by chunk.

        z    = hidden W^T + b          x = logit_scale * z,  then softcap * tanh(x / softcap)
        loss = (1 - e) (lse(x) - x_target) + e (lse(x) - mean(x)) + z_loss * lse(x)^2        e = label_smoothing

    as `torch.nn.functional.cross_entropy` of logits in fp32, which were rounded to the dtype of the product before.
    Differentiable in hidden, weight and bias, once; a frozen tensor's gradient costs nothing. The gradient of a trained
    weight is summed over chunks in fp32. There are two products of matrices with a frozen weight, three with a trained
    one, four with a trained one and a loss for each token (`autograd.py` says why), in autocast's dtype where autocast
    is on for the device (fp64 excepted), as F.linear has it. Inputs and incoming gradients are never written.

    Tokens without a target are dropped first where their number is known: on a CPU always, on a GPU by num_valid.
    Otherwise they take part in the products, since counting them would wait for the device. To wait is right where many
    are ignored: `num_valid=int((targets != -100).sum())`.

    Args:
        hidden: [..., H], fp16, bf16, fp32 or fp64, any strides; the token before its target, so shift one of both. In
            fp16 gradients of tokens with small losses are less exact than eager's, whatever the loss is scaled with.
        weight: W, [V, H], of hidden's dtype, or any of fp16, bf16 and fp32 under autocast.
        targets: [...] int64, from 0 to V - 1 or ignore_index.
        bias: b, [V], or None.
        ignore_index: a target that is none: no loss, no gradient.
        reduction: "mean" over tokens with a target, "sum", or "none".
        num_items_in_batch: divides the sum of losses, in the place of the mean's number of tokens: a number, or a
            tensor of one on any device. Not with "none".
        num_valid: at most so many tokens have a target, if the host knows; best the exact number. If there are more,
            the loss is NaN on a GPU, and it is an error on a CPU.
        logit_scale: multiplies logits; pass 1 / logits_scaling where a model divides.
        softcap: of logits, after the scale; None or 0 for none.
        label_smoothing: e, from 0 to 1.
        z_loss: weight of the squared log of the softmax's denominator.
        return_statistics: also return log-probability, entropy and argmax of each token.
        max_logits_bytes: memory for the logits of a chunk; None for a 64th of the device's, 64 MiB to 2 GiB.
        check_targets: raise for targets out of range on a GPU too, which waits for the device. Otherwise the loss of
            such a token, and its gradient, are NaN there. On a CPU they are always checked.
        impl: "auto", "triton" (kernels on the chunks), "chunked" (plain torch on the chunks) or "reference" (plain
            torch on all logits). Under torch.compile "auto" is the reference, for the compiler to fuse.

    Returns:
        The loss, fp32 (fp64 of fp64): a number, or [...] for "none" with 0 where targets are ignored; and
        `TokenStatistics` if asked for. With no target at all the mean is NaN, as torch's is, the others 0, and
        gradients are zeros.

    Raises:
        KernelInputError: shapes, dtypes or devices do not fit; a target out of range; num_valid too small.
        UnsupportedOptionError: an option out of range, or an implementation that cannot run here.

    Sources: Wijmans et al. 2024, https://arxiv.org/abs/2411.09009 (no logits of all tokens); Hsu et al. 2024,
    https://arxiv.org/abs/2410.10989 (gradients of chunks in forward); Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311 (z-loss).
    """
    options = RowOptions(
        ignore_index, float(logit_scale), float(softcap or 0), 1.0, float(label_smoothing), float(z_loss)
    )  # fmt: skip
    loss, statistics = run(
        hidden, weight, bias, targets, options, Reduction(reduction, num_items_in_batch),
        Limits(num_valid, max_logits_bytes, check_targets), with_statistics=return_statistics, impl=impl,
    )  # fmt: skip
    return loss if statistics is None else (loss, statistics)


@overload
def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = ...,
    ignore_index: int = ...,
    temperature: float = ...,
    num_valid: int | None = ...,
    logit_scale: float = ...,
    softcap: float | None = ...,
    return_statistics: Literal[False] = ...,
    max_logits_bytes: int | None = ...,
    check_targets: bool = ...,
    impl: str = ...,
) -> torch.Tensor: ...


@overload
def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = ...,
    ignore_index: int = ...,
    temperature: float = ...,
    num_valid: int | None = ...,
    logit_scale: float = ...,
    softcap: float | None = ...,
    return_statistics: Literal[True],
    max_logits_bytes: int | None = ...,
    check_targets: bool = ...,
    impl: str = ...,
) -> tuple[torch.Tensor, TokenStatistics]: ...


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    num_valid: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    return_statistics: bool = False,
    max_logits_bytes: int | None = None,
    check_targets: bool = False,
    impl: str = AUTO,
) -> torch.Tensor | tuple[torch.Tensor, TokenStatistics]:
    """The log-probability of each target under a linear layer's outputs, for losses that weigh tokens (DPO, GRPO).

        x = logit_scale * (hidden W^T + b),  then softcap * tanh(x / softcap),  then x / temperature
        y = x_target - lse(x)

    `linear_cross_entropy` with reduction "none", negated: each token may have any upstream gradient. Two products of
    matrices with a frozen weight, both in forward, and four with a trained one.

    Args:
        temperature: divides logits, last of all.
        hidden, weight, targets and the others: see `linear_cross_entropy`.

    Returns:
        [...] fp32 (fp64 of fp64), 0 where the target is ignored; and `TokenStatistics` if asked for.

    Raises:
        KernelInputError, UnsupportedOptionError: see `linear_cross_entropy`.
    """
    options = RowOptions(ignore_index, float(logit_scale), float(softcap or 0), float(temperature))
    losses, statistics = run(
        hidden, weight, bias, targets, options, Reduction("none"), Limits(num_valid, max_logits_bytes, check_targets),
        with_statistics=return_statistics, impl=impl,
    )  # fmt: skip
    return -losses if statistics is None else (-losses, statistics)
