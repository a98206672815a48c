"""Gradients of the RoPE kernel. A rotation is linear and its transpose is the inverse rotation, so backward is the
same kernel with the sign of sin turned, and so is double backward.

One Function returns both tensors: one launch forward, one backward. In place it marks both dirty. Autograd refuses that
for two views, and a write it is not told about would go unnoticed by whoever saved the tensor. So for views one launch
writes both, and two nodes with one output each account for it: the first launches and marks q dirty, the second marks k
dirty and launches nothing; backward then takes a launch each. The tensors come as they were produced, [..., H*D]
included: a view made outside would put a CopySlices node, a copy of the whole gradient, into backward.

Incoming gradients are only read, whatever their strides (expanded, transposed, shared): results go to new tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..kept import KeptTensors
from .launch import rotate

Gradients = tuple[torch.Tensor | None, ...]


class Rotation(NamedTuple):
    """How to rotate, apart from the tensors."""

    head_dim: int | None
    interleaved: bool
    inverse: bool = False
    in_place: bool = False

    def reversed(self) -> Rotation:
        """The gradient's: into new tensors, since what arrives is not ours to write."""
        return self._replace(inverse=not self.inverse, in_place=False)


class _RotateQK(torch.autograd.Function):
    """(q, k) -> rotated (q, k); either may be None. In place neither is a view, and both require a gradient or none."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor | None,
        rotation: Rotation,
    ) -> Gradients:
        _save(ctx, cos, sin, position_ids, rotation)
        if rotation.in_place:
            ctx.mark_dirty(q, k)
        return _rotate_present(q, k, cos, sin, position_ids, rotation)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Gradients:
        dq, dk = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))
        return (*_backward(ctx, dq, dk), None, None, None, None)


class _RotateBothMarkQ(torch.autograd.Function):
    """Rotates q and k in place; the node of q. It sees k detached, so that no edge leads to k from here."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor | None,
        rotation: Rotation,
    ) -> torch.Tensor:
        _save(ctx, cos, sin, position_ids, rotation)
        rotate((q, k), cos, sin, position_ids, **rotation._asdict())
        ctx.mark_dirty(q)
        return q

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        return (_backward(ctx, grad, None)[0], None, None, None, None, None)


class _MarkK(torch.autograd.Function):
    """The node of k, which `_RotateBothMarkQ` has already rotated."""

    @staticmethod
    def forward(
        ctx: Any,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor | None,
        rotation: Rotation,
    ) -> torch.Tensor:
        _save(ctx, cos, sin, position_ids, rotation)
        ctx.mark_dirty(k)
        return k

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        return (_backward(ctx, grad, None)[0], None, None, None, None)


def rotate_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    head_dim: int | None,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate into new tensors; arguments are those of `rope_qk`, already checked."""
    return _RotateQK.apply(q, k, cos, sin, position_ids, Rotation(head_dim, interleaved))


def rotate_qk_(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    head_dim: int | None,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k themselves; arguments are those of `rope_qk_`, already checked."""
    rotation = Rotation(head_dim, interleaved, in_place=True)
    if not q._is_view() and not k._is_view() and q.requires_grad == k.requires_grad:
        return _RotateQK.apply(q, k, cos, sin, position_ids, rotation)
    q = _RotateBothMarkQ.apply(q, k.detach(), cos, sin, position_ids, rotation)
    return q, _MarkK.apply(k, cos, sin, position_ids, rotation)


def _save(
    ctx: Any, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None, rotation: Rotation
) -> None:
    ctx.set_materialize_grads(False)
    ctx.angles = KeptTensors((cos, sin, position_ids))
    ctx.rotation = rotation


def _backward(ctx: Any, dq: torch.Tensor | None, dk: torch.Tensor | None) -> Gradients:
    if dq is None and dk is None:
        return None, None
    cos, sin, position_ids = ctx.angles.unchanged()
    inverse = ctx.rotation.reversed()
    if torch.is_grad_enabled():  # create_graph=True: the gradient is differentiated again
        return _RotateQK.apply(dq, dk, cos, sin, position_ids, inverse)
    return _rotate_present(dq, dk, cos, sin, position_ids, inverse)


def _rotate_present(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    rotation: Rotation,
) -> Gradients:
    present = [x for x in (q, k) if x is not None]
    rotated = iter(rotate(present, cos, sin, position_ids, **rotation._asdict()))
    return tuple(None if x is None else next(rotated) for x in (q, k))
