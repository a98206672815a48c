"""The public function: validation, and the choice between the Triton kernels and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from ...capability import GPUCapability, Verdict, probe
from ...errors import KernelInputError, UnsupportedOptionError
from ..selection import AUTO, select, verdict_in_fp32
from ..tiles import power_of_two_at_least
from .padding import padded_row
from .reference import qk_norm_rope as reference

LAYOUTS = ("half", "interleaved")
ROUNDINGS = ("llama", "fp32_weight", "gemma")
# What is normalised together has to fit one program, whose backward holds x, dout and the sums of dweight at once.
TRITON_MAX_ROW = 8192

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Implementation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    rounding: str = "llama",
    head_dim: int | None = None,
    layout: str = "half",
    whole_width: bool = False,
    impl: str = AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise q and k by their root mean square, scale them by their weights, and rotate them by their positions.

        x_hat = x / sqrt(mean(x^2) + eps)       over a head, or over all heads of a token with `whole_width`
        llama:  y = weight * round(x_hat)       fp32_weight:  y = weight * x_hat       gemma:  y = (1 + weight) * x_hat
        out[a] = y[a] * cos[i] - y[b] * sin[i]      out[b] = y[b] * cos[i] + y[a] * sin[i]      i < R/2
        half: (a, b) = (i, i + R/2)      interleaved: (a, b) = (2i, 2i + 1)      elements of y from R on are out's

    What `rms_norm` and `rope_qk` give one after the other, computed in fp32, but for one rounding: y is kept in fp32.
    Differentiable in q, k and the weights, once; the gradient of a frozen weight costs nothing. Inputs and incoming
    gradients are never written.

    Args:
        q: [T, Hq, D] or [B, L, Hq, D], any strides; with `head_dim`: [T, Hq*D] or [B, L, Hq*D].
        k: the same with Hk heads.
        q_weight: [D], or [Hq*D] with `whole_width`; any floating dtype.
        k_weight: [D], or [Hk*D] with `whole_width`.
        cos: [T, R/2] or [B or 1, L, R/2], broadcast against the tokens, any floating dtype and strides. No gradient
            flows to it. R <= D.
        sin: as cos.
        eps: added to the mean square of both.
        rounding: the order of rounding in the model's norms, see `rms_norm`.
        head_dim: D, if the heads are not a dimension of their own.
        layout: "half" or "interleaved", which elements form a pair.
        whole_width: normalise all heads of a token together (OLMo2) rather than each by itself (Qwen3, Gemma3).
        impl: "auto", "triton" or "reference". Under torch.compile "auto" is the reference, for the compiler to fuse.

    Returns:
        New q and k, contiguous, of the shapes given. Of their dtypes; under llama of the dtype that torch promotes
        weight and input to.

    Raises:
        KernelInputError: shapes, dtypes or devices that do not fit together.
        UnsupportedOptionError: an unknown rounding or layout, or an implementation that cannot run here.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467; Su et al., RoFormer,
    https://arxiv.org/abs/2104.09864; together: Henry et al. 2020, https://arxiv.org/abs/2010.04245.
    """
    width, heads = _check(q, k, q_weight, k_weight, cos, sin, rounding, head_dim, layout, whole_width)
    if impl == AUTO and torch.compiler.is_compiling():
        implementation = reference
    else:
        dtypes = (q.dtype, k.dtype, q_weight.dtype, k_weight.dtype)
        together = heads if whole_width else 1
        implementation = _implementation(q.device, dtypes, width, 2 * cos.shape[-1], together, impl)
    if q.numel() == 0:  # nothing to launch, and torch knows the gradients of nothing
        implementation = reference
    return implementation(
        q, k, q_weight, k_weight, cos, sin, eps=eps, rounding=rounding, head_dim=head_dim,
        interleaved=layout == "interleaved", whole_width=whole_width,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ choice


def verdicts(
    capability: GPUCapability, *dtypes: torch.dtype, head_dim: int, rotary_dim: int, num_heads: int = 1
) -> dict[str, Verdict]:
    """What each implementation says about a case, best first.

    Args:
        capability: of the device that the tensors are on.
        dtypes: of q, k and the weights.
        head_dim: D.
        rotary_dim: R.
        num_heads: how many heads are normalised together: with `whole_width` those of q or of k, whichever has more.

    Returns:
        "triton" and "reference" with their verdicts; the reference comes first without a GPU. Where the kernels cannot
        hold a row, `rms_norm` and `rope_qk` one after the other are the faster way; their callers decide.
    """
    found = {
        "triton": _triton_verdict(capability, dtypes, head_dim, rotary_dim, num_heads),
        "reference": Verdict(True, "plain torch; runs on any device"),
    }
    return found if capability.device.kind != "cpu" else dict(reversed(found.items()))


def _triton_verdict(
    capability: GPUCapability, dtypes: tuple[torch.dtype, ...], head_dim: int, rotary_dim: int, num_heads: int
) -> Verdict:
    row = power_of_two_at_least(num_heads) * padded_row(head_dim, rotary_dim // 2)
    if row > TRITON_MAX_ROW:
        together = f"{num_heads} heads of {head_dim}" if num_heads > 1 else f"a head of {head_dim}"
        return Verdict(
            False,
            f"{together}, {row} elements when padded to powers of two, do not fit one program (at most "
            f"{TRITON_MAX_ROW}); rms_norm and rope_qk have kernels of their own",
        )
    return verdict_in_fp32(capability, *dtypes)


@lru_cache(maxsize=256)
def _implementation(
    device: torch.device, dtypes: tuple[torch.dtype, ...], head_dim: int, rotary_dim: int, num_heads: int, impl: str
) -> _Implementation:
    """Decided once per device, dtypes and sizes rather than at each of a step's many calls."""
    found = verdicts(probe(device), *dtypes, head_dim=head_dim, rotary_dim=rotary_dim, num_heads=num_heads)
    if select("qk_norm_rope", impl, found).impl == "reference":
        return reference
    from .autograd import normalise_and_rotate

    return normalise_and_rotate


# ------------------------------------------------------------------------------------------------ validation


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rounding: str,
    head_dim: int | None,
    layout: str,
    whole_width: bool,
) -> tuple[int, int]:
    """Raise unless the arguments fit together; returns D and the larger number of heads."""
    if rounding not in ROUNDINGS:
        raise UnsupportedOptionError(
            f"qk_norm_rope: unknown rounding {rounding!r}; choose one of {', '.join(ROUNDINGS)}"
        )
    if layout not in LAYOUTS:
        raise UnsupportedOptionError(f"qk_norm_rope: unknown layout {layout!r}; use 'half' or 'interleaved'")
    named = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    for name, x in named.items():
        if x.dtype not in _DTYPES:
            raise KernelInputError(f"qk_norm_rope: {name} is {x.dtype}; give it fp16, bf16, fp32 or fp64")
        if x.device != q.device:
            raise KernelInputError(
                f"qk_norm_rope: q is on {q.device} and {name} on {x.device}; move them to one device"
            )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise KernelInputError("qk_norm_rope: cos or sin requires grad, and this op gives them none; pass cos.detach()")
    tokens, num_q_heads, q_dim = _check_heads("q", q, head_dim)
    k_tokens, num_k_heads, k_dim = _check_heads("k", k, head_dim)
    if tokens != k_tokens or q_dim != k_dim:
        raise KernelInputError(
            f"qk_norm_rope: q {list(q.shape)} and k {list(k.shape)} (head_dim={head_dim}) have different tokens or "
            "head dimensions; only the number of heads may differ"
        )
    for name, weight, heads in (("q_weight", q_weight, num_q_heads), ("k_weight", k_weight, num_k_heads)):
        width = heads * q_dim if whole_width else q_dim
        if weight.shape != (width,):
            raise KernelInputError(
                f"qk_norm_rope: {name} has shape {list(weight.shape)} and needs [{width}] "
                f"(whole_width={whole_width}, {heads} heads of {q_dim})"
            )
    _check_angles(cos, sin, tokens, q_dim)
    return q_dim, max(num_q_heads, num_k_heads)


def _check_heads(name: str, x: torch.Tensor, head_dim: int | None) -> tuple[torch.Size, int, int]:
    """The token dimensions, the number of heads and their width."""
    if head_dim is None:
        if x.ndim not in (3, 4):
            shape = "without head_dim it must be [T, H, D] or [B, L, H, D]"
            raise KernelInputError(f"qk_norm_rope: {name} has shape {list(x.shape)}; {shape}")
        tokens, heads, head_dim = x.shape[:-2], x.shape[-2], x.shape[-1]
    else:
        if x.ndim not in (2, 3):
            shape = "with head_dim it must be [T, H*D] or [B, L, H*D]"
            raise KernelInputError(f"qk_norm_rope: {name} has shape {list(x.shape)}; {shape}")
        if head_dim <= 0 or x.shape[-1] % head_dim:
            raise KernelInputError(
                f"qk_norm_rope: head_dim {head_dim} does not divide the {x.shape[-1]} features of {name}"
            )
        tokens, heads = x.shape[:-1], x.shape[-1] // head_dim
    if not heads:
        raise KernelInputError(f"qk_norm_rope: {name} {list(x.shape)} has no heads")
    return tokens, heads, head_dim


def _check_angles(cos: torch.Tensor, sin: torch.Tensor, tokens: torch.Size, head_dim: int) -> None:
    if cos.shape != sin.shape or cos.ndim not in (2, 3):
        raise KernelInputError(
            f"qk_norm_rope: cos {list(cos.shape)} and sin {list(sin.shape)} must both be [T, R/2] or [B or 1, L, R/2]"
        )
    half = cos.shape[-1]
    if not 0 < 2 * half <= head_dim:
        raise KernelInputError(
            f"qk_norm_rope: cos {list(cos.shape)} gives {half} angles a token, which rotate {2 * half} elements, and "
            f"head_dim is {head_dim}; pass one angle a pair (0 < R <= head_dim, so for Hugging Face's doubled table "
            "cos[..., : cos.shape[-1] // 2])"
        )
    *leading, length = cos.shape[:-1]
    batch = tokens[0] if len(tokens) == 2 else 1
    if length not in (1, tokens[-1]) or any(size not in (1, batch) for size in leading):
        raise KernelInputError(
            f"qk_norm_rope: cos and sin are for tokens {list(cos.shape[:-1])}, but q and k have {list(tokens)}; give "
            "one row a token"
        )
