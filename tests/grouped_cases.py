"""Operands of grouped products, and what they come to: an fp64 loop over experts."""

from __future__ import annotations

import pytest
import torch
from budget import assert_within_budget

from fastft.ops.moe.triton_grouped import grouped_matmul, grouped_outer

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Where the rows of each expert end, and the number of rows: the last ones may belong to nobody.
ROUTINGS = {
    "one-expert": ([37], 37),
    "one-row": ([0, 1, 1], 1),
    "one-row-of-nobody": ([0, 0], 1),
    "all-to-one": ([0, 0, 53, 53, 53], 53),
    "idle-first": ([0, 0, 11, 40], 40),
    "idle-between": ([17, 17, 17, 41], 41),
    "idle-last": ([5, 31, 31, 31], 31),
    "rows-of-nobody": ([13, 13, 30, 47], 71),
    "all-of-nobody": ([0, 0, 0], 19),
    "full-tiles": ([16, 48, 64], 80),
    "several-tiles": ([131, 131, 150, 300], 311),
}
routings = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)


def draw(*shape, dtype=torch.float32, device="cpu"):
    """Drawn on the CPU, so that a seed gives the same numbers everywhere."""
    return torch.randn(*shape).to(dtype).to(device)


def offsets_of(ends, device):
    return torch.tensor(ends, dtype=torch.int32, device=device)


def within_nan(tensor):
    """A view of equal values with NaN before and behind it along every dimension."""
    view = torch.full([size + 2 for size in tensor.shape], NAN, dtype=tensor.dtype, device=tensor.device)
    for dim, size in enumerate(tensor.shape):
        view = view.narrow(dim, 1, size)
    return view.copy_(tensor)


def matmul_by_hand(rows, weight, ends, dtype, *, alpha=1.0, added_to=None):
    """Rows that belong to nobody get zero, or keep what they have."""
    shape = len(rows), weight.shape[2]
    result = rows.new_zeros(shape, dtype=dtype) if added_to is None else added_to.to(dtype, copy=True)
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        result[start:end] += alpha * (rows[start:end].to(dtype) @ weight[expert].to(dtype))
    return result


def outer_by_hand(left, right, ends, dtype, *, alpha=1.0):
    left, right = left.to(dtype), right.to(dtype)
    spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return torch.stack([alpha * (left[span].T @ right[span]) for span in spans])


def yardsticks(by_hand, *operands, **options):
    dtype = operands[0].dtype
    return tuple({"out": by_hand(*operands, kind, **options)} for kind in (dtype, torch.float64))


def check_matmul(rows, weight, ends, *, alpha=1.0, added_to=None):
    expected = yardsticks(matmul_by_hand, rows, weight, ends, alpha=alpha, added_to=added_to)
    accumulate = added_to is not None
    got = grouped_matmul(rows, weight, offsets_of(ends, rows.device), out=added_to, alpha=alpha, accumulate=accumulate)
    assert got is added_to if accumulate else got.dtype == rows.dtype and got.is_contiguous()
    assert_within_budget({"out": got}, *expected)
    return got


def check_outer(left, right, ends, *, alpha=1.0, dtype=None):
    expected = yardsticks(outer_by_hand, left, right, ends, alpha=alpha)
    got = grouped_outer(left, right, offsets_of(ends, left.device), alpha=alpha, dtype=dtype)
    assert got.dtype == (dtype or left.dtype) and got.is_contiguous()
    assert_within_budget({"out": got}, *expected)
    return got
