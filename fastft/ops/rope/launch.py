"""Launches the RoPE kernel: folded strides, index width.

A launch takes q and k, or only one of them (a gradient that is None costs nothing), in place or into new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..launching import Launcher
from ..layouts import Layout, layout_of, needs_long_indexing, of_equal_strides, reach
from .geometry import fold_tokens, head_view, token_strides
from .triton import Tile, rope_kernel, specialise

_launch = Launcher(rope_kernel)


class LaunchPlan(NamedTuple):
    """All that a launch needs besides pointers."""

    programs: int
    integers: tuple[int, ...]  # sizes and strides, in the kernel's order
    constexprs: dict[str, Any]


@lru_cache(maxsize=256)
def plan_launch(
    tensors: tuple[Layout, ...],
    angles: Layout,
    positions: Layout | None,
    *,
    head_dim: int | None,
    interleaved: bool,
    inverse: bool,
    in_place: bool,
    tile: Tile | None = None,
    long_indexing: bool | None = None,
) -> LaunchPlan:
    """Work out a launch from sizes and strides alone. All layers of a step share one plan, hence the cache.

    Args:
        tensors: layouts of q and k, or of one of them.
        angles: layout of cos, and of sin.
        positions: layout of position_ids, or None.
        tile, long_indexing: chosen here if None.
    """
    views = [head_view(layout, head_dim) for layout in tensors]
    size = (views[0].batch, views[0].length)
    (*angle_sizes, half), (*angle_strides, angle_dim) = angles
    # What varies from token to token besides q and k: the positions if there are any, and the angles otherwise.
    per_token = token_strides(*positions) if positions is not None else token_strides(angle_sizes, angle_strides)
    if long_indexing is None:
        long_indexing = needs_long_indexing(
            *(view.reach() for view in views), *(view.numel() - 1 for view in views), reach(size, per_token),
            reach(*angles),
        )  # fmt: skip
    batch, length, (*tokens, per_token) = fold_tokens(*size, [*(view.tokens for view in views), per_token])
    num_k_heads = views[1].heads if len(views) > 1 else 0
    constexprs = specialise(
        views[0].heads, num_k_heads, views[0].head_dim, half, tile, INTERLEAVED=interleaved, INVERSE=inverse,
        GATHER=positions is not None, IN_PLACE=in_place, LONG_INDEXING=long_indexing,
    )  # fmt: skip
    strides = [(*along, view.head, view.dim) for along, view in zip(tokens, views, strict=True)]
    q_strides, k_strides = strides if num_k_heads else (strides[0], (0, 0, 0, 0))
    angle_tokens, position_tokens = (per_token, (0, 0)) if positions is None else ((0, angle_strides[0]), per_token)
    return LaunchPlan(
        batch * -(-length // constexprs["BLOCK_T"]),
        (length, angle_sizes[0], *q_strides, *k_strides, *angle_tokens, angle_dim, *position_tokens),
        constexprs,
    )


def rotate(
    tensors: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    *,
    head_dim: int | None,
    interleaved: bool,
    inverse: bool = False,
    in_place: bool = False,
    tile: Tile | None = None,
    long_indexing: bool | None = None,
) -> list[torch.Tensor]:
    """One launch that rotates q and k, or only one of them; arguments are those of `rope_qk`, already checked.

    Args:
        tensors: (q, k), or one tensor.
        inverse: rotate backwards, which is the gradient.
        in_place: write the tensors themselves; otherwise contiguous new ones.
        tile: for benchmarks; chosen from the shape by default.
        long_indexing: for tests; chosen from the reach of every tensor by default.

    Returns:
        The rotated tensors; those given when in place.
    """
    outs = list(tensors) if in_place else [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    if not any(x.numel() for x in tensors):
        return outs
    cos, sin = of_equal_strides(cos, sin)
    plan = plan_launch(
        tuple(map(layout_of, tensors)), layout_of(cos), None if position_ids is None else layout_of(position_ids),
        head_dim=head_dim, interleaved=interleaved, inverse=inverse, in_place=in_place,
        tile=tile, long_indexing=long_indexing,
    )  # fmt: skip
    q, k, q_out, k_out = (*tensors, *outs) if len(tensors) > 1 else (tensors[0], None, outs[0], None)
    _launch(plan.programs, (q, k, q_out, k_out, cos, sin, position_ids), plan.integers, plan.constexprs)
    return outs
