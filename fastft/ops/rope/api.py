"""Public functions of the rope op: validation and choice of implementation."""

from __future__ import annotations

from functools import lru_cache

import torch

from ...capability import GPUCapability, Verdict, probe
from ...errors import KernelInputError, UnsupportedOptionError
from ..selection import AUTO, select
from .in_place import refuse_writing
from .reference import rope_qk_reference

LAYOUTS = ("half", "interleaved")
_POSITION_DTYPES = (torch.int64, torch.int32)
_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DTYPES = (*_KERNEL_DTYPES, torch.float64)


def rope_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    head_dim: int | None = None,
    position_ids: torch.Tensor | None = None,
    layout: str = "half",
    impl: str = AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k by the angles of their positions, into new tensors.

        y[a] = x[a] * cos[i] - x[b] * sin[i]        y[b] = x[b] * cos[i] + x[a] * sin[i]        i < R/2
        half: (a, b) = (i, i + R/2)        interleaved: (a, b) = (2i, 2i + 1)        elements from R on pass through

    Computed in fp32 (fp64 stays fp64 under "reference") and rounded once.

    Args:
        q: [T, Hq, D] or [B, L, Hq, D], any strides; with `head_dim`: [T, Hq*D] or [B, L, Hq*D].
        k: the same with Hk heads.
        cos: [T, R/2] or [B or 1, L, R/2], broadcast against the tokens; with `position_ids` a table [P, R/2]. Any
            floating dtype and strides. No gradient flows to it. R <= D.
        sin: as cos.
        head_dim: D, if the heads are not a dimension of their own.
        position_ids: [T] or [B or 1, L] rows of the table (int64 or int32). On a GPU a position outside the table
            turns its token to NaN (checking it would synchronise); on a CPU it raises.
        layout: "half" or "interleaved", which elements form a pair.
        impl: "auto", "triton" or "reference".

    Returns:
        Rotated q and k, of the shapes and dtypes given, contiguous.

    Raises:
        KernelInputError: shapes, dtypes or devices that do not fit together.
        UnsupportedOptionError: an unknown layout, or an implementation that cannot run here.

    Source: Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
    """
    _check(q, k, cos, sin, head_dim, position_ids, layout)
    if _implementation(q, k, impl) == "triton":
        from .autograd import rotate_qk

        return rotate_qk(q, k, cos, sin, position_ids, head_dim, layout == "interleaved")
    return rope_qk_reference(q, k, cos, sin, head_dim=head_dim, position_ids=position_ids, layout=layout)


def rope_qk_(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    head_dim: int | None = None,
    position_ids: torch.Tensor | None = None,
    layout: str = "half",
    impl: str = AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k in place; the caller owns them (`in_place_verdict` tells when that can be known).

    Equation, arguments and errors are those of `rope_qk`. Pass projection outputs as they were produced, with
    `head_dim`, rather than views of them: autograd follows a write to a view with a copy of its base's gradient.

    Returns:
        q and k themselves.

    Raises:
        KernelInputError: also if writing is impossible or wrong whoever owns them: a leaf that requires grad, elements
            or tensors that share memory, views that autograd cannot follow, inference tensors, a dispatch mode.

    Source: Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
    """
    num_token_dims = _check(q, k, cos, sin, head_dim, position_ids, layout)
    refuse_writing(q, k, num_token_dims)
    if _implementation(q, k, impl) == "triton":
        from .autograd import rotate_qk_

        return rotate_qk_(q, k, cos, sin, position_ids, head_dim, layout == "interleaved")
    rotated = rope_qk_reference(q, k, cos, sin, head_dim=head_dim, position_ids=position_ids, layout=layout)
    return q.copy_(rotated[0]), k.copy_(rotated[1])


# ------------------------------------------------------------------------------------------------ choice


def verdicts(capability: GPUCapability, *dtypes: torch.dtype) -> dict[str, Verdict]:
    """What each implementation says about tensors of `dtypes` on a device, best first."""
    triton = next(
        (verdict for verdict in (_triton(capability, dtype) for dtype in dtypes) if not verdict), capability.triton
    )
    reference = Verdict(True, "plain torch, which runs on any device")
    if capability.device.kind == "cpu":
        return {"reference": reference, "triton": triton}
    return {"triton": triton, "reference": reference}


def _triton(capability: GPUCapability, dtype: torch.dtype) -> Verdict:
    if dtype not in _KERNEL_DTYPES:
        return Verdict(False, f"the kernel computes in fp32, too narrow for {str(dtype).removeprefix('torch.')}")
    return capability.triton_for(dtype)


def _implementation(q: torch.Tensor, k: torch.Tensor, impl: str) -> str:
    if impl == AUTO and torch.compiler.is_compiling():
        return "reference"  # the compiler fuses it with what surrounds it, and could not see into the kernel's Function
    return _chosen(q.device, q.dtype, k.dtype, impl)


@lru_cache(maxsize=128)
def _chosen(device: torch.device, q_dtype: torch.dtype, k_dtype: torch.dtype, impl: str) -> str:
    return select("rope", impl, verdicts(probe(device), q_dtype, k_dtype)).impl


