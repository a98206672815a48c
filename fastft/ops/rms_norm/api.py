"""The public RMSNorm, alone and after an addition: checks, and the choice between Triton kernels and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from ...capability import GPUCapability, Verdict, probe
from ...errors import KernelInputError, UnsupportedOptionError
from ..selection import AUTO, select, verdict_in_fp32
from . import reference

ROUNDINGS = ("llama", "fp32_weight", "gemma")
# The kernels hold whole rows. The backward keeps x, dy, weight and the sum of dweight of a row in registers: at 16384
# they take the whole register file (ptxas: 128 registers for each of 512 threads, 112 bytes spilled).
TRITON_MAX_HIDDEN_SIZE = 16384

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Implementation = Callable[[torch.Tensor, torch.Tensor | None, float, str], torch.Tensor]
_AddImplementation = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, float, str], tuple[torch.Tensor, torch.Tensor]
]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, rounding: str = "llama", impl: str = AUTO
) -> torch.Tensor:
    """Normalise the last dimension of x by its root mean square, then scale it by a weight.

        x_hat = x / sqrt(mean(x^2) + eps)      in fp32
        llama:        weight * round(x_hat)            (Llama, Qwen, Mistral, Phi, GLM, ...)
        fp32_weight:  round(weight * x_hat)            (gpt-oss, OLMo2, OLMo3, Nemotron-H)
        gemma:        round((1 + weight) * x_hat)      (Gemma, Qwen3-Next)

    where round() is the rounding to x's dtype. Without a weight every order gives round(x_hat). Differentiable in x
    and weight, once; the weight's gradient costs nothing when the weight is frozen. Inputs and incoming gradients are
    never written.

    Args:
        x: [..., H], fp16, bf16, fp32 or fp64, any leading shape and strides.
        weight: [H] on x's device, any of those dtypes, or None.
        eps: added to the mean square.
        rounding: where the result is rounded, see above.
        impl: "auto", "triton" or "reference". Under torch.compile "auto" is the reference, for the compiler to fuse.

    Returns:
        [..., H], fresh. Of x's dtype; under llama of the dtype that torch promotes weight and x to.

    Raises:
        KernelInputError: x has no last dimension, or dtypes, devices or the weight's shape do not fit.
        UnsupportedOptionError: an unknown rounding, or an implementation that cannot run here.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    hidden_size = _check_shapes("rms_norm", x, x.shape, weight)
    weight_dtype = None if weight is None else weight.dtype
    if impl == AUTO and torch.compiler.is_compiling():
        _check_options("rms_norm", rounding, x=x.dtype, weight=weight_dtype)
        return reference.rms_norm(x, weight, eps, rounding)
    implementation = _implementation(x.device, x.dtype, weight_dtype, hidden_size, rounding, impl)
    if x.numel() == 0:  # nothing to launch, and torch knows the gradients of nothing
        implementation = reference.rms_norm
    return implementation(x, weight, eps, rounding)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    rounding: str = "llama",
    impl: str = AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a branch to the residual stream and normalise the sum, in one pass over memory.

        h = round(residual + x)
        y = rms_norm(h, weight, eps)       in one of the rounding orders of `rms_norm`

    bit for bit what `rms_norm` makes of h. Differentiable in x, residual and weight, once: x and residual get one
    gradient, dh + the norm's dx, rounded once. Each of h and y may be left without a gradient. Inputs and incoming
    gradients are never written.

    The kernels take x and residual of one shape and dtype. Under "auto" others are added by torch, which broadcasts and
    promotes, and handed to `rms_norm`; `add_verdicts` says why.

    Args:
        x: [..., H], fp16, bf16, fp32 or fp64, any leading shape and strides.
        residual: like x, of any strides of its own; or of another dtype or shape that torch can add.
        weight: [H] on x's device, any of those dtypes, or None.
        eps: added to the mean square.
        rounding: where the result is rounded, see `rms_norm`.
        impl: "auto", "triton" or "reference". Under torch.compile "auto" is the reference, for the compiler to fuse.

    Returns:
        h and y, both [..., H] and fresh. h of the dtype that torch promotes residual and x to; y of h's dtype, under
        llama of the dtype that torch promotes weight and h to.

    Raises:
        KernelInputError: x has no last dimension, or shapes, dtypes or devices do not fit.
        UnsupportedOptionError: an unknown rounding, or an implementation that cannot run here.
    """
    alike = x.shape == residual.shape
    hidden_size = _check_shapes("add_rms_norm", x, x.shape if alike else _sum_shape(x, residual), weight)
    if residual.device != x.device:
        raise KernelInputError(
            f"add_rms_norm: x is on {x.device}, residual on {residual.device}; move one to the other"
        )
    weight_dtype = None if weight is None else weight.dtype
    if impl == AUTO and torch.compiler.is_compiling():
        _check_options("add_rms_norm", rounding, x=x.dtype, residual=residual.dtype, weight=weight_dtype)
        return reference.add_rms_norm(x, residual, weight, eps, rounding)
    implementation = _add_implementation(
        x.device, x.dtype, residual.dtype, weight_dtype, hidden_size, rounding, impl, alike
    )
    if x.numel() == 0:
        implementation = reference.add_rms_norm
    return implementation(x, residual, weight, eps, rounding)


def verdicts(
    capability: GPUCapability, dtype: torch.dtype, *, hidden_size: int, weight_dtype: torch.dtype | None = None
) -> dict[str, Verdict]:
    """What each implementation says about a case, best first.

    Args:
        capability: of the device that x is on.
        dtype: of x.
        hidden_size: H.
        weight_dtype: of the weight; None if there is none.

    Returns:
        "triton" and "reference" with their verdicts; the reference comes first without a GPU.
    """
    found = {
        "triton": _triton_verdict(capability, (dtype, weight_dtype or dtype), hidden_size),
        "reference": Verdict(True, "plain torch; runs on any device"),
    }
    return found if capability.device.kind != "cpu" else dict(reversed(found.items()))


def add_verdicts(
    capability: GPUCapability,
    dtype: torch.dtype,
    *,
    hidden_size: int,
    residual_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    alike: bool = True,
) -> dict[str, Verdict]:
    """What each implementation of `add_rms_norm` says about a case, best first.

    Args:
        capability: of the device that x is on.
        dtype: of x.
        hidden_size: H.
        residual_dtype: of the residual; x's if not given.
        weight_dtype: of the weight; None if there is none.
        alike: whether x and residual have one shape.

    Returns:
        "triton" and "reference" with their verdicts; the reference comes first without a GPU.
    """
    found = verdicts(capability, dtype, hidden_size=hidden_size, weight_dtype=weight_dtype)
    if residual_dtype not in (dtype, None):
        reason = f"residual is {residual_dtype}, x {dtype}: torch promotes one of them"
    elif not alike:
        reason = "residual and x differ in shape: torch broadcasts them"
    else:
        return found
    return found | {"triton": Verdict(False, reason)}


def _triton_verdict(capability: GPUCapability, dtypes: tuple[torch.dtype, ...], hidden_size: int) -> Verdict:
    if hidden_size > TRITON_MAX_HIDDEN_SIZE:
        return Verdict(False, f"a row of {hidden_size} does not fit one program (at most {TRITON_MAX_HIDDEN_SIZE})")
    return verdict_in_fp32(capability, *dtypes)


@lru_cache(maxsize=256)
def _implementation(
    device: torch.device,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    hidden_size: int,
    rounding: str,
    impl: str,
) -> _Implementation:
    """Everything that is decided once per device, dtypes and size rather than at each of a step's many calls."""
    _check_options("rms_norm", rounding, x=dtype, weight=weight_dtype)
    found = verdicts(probe(device), dtype, hidden_size=hidden_size, weight_dtype=weight_dtype)
    if select("rms_norm", impl, found).impl == "reference":
        return reference.rms_norm
    from .triton import rms_norm as triton_rms_norm

    return triton_rms_norm


