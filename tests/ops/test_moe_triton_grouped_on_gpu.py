"""Grouped products of usual sizes on a GPU, without waiting for it, and past int32."""

from __future__ import annotations

import pytest
import torch
from budget import assert_within_budget
from grouped_cases import (
    DTYPES,
    NAN,
    check_matmul,
    check_outer,
    draw,
    matmul_by_hand,
    offsets_of,
    outer_by_hand,
    yardsticks,
)

pytest.importorskip("triton")

from fastft.ops.moe import triton_grouped as kernels
from fastft.ops.moe.triton_grouped import grouped_matmul, grouped_outer

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def skewed_ends(num_rows, experts):
    """Every third expert is idle, and the others have from few rows to many; 40 rows belong to nobody."""
    shares = torch.rand(experts).square() * (torch.arange(experts) % 3 != 1)
    return (shares.cumsum(0) / shares.sum() * (num_rows - 40)).int().tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "experts", "depth", "width"),
    [(8192, 64, 1024, 768), (5003, 8, 1000, 16), (5003, 8, 8, 1001), (300, 128, 512, 384), (4099, 5, 515, 259)],
)
def test_usual_sizes(num_rows, experts, depth, width, dtype):
    ends = skewed_ends(num_rows, experts)
    rows, weight = (
        draw(num_rows, depth, dtype=dtype, device="cuda"),
        draw(experts, width, depth, dtype=dtype, device="cuda"),
    )
    rows[ends[-1] :] = NAN
    got = check_matmul(rows, weight.mT, ends)
    assert torch.equal(got, grouped_matmul(rows, weight.mT, offsets_of(ends, "cuda")))
    check_matmul(
        rows, weight.mT.contiguous(), ends, alpha=0.5, added_to=draw(num_rows, width, dtype=dtype, device="cuda")
    )
    right = draw(num_rows, width, dtype=dtype, device="cuda")
    gradient = check_outer(rows, right, ends)
    assert torch.equal(gradient, grouped_outer(rows, right, offsets_of(ends, "cuda")))
    check_outer(right, rows, ends)


@pytest.mark.gpu
def test_the_host_does_not_wait_and_token_counts_do_not_recompile():
    weight, offsets = draw(4, 64, 48, device="cuda"), offsets_of([100, 100, 300, 500], "cuda")
    rows, right = draw(641, 64, device="cuda"), draw(641, 48, device="cuda")

    def run(num_rows):
        grouped_matmul(rows[:num_rows], weight, offsets)
        grouped_outer(rows[:num_rows], right[:num_rows], offsets)

    def compiled():
        return [len(k.device_caches[rows.get_device()][0]) for k in (kernels._matmul_kernel, kernels._outer_kernel)]

    run(520)
    before = compiled()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for num_rows in (521, 544, 640, 641):
            run(num_rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled() == before


@pytest.fixture
def freed():
    yield
    torch.cuda.empty_cache()


def filled(*shape):
    """bf16 made on the GPU: these tensors have 2^31 elements and some more."""
    return torch.zeros(*shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_rows_past_int32(layout, freed):
    num_rows, depth = (2**20 + 37, 2048) if layout == "rows" else (2**25 + 37, 64)
    rows = filled(num_rows, depth) if layout == "rows" else filled(depth, num_rows).T
    tail = draw(100, depth, dtype=torch.bfloat16, device="cuda")
    rows[-100:] = tail
    weight = draw(2, depth, 16, dtype=torch.bfloat16, device="cuda")
    offsets = offsets_of([num_rows - 60, num_rows - 10], "cuda")
    got = grouped_matmul(rows, weight, offsets)
    assert_within_budget({"out": got[-100:]}, *yardsticks(matmul_by_hand, tail, weight, [40, 90]))
    assert not got[:-100].any()
    right = filled(num_rows, 16)
    right[-100:] = draw(100, 16, dtype=torch.bfloat16, device="cuda")
    for pair in ((rows, right), (right, rows)):
        expected = yardsticks(outer_by_hand, *(side[-100:] for side in pair), [40, 90])
        assert_within_budget({"out": grouped_outer(*pair, offsets)}, *expected)


@pytest.mark.gpu
def test_outputs_past_int32(freed):
    num_rows, width = 2**20 + 37, 2048
    rows = draw(num_rows, 8, dtype=torch.bfloat16, device="cuda")
    weight = draw(2, 8, width, dtype=torch.bfloat16, device="cuda")
    got = grouped_matmul(rows, weight, offsets_of([num_rows - 60, num_rows - 10], "cuda"))
    expected = yardsticks(matmul_by_hand, rows[-100:], weight, [40, 90])
    assert_within_budget({"out": got[-100:]}, *expected)
    del got

    ends = [*range(1, 2050)]
    left, right = (draw(2049, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    got = grouped_outer(left, right, offsets_of(ends, "cuda"))
    for expert in (0, 2047, 2048):
        assert torch.equal(got[expert], left[expert][:, None] * right[expert])


@pytest.mark.gpu
def test_weight_past_int32(freed):
    storage = filled(2**31 + 2**20)
    weight = storage.as_strided((3, 16, 24), (2**30 + 2**10, 24, 1))
    weight.copy_(torch.randn(3, 16, 24))
    rows = draw(50, 16, dtype=torch.bfloat16, device="cuda")
    check_matmul(rows, weight, [10, 20, 45])
