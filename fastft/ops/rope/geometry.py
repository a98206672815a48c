"""Where the elements of q, k and the angles lie, see also `fastft.ops.layouts`: plain integers, no tensor is touched.

The kernel sees tokens as [batch, length]. Whenever every tensor allows it the two are folded into one axis, which is
the packed case and all contiguous ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..layouts import Layout, reach

Strides = tuple[int, int]  # of the batch and of the length axis, in elements


class HeadView(NamedTuple):
    """q or k seen as [batch, length, heads, head_dim], without making the view."""

    batch: int
    length: int
    heads: int
    head_dim: int
    tokens: Strides
    head: int  # stride of the heads, in elements
    dim: int  # stride within a head, in elements

    def numel(self) -> int:
        return self.batch * self.length * self.heads * self.head_dim

    def reach(self) -> int:
        """The largest offset of an element from the first one, in elements."""
        return reach((self.batch, self.length, self.heads, self.head_dim), (*self.tokens, self.head, self.dim))


def head_view(layout: Layout, head_dim: int | None) -> HeadView:
    """See x [T, H, D] or [B, L, H, D] (or, with `head_dim`, [T, H*D] or [B, L, H*D]) as [batch, length, H, D]."""
    shape, stride = layout
    if head_dim is None:
        heads, head_dim, head_stride, dim_stride = shape[-2], shape[-1], stride[-2], stride[-1]
        leading = len(shape) - 2
    else:
        heads, head_stride, dim_stride = shape[-1] // head_dim, stride[-1] * head_dim, stride[-1]
        leading = len(shape) - 1
    if leading == 1:
        return HeadView(1, shape[0], heads, head_dim, (0, stride[0]), head_stride, dim_stride)
    return HeadView(shape[0], shape[1], heads, head_dim, (stride[0], stride[1]), head_stride, dim_stride)


def token_strides(sizes: Sequence[int], strides: Sequence[int]) -> Strides:
    """Strides of what broadcasts against the tokens ([length] or [batch, length]); 0 where one value serves all."""
    length_stride = strides[-1] if sizes[-1] != 1 else 0
    batch_stride = strides[-2] if len(sizes) > 1 and sizes[-2] != 1 else 0
    return batch_stride, length_stride


def fold_tokens(batch: int, length: int, strides: Sequence[Strides]) -> tuple[int, int, list[Strides]]:
    """Merge batch and length into one axis if every tensor's strides allow it."""
    if batch == 1:
        return 1, length, [(0, along_length) for _, along_length in strides]
    if length == 1:
        return 1, batch, [(0, along_batch) for along_batch, _ in strides]
    if all(along_batch == along_length * length for along_batch, along_length in strides):
        return 1, batch * length, [(0, along_length) for _, along_length in strides]
    return batch, length, list(strides)


def align_angles(angles: torch.Tensor, token_dims: Sequence[int]) -> torch.Tensor:
    """Drop leading dimensions of size one that the tokens do not have, so that angles broadcast against them."""
    surplus = angles.ndim - 1 - len(token_dims)
    return angles if surplus <= 0 else angles.reshape(angles.shape[surplus:])
