"""Matrix products as linear layers with adapters need them, and the forms and dtypes that GEMMs take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .low_rank_update import add_low_rank_

# Autocast casts these, and leaves fp64 alone.
AUTOCAST_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))

# The shape of an output that shares memory with nothing alive. `view` would do, but autograd then refuses to let anyone
# write the output in place: to it, a view made inside a Function is a view of an input that it cannot follow.
_unsafe_view = torch.ops.aten._unsafe_view.default


def in_shape(y: torch.Tensor, lead: Sequence[int]) -> torch.Tensor:
    """The output [T, N] of a Function as [*lead, N]."""
    return y if len(lead) == 1 else _unsafe_view(y, (*lead, y.shape[-1]))


def to_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """tensor.to(dtype), without the call where it would do nothing."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def common_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return dtypes[0] if dtypes.count(dtypes[0]) == len(dtypes) else torch.float32


def as_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as [T, features] with strides that a GEMM takes as they are: every GEMM would make its own copy otherwise."""
    rows = to_dtype(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]), dtype)
    if rows.is_contiguous():
        return rows
    (height, width), (row_stride, column_stride) = rows.shape, rows.stride()
    row_major = column_stride == 1 and row_stride >= width
    column_major = row_stride == 1 and column_stride >= height
    return rows if row_major or column_major else rows.contiguous()


def columns_of(matrix: torch.Tensor, widths: list[int]) -> Sequence[torch.Tensor]:
    return (matrix,) if len(widths) == 1 else torch.split_with_sizes(matrix, widths, 1)


def low_rank(
    rows: torch.Tensor, A: torch.Tensor, ranks: list[int], scalings: Sequence[float], in_place: bool
) -> torch.Tensor:
    """t: one GEMM, unless there is more than one scaling to be its alpha."""
    if all(scaling == scalings[0] for scaling in scalings):
        return scaled_mms([(rows, A.t(), scalings[0])], in_place)
    parts = zip(torch.split_with_sizes(A, ranks), scalings, strict=True)
    return scaled_mms([(rows, part.t(), scaling) for part, scaling in parts], in_place)


def scaled_mms(products: list[tuple[torch.Tensor, torch.Tensor, float]], in_place: bool) -> torch.Tensor:
    """scaling * a b of each, side by side, rounded once if in place. With beta 0 the GEMM does not read its output."""
    if not in_place:
        results = [torch.mm(a, b) * scaling for a, b, scaling in products]
        return results[0] if len(results) == 1 else torch.cat(results, 1)
    widths = [b.shape[1] for _, b, _ in products]
    first = products[0][0]
    result = first.new_empty((first.shape[0], sum(widths)))
    for part, (a, b, scaling) in zip(columns_of(result, widths), products, strict=True):
        part.addmm_(a, b, beta=0, alpha=scaling)
    return result


def sum_mms(products: Iterable[tuple[torch.Tensor, torch.Tensor]], in_place: bool) -> torch.Tensor:
    """The sum of a b, each b used up before the next is asked for."""
    others = iter(products)
    result = torch.mm(*next(others))
    for a, b in others:
        result = result.addmm_(a, b) if in_place else torch.addmm(result, a, b)
    return result


def add_low_rank(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, in_place: bool) -> torch.Tensor:
    """out + a b with a thin a, in the memory of out if in place."""
    return add_low_rank_(out, a, b) if in_place else torch.addmm(out, a, b)


def mm_to(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a b in dtype: straight from the GEMM's fp32 sum where torch can, so that an fp32 master gets an fp32 gradient."""
    if dtype == a.dtype:
        return torch.mm(a, b)
    if dtype == torch.float32 and a.is_cuda and torch.version.hip is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)
