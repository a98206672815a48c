"""Launches the kernels: strides, index width, allocations.

q and k come in any shape that the public function takes. Their heads and tokens are found in sizes and strides: no view
is made, and results are allocated in the shape given.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..launching import Launcher, sm_count
from ..layouts import Layout, layout_of, needs_long_indexing, of_equal_strides, reach
from .specialise import BACKWARD, FORWARD, Heads, Kind, specialise
from .triton import qk_norm_rope_bwd_kernel, qk_norm_rope_fwd_kernel

# Warps that stay resident on one multiprocessor while programs walk the tokens to sum a weight's gradient. More of them
# would queue behind the others, each having a fixed share of the tokens.
RESIDENT_WARPS = 16

_launch_fwd, _launch_bwd = Launcher(qk_norm_rope_fwd_kernel), Launcher(qk_norm_rope_bwd_kernel)


class LaunchPlan(NamedTuple):
    """All that a launch needs besides pointers and eps."""

    num_blocks: int
    tokens: tuple[int, int]  # all of them, and in a row of the batch
    strides: tuple[int, ...]  # in the kernel's order
    constants: dict[str, Any]


class Side(NamedTuple):
    """The backward of q or of k: what arrives, what was saved, what is wanted."""

    dout: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    rstd: torch.Tensor
    needs_dx: bool
    needs_dweight: bool


Gradients = tuple[torch.Tensor | None, torch.Tensor | None]  # of x and of the weight


def launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_dim: int | None,
    eps: float,
    kind: Kind,
    *,
    long_indexing: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k, normalised and rotated, contiguous, and their rstd, flat. There is at least one token.

    Args:
        long_indexing: for tests; chosen from the reach of every tensor by default.
    """
    cos, sin = of_equal_strides(cos, sin)
    q_heads, k_heads = _heads(q, head_dim), _heads(k, head_dim)
    plan = plan_forward(layout_of(cos), q_heads, k_heads, kind, long_indexing)
    q_out, q_rstd = _empty_results(q, q_heads, q_weight, kind)
    k_out, k_rstd = _empty_results(k, k_heads, k_weight, kind)
    _launch_fwd(
        plan.num_blocks,
        (cos, sin, q, q_weight.contiguous(), q_out, q_rstd, k, k_weight.contiguous(), k_out, k_rstd),
        (*plan.tokens, eps, *plan.strides), plan.constants,
    )  # fmt: skip
    return q_out, k_out, q_rstd, k_rstd


