"""The public gated activation and its projection: checks, the dtype to compute in, and the choice of kernels."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from ...capability import GPUCapability, Verdict, probe
from ...errors import KernelInputError, UnsupportedOptionError
from ..products import AUTOCAST_DTYPES
from ..selection import AUTO, select, verdict_in_fp32
from . import autograd, reference
from .autograd import Kernels, Projection

# SwiGLU, and GeGLU with the exact and with the approximated Gaussian.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_DTYPES = AUTOCAST_DTYPES | {torch.float64}


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str, *, impl: str = AUTO) -> torch.Tensor:
    """The product of an activation and a second half.

        y = act(gate) * up         silu: act(x) = x / (1 + e^-x)
                                   gelu: act(x) = x (1 + erf(x / sqrt(2))) / 2
                                   gelu_tanh: act(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

    The kernels round once, plain torch after each of its steps. Differentiable in both, once; gate and up are saved.
    Inputs and incoming gradients are never written.

    Args:
        gate, up: [..., I] of one shape, dtype (fp16, bf16, fp32 or fp64) and device, any strides.
        activation: "silu", "gelu" or "gelu_tanh".
        impl: "auto", "triton" or "reference". Under torch.compile "auto" is plain torch, for the compiler to fuse.

    Returns:
        [..., I], fresh and contiguous.

    Raises:
        KernelInputError: shapes, dtypes or devices do not fit.
        UnsupportedOptionError: an unknown activation, or an implementation that cannot run here.

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """
    _check_halves(gate, up, activation)
    if (impl == AUTO and torch.compiler.is_compiling()) or gate.numel() == 0:
        return reference.gated_forward(gate, up, activation)
    return autograd.gated(gate, up, activation, kernels_for(gate.device, gate.dtype, impl))


def gated_linear(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    lora_A: torch.Tensor | None = None,
    lora_B: torch.Tensor | None = None,
    scaling: float = 1.0,
    *,
    impl: str = AUTO,
) -> torch.Tensor:
    """A linear layer of `gated(gate, up)`, with a LoRA update or without.

        p = act(gate) * up          y = p W^T + b + scaling (p A^T) B^T

    p is not kept for backward, which makes it again beside the gradients of gate and up. Computed in autocast's dtype
    where autocast is on for the device (fp64 excepted), as F.linear is, and otherwise in the one dtype that everything
    shares. Differentiable in all tensors, once; a frozen tensor's gradient costs nothing, and each gradient has its
    tensor's own dtype. Inputs and incoming gradients are never written.

    Args:
        gate, up, activation: see `gated`.
        weight: W, [N, I].
        bias: b, [N], or None.
        lora_A, lora_B: A [r, I] and B [N, r], or neither.
        scaling: of the update, a Python number.
        impl: who computes the activation, see `gated`.

    Returns:
        [..., N], fresh, of the dtype computed in.

    Raises:
        KernelInputError: shapes, dtypes or devices do not fit.
        UnsupportedOptionError: an unknown activation, or an implementation that cannot run here.

    Sources: Shazeer 2020, https://arxiv.org/abs/2002.05202; Hu et al. 2021, https://arxiv.org/abs/2106.09685.
    """
    _check_halves(gate, up, activation)
    _check_layer(gate, weight, bias, lora_A, lora_B)
    dtype = _compute_dtype(gate, (weight, bias, lora_A, lora_B))
    if (impl == AUTO and torch.compiler.is_compiling()) or gate.numel() == 0:
        product = reference.gated_forward(gate, up, activation)
        y = F.linear(product, weight, bias)
        return y if lora_A is None or lora_B is None else y + F.linear(F.linear(product, lora_A), lora_B) * scaling
    layer = Projection(weight, bias, lora_A, lora_B, scaling)
    return autograd.gated_linear(gate, up, activation, layer, dtype, kernels_for(gate.device, gate.dtype, impl))


def verdicts(capability: GPUCapability, dtype: torch.dtype) -> dict[str, Verdict]:
    """What each implementation says about a case, best first.

    Args:
        capability: of the device that gate is on.
        dtype: of gate.

    Returns:
        "triton" and "reference" with their verdicts; the reference comes first without a GPU.
    """
    triton = verdict_in_fp32(capability, dtype)
    found = {"triton": triton, "reference": Verdict(True, "plain torch; runs on any device")}
    return found if capability.device.kind != "cpu" else dict(reversed(found.items()))


@lru_cache(maxsize=64)
def kernels_for(device: torch.device, dtype: torch.dtype, impl: str) -> Kernels:
    """The kernels of an implementation, decided once for each device and dtype.

    Raises:
        UnsupportedOptionError: it is unknown, or cannot run there.
    """
    if select("gated_mlp", impl, verdicts(probe(device), dtype)).impl == "reference":
        return Kernels(reference.gated_forward, reference.gated_backward)
    from . import triton

    return Kernels(triton.gated_forward, triton.gated_backward)


def _check_halves(gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise UnsupportedOptionError(
            f"gated_mlp: unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}"
        )
    if gate.ndim == 0 or gate.shape != up.shape:
        raise KernelInputError(
            f"gated_mlp: gate {list(gate.shape)} and up {list(up.shape)} have to be of one shape [..., I]"
        )
    if gate.dtype != up.dtype or gate.dtype not in _DTYPES:
        raise KernelInputError(
            f"gated_mlp: gate has dtype {gate.dtype}, up {up.dtype}; give both fp16, bf16, fp32 or fp64"
        )
    if gate.device != up.device:
        raise KernelInputError(f"gated_mlp: gate is on {gate.device}, up on {up.device}; move one to the other")


def _check_layer(
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_A: torch.Tensor | None,
    lora_B: torch.Tensor | None,
) -> None:
    if (lora_A is None) != (lora_B is None):
        raise KernelInputError("gated_mlp: lora_A and lora_B go together; give both or neither")
    size = gate.shape[-1]
    out_features = weight.shape[0] if weight.ndim else 0
    rank = lora_A.shape[0] if lora_A is not None and lora_A.ndim else 0
    names, expected = Projection._fields, ((out_features, size), (out_features,), (rank, size), (out_features, rank))
    for name, tensor, shape in zip(names, (weight, bias, lora_A, lora_B), expected, strict=False):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise KernelInputError(
                f"gated_mlp: {name} has shape {list(tensor.shape)}, but gate {list(gate.shape)} needs {list(shape)}"
            )
        if tensor.device != gate.device:
            raise KernelInputError(f"gated_mlp: gate is on {gate.device}, {name} on {tensor.device}; move one of them")


def _compute_dtype(gate: torch.Tensor, parameters: tuple[torch.Tensor | None, ...]) -> torch.dtype:
    kind, dtype = gate.device.type, gate.dtype
    autocast = dtype in AUTOCAST_DTYPES and torch.is_autocast_enabled(kind)
    allowed = AUTOCAST_DTYPES if autocast else (dtype,)
    for name, tensor in zip(Projection._fields, parameters, strict=False):
        if tensor is not None and tensor.dtype not in allowed:
            hint = "fp64 cannot be mixed with autocast" if autocast else "use autocast, or cast one of them"
            raise KernelInputError(f"gated_mlp: gate has dtype {dtype}, {name} {tensor.dtype}; {hint}")
    return torch.get_autocast_dtype(kind) if autocast else dtype
