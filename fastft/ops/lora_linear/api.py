"""The public LoRA linear layer: checks, the dtype to compute in, and the choice of implementation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ...capability import GPUCapability, Verdict, probe
from ...errors import KernelInputError
from ..adapter_casts import AdapterCasts
from ..products import AUTOCAST_DTYPES
from ..selection import AUTO, select
from . import autograd, reference

_DTYPES = AUTOCAST_DTYPES | {torch.float64}


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    scaling: float,
    *,
    impl: str = AUTO,
) -> torch.Tensor:
    """A linear layer plus a scaled low-rank update.

        y = x W^T + b + scaling (x A^T) B^T

    Computed in autocast's dtype where autocast is on for x's device (fp64 excepted, which autocast leaves alone), as
    F.linear is, and otherwise in the one dtype that everything shares. Differentiable in all five tensors, once by the
    fused implementation; a frozen tensor's gradient costs nothing, and each gradient has its tensor's own dtype.
    Kept for backward are x and the weights by reference, x A^T, and A and B in the dtype computed in. Inputs and
    incoming gradients are never written.

    Args:
        x: [..., K], fp16, bf16, fp32 or fp64, any leading shape and strides.
        weight: W, [N, K].
        bias: b, [N], or None.
        lora_A: A, [r, K].
        lora_B: B, [N, r].
        scaling: of the update, a Python number.
        impl: "auto", "fused" or "reference". Under torch.compile "auto" is the reference, for the compiler to fuse.

    Returns:
        [..., N], fresh, of the dtype computed in.

    Raises:
        KernelInputError: shapes, dtypes or devices do not fit.
        UnsupportedOptionError: an unknown implementation.

    Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
    """
    return lora_linear_group(x, (weight,), (bias,), (lora_A,), (lora_B,), (scaling,), impl=impl)[0]


def lora_linear_group(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    lora_As: Sequence[torch.Tensor],
    lora_Bs: Sequence[torch.Tensor],
    scalings: Sequence[float],
    *,
    casts: AdapterCasts | None = None,
    impl: str = AUTO,
) -> tuple[torch.Tensor, ...]:
    """Several linear layers of the same input, each plus its own scaled low-rank update.

        y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T

    Each y_i is what `lora_linear` gives, in memory of its own; together they take fewer launches, and backward makes
    the sum over i in x's gradient on the way. Outputs that are never used cost no backward.

    Args:
        x: [..., K], fp16, bf16, fp32 or fp64, any leading shape and strides.
        weights: W_i, [N_i, K].
        biases: b_i, [N_i], or None.
        lora_As: A_i, [r_i, K].
        lora_Bs: B_i, [N_i, r_i].
        scalings: s_i, Python numbers.
        casts: where copies of A and B in the dtype computed in stay for the recomputation of a checkpointed forward.
        impl: "auto", "fused" or "reference". Under torch.compile "auto" is the reference, for the compiler to fuse.

    Returns:
        One [..., N_i] per layer, fresh, of the dtype computed in.

    Raises:
        KernelInputError: numbers of arguments, shapes, dtypes or devices do not fit.
        UnsupportedOptionError: an unknown implementation.

    Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
    """
    lengths = [len(items) for items in (weights, biases, lora_As, lora_Bs, scalings)]
    if lengths[0] == 0 or lengths.count(lengths[0]) != 5:
        raise KernelInputError(
            f"lora_linear_group: got {lengths} weights, biases, lora_As, lora_Bs and scalings; give as many of each, "
            "and at least one"
        )
    layers = tuple(zip(weights, biases, lora_As, lora_Bs, scalings, strict=True))
    for weight, bias, lora_A, lora_B, _ in layers:
        _check_shapes(x, weight, bias, lora_A, lora_B)
        dtype = _compute_dtype(x, weight, bias, lora_A, lora_B)
    compiling = impl == AUTO and torch.compiler.is_compiling()
    # Nothing to multiply, and torch knows the gradients of nothing.
    if compiling or _implementation(x.device, dtype, impl) == "reference" or x.numel() == 0:
        return tuple(reference.lora_linear(x, *layer) for layer in layers)
    return autograd.lora_linear_group(x, weights, biases, lora_As, lora_Bs, scalings, dtype, casts)


def verdicts(capability: GPUCapability, dtype: torch.dtype) -> dict[str, Verdict]:
    """What each implementation says about a case, best first.

    Args:
        capability: of the device that x is on.
        dtype: the one to compute in.

    Returns:
        "fused" and "reference" with their verdicts.
    """
    del capability, dtype  # what torch can multiply, both can
    return {
        "fused": Verdict(True, "only GEMMs of torch; runs on any device"),
        "reference": Verdict(True, "plain torch; runs on any device"),
    }


@lru_cache(maxsize=256)
def _implementation(device: torch.device, dtype: torch.dtype, impl: str) -> str:
    return select("lora_linear", impl, verdicts(probe(device), dtype)).impl


def _check_shapes(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
) -> None:
    if x.ndim == 0 or weight.ndim != 2 or lora_A.ndim != 2:
        raise KernelInputError(
            f"lora_linear: x {list(x.shape)}, weight {list(weight.shape)} and lora_A {list(lora_A.shape)} need the "
            "shapes [..., K], [N, K] and [r, K]"
        )
    (out_features, in_features), rank = weight.shape, lora_A.shape[0]
    expected = (
        ("x", x, (*x.shape[:-1], in_features)),
        ("lora_A", lora_A, (rank, in_features)),
        ("lora_B", lora_B, (out_features, rank)),
        ("bias", bias, (out_features,)),
    )
    for name, tensor, shape in expected:
        if tensor is not None and tensor.shape != shape:
            raise KernelInputError(
                f"lora_linear: {name} has shape {list(tensor.shape)}, but weight {list(weight.shape)} and lora_A "
                f"{list(lora_A.shape)} need {list(shape)}"
            )


def _compute_dtype(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
) -> torch.dtype:
    device, dtype = x.device, x.dtype
    kind = device.type
    autocast = dtype in AUTOCAST_DTYPES and torch.is_autocast_enabled(kind)
    allowed = AUTOCAST_DTYPES if autocast else (dtype,)
    if dtype not in _DTYPES:
        raise KernelInputError(f"lora_linear: x has dtype {dtype}; give it fp16, bf16, fp32 or fp64")
    for name, tensor in (("weight", weight), ("bias", bias), ("lora_A", lora_A), ("lora_B", lora_B)):
        if tensor is None:
            continue
        if tensor.device != device:
            raise KernelInputError(f"lora_linear: x is on {device}, {name} on {tensor.device}; move one to the other")
        if tensor.dtype not in allowed:
            hint = "fp64 cannot be mixed with autocast" if autocast else "use autocast, or cast one of them"
            raise KernelInputError(f"lora_linear: x has dtype {dtype}, {name} {tensor.dtype}; {hint}")
    return torch.get_autocast_dtype(kind) if autocast else dtype