def launch_backward(
    q: Side | None,
    k: Side | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_dim: int | None,
    kind: Kind,
    *,
    long_indexing: bool | None = None,
) -> tuple[Gradients, Gradients]:
    """Gradients of q and its weight, and of k and its weight, each None where it is not needed.

    Args:
        q, k: None if nothing of it is needed; one of them is.
    """
    cos, sin = of_equal_strides(cos, sin)
    layouts = [
        (None, None) if side is None else (_heads(side.dout, head_dim), _heads(side.x, head_dim)) for side in (q, k)
    ]
    plan = plan_backward(layout_of(cos), *layouts[0], *layouts[1], kind, long_indexing)
    programs = plan.num_blocks
    if any(side is not None and side.needs_dweight for side in (q, k)):
        programs = min(programs, sm_count(cos.device) * max(1, RESIDENT_WARPS // plan.constants["num_warps"]))
    pointers, results = [], []
    for side in (q, k):
        dx, partials = (None, None) if side is None else _empty_gradients(side, programs)
        results.append((side, dx, partials))
        inputs = (None,) * 4 if side is None else (side.dout, side.x, side.weight.contiguous(), side.rstd)
        pointers += [*inputs, dx, partials]
    _launch_bwd(programs, (cos, sin, *pointers), (*plan.tokens, *plan.strides), plan.constants)
    of_q, of_k = ((dx, _sum_partials(side, partials)) for side, dx, partials in results)
    return of_q, of_k


def _empty_results(
    x: torch.Tensor, heads: Layout, weight: torch.Tensor, kind: Kind
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(weight.dtype, x.dtype) if kind.rounding == "llama" else x.dtype
    batch, length, num_heads, _ = heads[0]
    rows = batch * length * (1 if kind.whole_width else num_heads)
    return torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(rows, dtype=torch.float32, device=x.device)


def _empty_gradients(side: Side, programs: int) -> Gradients:
    x, weight = side.x, side.weight
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if side.needs_dx else None
    if not side.needs_dweight:
        return dx, None
    return dx, torch.empty((programs, weight.shape[0]), dtype=torch.float32, device=x.device)


def _sum_partials(side: Side | None, partials: torch.Tensor | None) -> torch.Tensor | None:
    return None if side is None or partials is None else partials.sum(0).to(side.weight.dtype)


# ------------------------------------------------------------------------------------------------ plans


@lru_cache(maxsize=256)
def plan_forward(angles: Layout, q: Layout, k: Layout, kind: Kind, long_indexing: bool | None = None) -> LaunchPlan:
    """Work out a launch from sizes and strides alone. All layers of a step share one plan, hence the cache."""
    batch, length, num_q_heads, head_dim = q[0]
    num_k_heads, half = k[0][2], angles[0][-1]
    if long_indexing is None:
        long_indexing = needs_long_indexing(*_reaches((angles, q, k)))
    constants = specialise(Heads(num_q_heads, num_k_heads, head_dim, half), kind, long_indexing, FORWARD)
    return _plan(batch, length, angles, (q, k), constants)


@lru_cache(maxsize=256)
def plan_backward(
    angles: Layout,
    dq_out: Layout | None,
    q: Layout | None,
    dk_out: Layout | None,
    k: Layout | None,
    kind: Kind,
    long_indexing: bool | None = None,
) -> LaunchPlan:
    """As `plan_forward`, for q, for k, or for both."""
    present = q or k
    assert present is not None
    batch, length, _, head_dim = present[0]
    num_q_heads, num_k_heads = (0 if x is None else x[0][2] for x in (q, k))
    layouts = (dq_out, q, dk_out, k)
    if long_indexing is None:
        long_indexing = needs_long_indexing(*_reaches((angles, *layouts)))
    constants = specialise(Heads(num_q_heads, num_k_heads, head_dim, angles[0][-1]), kind, long_indexing, BACKWARD)
    return _plan(batch, length, angles, layouts, constants)


def _plan(
    batch: int, length: int, angles: Layout, layouts: tuple[Layout | None, ...], constants: dict[str, Any]
) -> LaunchPlan:
    # Angles without a batch serve every row of it, as those with a batch of one do.
    strides = [0] * (3 - len(angles[0])) + _effective_strides(*angles)
    for layout in layouts:
        strides += [0] * 4 if layout is None else _effective_strides(*layout)
    num_tokens = batch * length
    return LaunchPlan(-(-num_tokens // constants["BLOCK_T"]), (num_tokens, length), tuple(strides), constants)


def _effective_strides(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Zero where a dimension has one element, whatever its stride, which is what broadcasting it takes."""
    return [stride if size > 1 else 0 for size, stride in zip(sizes, strides, strict=True)]


def _reaches(layouts: tuple[Layout | None, ...]) -> list[int]:
    """The largest offset into each tensor, or into a contiguous result of its size."""
    return [max(reach(*layout), math.prod(layout[0]) - 1) for layout in layouts if layout is not None]


def _heads(x: torch.Tensor, head_dim: int | None) -> Layout:
    """x seen as [B, L, H, D]; with `head_dim` its last dimension is all heads."""
    sizes, strides = layout_of(x)
    if head_dim is not None:
        sizes = (*sizes[:-1], sizes[-1] // head_dim, head_dim)
        strides = (*strides[:-1], strides[-1] * head_dim, strides[-1])
    return (sizes, strides) if len(sizes) == 4 else ((1, *sizes), (0, *strides))