# ------------------------------------------------------------------------------------------------ validation


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_dim: int | None,
    position_ids: torch.Tensor | None,
    layout: str,
) -> int:
    """Raise unless the arguments fit together; returns how many dimensions of q count tokens."""
    if layout not in LAYOUTS:
        raise UnsupportedOptionError(f"rope: unknown layout {layout!r}; use 'half' or 'interleaved'")
    _check_kinds(q, k, cos, sin, position_ids)
    tokens, width = _check_heads("q", q, head_dim)
    k_tokens, k_width = _check_heads("k", k, head_dim)
    if tokens != k_tokens:
        raise KernelInputError(
            f"rope: q has tokens {tuple(tokens)} and k {tuple(k_tokens)}; they must be the same tokens "
            f"(q {tuple(q.shape)}, k {tuple(k.shape)}, head_dim={head_dim})"
        )
    if width != k_width:
        raise KernelInputError(f"rope: q has head_dim {width} and k {k_width}; one table of angles needs one width")
    _check_rotary_width(cos, sin, width)
    if position_ids is not None:
        _check_positions(position_ids, cos, tokens)
    else:
        _check_broadcast("cos and sin", cos.shape[:-1], tokens, "or pass a table [P, R/2] together with position_ids")
    return len(tokens)


def _check_kinds(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None
) -> None:
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if x.dtype not in _DTYPES:
            raise KernelInputError(f"rope: {name} is {x.dtype}; rotations need fp32, fp16, bf16 or fp64")
        if x.device != q.device:
            raise KernelInputError(f"rope: q is on {q.device} and {name} on {x.device}; move them to one device")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise KernelInputError("rope: cos or sin requires grad, and this op gives them none; pass cos.detach()")
    if position_ids is not None:
        if position_ids.dtype not in _POSITION_DTYPES:
            raise KernelInputError(f"rope: position_ids are {position_ids.dtype}; use int64 or int32")
        if position_ids.device != q.device:
            raise KernelInputError(f"rope: q is on {q.device} and position_ids on {position_ids.device}; move them")


def _check_heads(name: str, x: torch.Tensor, head_dim: int | None) -> tuple[torch.Size, int]:
    """The token dimensions and the width of a head."""
    if head_dim is None:
        if x.ndim not in (3, 4):
            raise KernelInputError(
                f"rope: {name} has shape {tuple(x.shape)}; without head_dim it must be [T, H, D] or [B, L, H, D]"
            )
        return x.shape[:-2], x.shape[-1]
    if x.ndim not in (2, 3):
        raise KernelInputError(
            f"rope: {name} has shape {tuple(x.shape)}; with head_dim it must be [T, H*D] or [B, L, H*D]"
        )
    if head_dim <= 0 or x.shape[-1] % head_dim:
        raise KernelInputError(f"rope: head_dim {head_dim} does not divide the {x.shape[-1]} features of {name}")
    return x.shape[:-1], head_dim


def _check_rotary_width(cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> None:
    if cos.shape != sin.shape:
        raise KernelInputError(f"rope: cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; they must be equal")
    half = cos.shape[-1] if cos.ndim > 1 else 0
    if not 0 < 2 * half <= head_dim:
        raise KernelInputError(
            f"rope: cos of shape {tuple(cos.shape)} gives {half} angles a token, which rotate {2 * half} elements, and "
            f"head_dim is {head_dim}; pass one angle a pair ([..., R/2] with 0 < R <= head_dim, so for Hugging Face's "
            "doubled table cos[..., : cos.shape[-1] // 2])"
        )


def _check_broadcast(name: str, sizes: torch.Size, tokens: torch.Size, otherwise: str) -> None:
    surplus = len(sizes) - len(tokens)
    aligned = zip(reversed(sizes), reversed(tokens), strict=False)
    fits = all(size in (1, count) for size, count in aligned) and all(size == 1 for size in sizes[: max(0, surplus)])
    if not fits:
        raise KernelInputError(
            f"rope: {name} are for {sizes[-1]} tokens (dimensions {tuple(sizes)}), but q and k have {tokens[-1]} "
            f"(dimensions {tuple(tokens)}); give one row a token, {otherwise}"
        )


def _check_positions(position_ids: torch.Tensor, table: torch.Tensor, tokens: torch.Size) -> None:
    if table.ndim != 2:
        raise KernelInputError(
            f"rope: with position_ids, cos and sin must be tables [P, R/2], not of shape {tuple(table.shape)}"
        )
    if position_ids.ndim == 0:
        raise KernelInputError("rope: position_ids must be [T] or [B or 1, L], not a scalar")
    _check_broadcast("position_ids", position_ids.shape, tokens, "counted within its own sequence")
    # Reading the values of a GPU tensor would synchronise: there the kernel answers with NaN.
    if position_ids.device.type == "cpu" and position_ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(position_ids))
        if low < 0 or high >= table.shape[0]:
            raise KernelInputError(
                f"rope: position_ids run from {low} to {high}, and the table has {table.shape[0]} rows; build the "
                "angles for at least the largest position + 1"
            )
