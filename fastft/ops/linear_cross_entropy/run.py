"""One call: checks, the choice of an implementation, the dtype to multiply in and the size of chunks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ...capability import GPUCapability, Verdict, probe
from ...errors import KernelInputError, UnsupportedOptionError
from ..products import AUTOCAST_DTYPES
from ..selection import AUTO, select
from . import autograd, reference
from .chunks import RowKernel, Way
from .rows import RowOptions, TokenStatistics, accumulation_dtype

REDUCTIONS = ("none", "sum", "mean")
_DTYPES = AUTOCAST_DTYPES | {torch.float64}
# Memory for the logits of a chunk unless told: this part of the device's, within bounds. For 8,192 tokens of 151,936
# logits in bf16 these are two chunks on a card of 140 GB and seven on one of 24, of more than a thousand tokens each.
_PART_OF_MEMORY = 64
_LEAST_LOGITS_BYTES, _MOST_LOGITS_BYTES = 2**26, 2**31
_UNKNOWN_MEMORY_BYTES = 2**28


class Rows(NamedTuple):
    """Who goes over the logits."""

    kernel: RowKernel | None  # None: plain torch on all logits at once
    wide_copies: int = 0  # of a chunk, in fp32 or fp64, that the kernel makes


class Reduction(NamedTuple):
    """From the losses of tokens to what is returned."""

    kind: str  # one of REDUCTIONS
    divisor: torch.Tensor | float | None = None  # of a sum


class Limits(NamedTuple):
    """What the caller knows about a call, and allows it."""

    num_valid: int | None
    max_logits_bytes: int | None
    check_targets: bool


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    options: RowOptions,
    reduction: Reduction,
    limits: Limits,
    *,
    with_statistics: bool,
    impl: str,
) -> tuple[torch.Tensor, TokenStatistics | None]:
    """See `fastft.ops.linear_cross_entropy.linear_cross_entropy`."""
    _check_options(options, reduction, limits)
    _check_tensors(hidden, weight, bias, targets)
    dtype = _compute_dtype(hidden, weight, bias)
    shape, compiling = targets.shape, impl == AUTO and torch.compiler.is_compiling()
    rows = Rows(None) if compiling else rows_for(hidden.device, dtype, impl)
    hidden = hidden.reshape(targets.numel(), hidden.shape[-1])
    targets = targets.reshape(-1).to(torch.int64).contiguous()
    reduction = _with_divisor_near(reduction, hidden.device)
    num_valid = limits.num_valid
    if not compiling:
        num_valid = _checked(targets, weight.shape[0], options, limits)
    if rows.kernel is None:
        loss, statistics = _all_at_once(hidden, weight, bias, targets, options, reduction, with_statistics)
    else:
        way = Way(rows.kernel, options, dtype, _logits_per_chunk(hidden.device, dtype, rows, limits))
        trains = torch.is_grad_enabled()
        needs = (
            trains and hidden.requires_grad,
            trains and weight.requires_grad,
            trains and bias is not None and bias.requires_grad,
        )
        call = autograd.Call(way, *reduction, num_valid, len(targets), with_statistics, needs)
        loss, statistics = autograd.linear_cross_entropy(hidden, weight, bias, targets, call)
    if statistics is not None:
        statistics = TokenStatistics(*(each.view(shape) for each in statistics))
    return loss.view(shape) if reduction.kind == "none" else loss, statistics


def _all_at_once(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    options: RowOptions,
    reduction: Reduction,
    with_statistics: bool,
) -> tuple[torch.Tensor, TokenStatistics | None]:
    losses, statistics = reference.losses_of(hidden, weight, bias, targets, options, with_statistics)
    if reduction.kind == "none":
        return losses, statistics
    total, divisor = losses.sum(), reduction.divisor
    if divisor is None and reduction.kind == "mean":
        divisor = (targets != options.ignore_index).sum()
    return total if divisor is None else total / divisor, statistics


def verdicts(capability: GPUCapability, dtype: torch.dtype) -> dict[str, Verdict]:
    """What each implementation says about a case, best first.

    Args:
        capability: of the device that hidden is on.
        dtype: that the product is computed in.

    Returns:
        "triton", "chunked" and "reference" with their verdicts; "triton" comes last without a GPU.
    """
    if dtype == torch.float64:
        triton = Verdict(False, "the kernels compute in fp32, which would lose the precision of fp64")
    else:
        triton = capability.triton_for(dtype)
    others = {
        "chunked": Verdict(True, "plain torch on chunks of tokens; runs on any device"),
        "reference": Verdict(True, "plain torch on the logits of all tokens; runs on any device"),
    }
    return others | {"triton": triton} if capability.device.kind == "cpu" else {"triton": triton} | others


@lru_cache(maxsize=64)
def rows_for(device: torch.device, dtype: torch.dtype, impl: str) -> Rows:
    """Who goes over the logits in an implementation, decided once for each device and dtype.

    Raises:
        UnsupportedOptionError: it is unknown, or cannot run there.
    """
    chosen = select("linear_cross_entropy", impl, verdicts(probe(device), dtype)).impl
    if chosen == "reference":
        return Rows(None)
    if chosen == "chunked":
        return Rows(reference.cross_entropy_rows_, wide_copies=3)
    from .triton import cross_entropy_rows_

    return Rows(cross_entropy_rows_)


def _logits_per_chunk(device: torch.device, dtype: torch.dtype, rows: Rows, limits: Limits) -> int:
    allowed = limits.max_logits_bytes or _default_logits_bytes(device)
    return allowed // (dtype.itemsize + rows.wide_copies * accumulation_dtype(dtype).itemsize)


@lru_cache(maxsize=64)
def _default_logits_bytes(device: torch.device) -> int:
    memory = probe(device).device.total_memory
    if memory <= 0:
        return _UNKNOWN_MEMORY_BYTES
    return min(_MOST_LOGITS_BYTES, max(_LEAST_LOGITS_BYTES, memory // _PART_OF_MEMORY))


def _checked(targets: torch.Tensor, vocab_size: int, options: RowOptions, limits: Limits) -> int | None:
    """How many targets are not ignored at most, if the host knows: on a CPU it counts, and looks at what they are."""
    on_cpu = targets.device.type == "cpu"
    if on_cpu or limits.check_targets:
        given = targets[targets != options.ignore_index]
        if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < vocab_size:
            raise KernelInputError(
                f"linear_cross_entropy: targets from {int(given.min())} to {int(given.max())}, but weight has "
                f"{vocab_size} rows; a token without a target has ignore_index={options.ignore_index}"
            )
        if limits.num_valid is not None and given.numel() > limits.num_valid:
            raise KernelInputError(
                f"linear_cross_entropy: num_valid={limits.num_valid}, but {given.numel()} targets are not ignored; "
                "count them after they are shifted"
            )
        return given.numel()
    return limits.num_valid


def _with_divisor_near(reduction: Reduction, device: torch.device) -> Reduction:
    divisor = reduction.divisor
    if not isinstance(divisor, torch.Tensor):
        return reduction
    if divisor.numel() != 1:
        raise KernelInputError(
            f"linear_cross_entropy: num_items_in_batch has shape {list(divisor.shape)}; give one number"
        )
    divisor = divisor.detach().reshape(())
    # One on the CPU can stay: torch takes it along as a number.
    return reduction._replace(divisor=divisor if divisor.device.type == "cpu" else divisor.to(device))


def _check_options(options: RowOptions, reduction: Reduction, limits: Limits) -> None:
    if reduction.kind not in REDUCTIONS:
        raise UnsupportedOptionError(
            f"linear_cross_entropy: unknown reduction {reduction.kind!r}; choose one of {', '.join(REDUCTIONS)}"
        )
    if reduction.divisor is not None and reduction.kind == "none":
        raise UnsupportedOptionError(
            "linear_cross_entropy: num_items_in_batch divides a sum, which reduction='none' does not make"
        )
    for name, value, fits, range_ in (
        ("softcap", options.softcap, options.softcap >= 0, "positive, or 0 or None for none"),
        ("temperature", options.temperature, options.temperature > 0, "positive"),
        ("label_smoothing", options.label_smoothing, 0 <= options.label_smoothing <= 1, "from 0 to 1"),
        ("z_loss", options.z_loss, options.z_loss >= 0, "0 or positive"),
        ("num_valid", limits.num_valid, limits.num_valid is None or limits.num_valid >= 0, "0 or positive"),
        ("max_logits_bytes", limits.max_logits_bytes, limits.max_logits_bytes is None or limits.max_logits_bytes > 0,
         "positive"),
    ):  # fmt: skip
        if not fits:
            raise UnsupportedOptionError(f"linear_cross_entropy: {name}={value}, but it has to be {range_}")


def _check_tensors(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> None:
    if hidden.ndim == 0 or hidden.shape[:-1] != targets.shape:
        raise KernelInputError(
            f"linear_cross_entropy: hidden {list(hidden.shape)} and targets {list(targets.shape)} do not fit; they "
            "have to be [..., H] and [...]"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise KernelInputError(
            f"linear_cross_entropy: weight has shape {list(weight.shape)}, but hidden {list(hidden.shape)} needs "
            f"[V, {hidden.shape[-1]}]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise KernelInputError(
            f"linear_cross_entropy: bias has shape {list(bias.shape)}, but weight {list(weight.shape)} needs "
            f"[{weight.shape[0]}]"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise KernelInputError(f"linear_cross_entropy: targets have dtype {targets.dtype}; give them int64")
    for name, tensor in (("weight", weight), ("bias", bias), ("targets", targets)):
        if tensor is not None and tensor.device != hidden.device:
            raise KernelInputError(
                f"linear_cross_entropy: hidden is on {hidden.device}, {name} on {tensor.device}; move one of them"
            )


def _compute_dtype(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    kind, dtype = hidden.device.type, hidden.dtype
    if dtype not in _DTYPES:
        raise KernelInputError(f"linear_cross_entropy: hidden has dtype {dtype}; give it fp16, bf16, fp32 or fp64")
    # Asked like this for Dynamo of torch 2.11, which does not know is_autocast_available.
    autocast = kind != "meta" and torch.is_autocast_enabled(kind) and dtype in AUTOCAST_DTYPES
    allowed = AUTOCAST_DTYPES if autocast else (dtype,)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in allowed:
            hint = "fp64 cannot be mixed with autocast" if autocast else "use autocast, or cast one of them"
            raise KernelInputError(f"linear_cross_entropy: hidden has dtype {dtype}, {name} {tensor.dtype}; {hint}")
    return torch.get_autocast_dtype(kind) if autocast else dtype