@lru_cache(maxsize=256)
def _add_implementation(
    device: torch.device,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    hidden_size: int,
    rounding: str,
    impl: str,
    alike: bool,
) -> _AddImplementation:
    _check_options("add_rms_norm", rounding, x=dtype, residual=residual_dtype, weight=weight_dtype)
    found = add_verdicts(
        probe(device), dtype, hidden_size=hidden_size, residual_dtype=residual_dtype, weight_dtype=weight_dtype,
        alike=alike,
    )  # fmt: skip
    if select("add_rms_norm", impl, found).impl == "reference":
        return _one_by_one if impl == AUTO else reference.add_rms_norm
    from .triton import add_rms_norm as triton_add_rms_norm

    return triton_add_rms_norm


def _one_by_one(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm alone may have a kernel."""
    h = residual + x
    return h, rms_norm(h, weight, eps, rounding=rounding)


def _sum_shape(x: torch.Tensor, residual: torch.Tensor) -> torch.Size:
    try:
        return torch.broadcast_shapes(x.shape, residual.shape)
    except RuntimeError as error:
        raise KernelInputError(
            f"add_rms_norm: residual {list(residual.shape)} cannot be added to x {list(x.shape)}; give them one shape"
        ) from error


def _check_shapes(op: str, x: torch.Tensor, shape: torch.Size, weight: torch.Tensor | None) -> int:
    """The size of the dimension to normalise, the last one of `shape`."""
    if not shape:
        raise KernelInputError(f"{op}: x has no dimension to normalise; give it the shape [..., H]")
    hidden_size = shape[-1]
    if weight is not None:
        if weight.ndim != 1 or weight.shape[0] != hidden_size:
            raise KernelInputError(
                f"{op}: weight has shape {list(weight.shape)}, but x {list(x.shape)} needs [{hidden_size}]; "
                "x's last dimension has to be the normalised one"
            )
        if weight.device != x.device:
            raise KernelInputError(f"{op}: x is on {x.device}, weight on {weight.device}; move one to the other")
    return hidden_size


def _check_options(op: str, rounding: str, **dtypes: torch.dtype | None) -> None:
    if rounding not in ROUNDINGS:
        raise UnsupportedOptionError(f"{op}: unknown rounding {rounding!r}; choose one of {', '.join(ROUNDINGS)}")
    for name, given in dtypes.items():
        if given is not None and given not in _DTYPES:
            raise KernelInputError(f"{op}: {name} has dtype {given}; give it fp16, bf16, fp32 or fp64")
