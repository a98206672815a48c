"""Where the elements of tensors lie: sizes and strides as plain integers, no tensor is touched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

INT32_MAX = 2**31 - 1

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides of a tensor


def layout_of(x: torch.Tensor) -> Layout:
    """Sizes and strides, hashable."""
    return x.shape, x.stride()


def reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The largest offset that `sizes` and `strides` lead to, in elements."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size > 1)


def needs_long_indexing(*reaches: int) -> bool:
    """Whether any offset is past what int32 holds, so that the kernel has to compute offsets in int64."""
    return max(reaches) > INT32_MAX


def of_equal_strides(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels walk both with one set of strides; only a caller who lays them out differently pays for this."""
    if cos.stride() == sin.stride():
        return cos, sin
    return cos.clone(memory_format=torch.contiguous_format), sin.clone(memory_format=torch.contiguous_format)
