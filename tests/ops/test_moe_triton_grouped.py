"""Grouped products against an fp64 loop over experts, with NaN where kernels must not read or might forget to write."""

from __future__ import annotations

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget
from grouped_cases import (
    DTYPES,
    NAN,
    ROUTINGS,
    check_matmul,
    check_outer,
    draw,
    matmul_by_hand,
    offsets_of,
    outer_by_hand,
    routings,
    within_nan,
    yardsticks,
)
from interpreter import run_kernels_as_a_gpu_would

pytest.importorskip("triton")

from fastft.errors import KernelInputError
from fastft.ops.moe import triton_grouped as kernels
from fastft.ops.moe.triton_grouped import choose_tile, grouped_matmul, grouped_outer


@pytest.fixture(autouse=True)
def kernels_can_run(request, monkeypatch, poisoned_empty):
    run_kernels_as_a_gpu_would(request, monkeypatch)


# ---------------------------------------------------------------------------------------------------- the products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@routings
def test_matmul(routing, dtype, device):
    ends, num_rows = routing
    rows = draw(num_rows, 20, dtype=dtype, device=device)
    rows[ends[-1] :] = NAN
    got = check_matmul(rows, draw(len(ends), 20, 67, dtype=dtype, device=device), ends)
    assert (got[ends[-1] :] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@routings
def test_outer(routing, dtype, device):
    ends, num_rows = routing
    left, right = draw(num_rows, 20, dtype=dtype, device=device), draw(num_rows, 67, dtype=dtype, device=device)
    left[ends[-1] :] = right[ends[-1] :] = NAN
    got = check_outer(left, right, ends)
    idle = [start == end for start, end in zip([0, *ends], ends, strict=False)]
    assert (got[idle] == 0).all()


@pytest.mark.parametrize("depth", [1, 4, 8, 16, 20, 64, 131])
@pytest.mark.parametrize("width", [7, 16, 150])
def test_depths_and_widths_low_ranks_among_them(depth, width, device):
    ends = [9, 9, 40, 64]
    rows, weight = draw(70, depth, device=device), draw(4, depth, width, device=device)
    check_matmul(rows, weight, ends)
    check_outer(rows, draw(70, width, device=device), ends)


def test_more_tiles_than_one_group_of_them(device):
    """Ten tiles of rows and two of columns for 16-bit elements, twice as many and more for fp32."""
    ends = [400, 1000, 1203]
    for dtype in (torch.float16, torch.float32):
        rows, weight = draw(1210, 24, dtype=dtype, device=device), draw(3, 24, 150, dtype=dtype, device=device)
        check_matmul(rows, weight, ends)
        check_outer(draw(33, 1210, dtype=dtype, device=device), draw(33, 70, dtype=dtype, device=device), [20, 33])


@pytest.mark.parametrize("experts", [1, 130, 257])
def test_few_and_many_experts(experts, device):
    counts = torch.randint(0, 4, (experts,))
    counts[-1] = 0 if experts > 1 else 5
    ends = counts.cumsum(0).tolist()
    rows, weight = draw(ends[-1] + 3, 12, device=device), draw(experts, 12, 18, device=device)
    rows[ends[-1] :] = NAN
    check_matmul(rows, weight, ends)
    check_outer(rows, draw(len(rows), 18, device=device), ends)


def test_no_rows(device):
    offsets = offsets_of([0, 0, 0], device)
    assert grouped_matmul(draw(0, 5, device=device), draw(3, 5, 7, device=device), offsets).shape == (0, 7)
    outer = grouped_outer(draw(0, 5, device=device), draw(0, 7, device=device), offsets)
    assert torch.equal(outer, torch.zeros(3, 5, 7, device=device))


def test_nothing_to_sum_over_and_no_columns(device):
    offsets = offsets_of([2, 4], device)
    got = grouped_matmul(draw(5, 0, device=device), draw(2, 0, 7, device=device), offsets)
    assert torch.equal(got, torch.zeros(5, 7, device=device))
    assert grouped_matmul(draw(5, 3, device=device), draw(2, 3, 0, device=device), offsets).shape == (5, 0)
    assert grouped_outer(draw(5, 3, device=device), draw(5, 0, device=device), offsets).shape == (2, 3, 0)


# ------------------------------------------------------------------------------------------------ strides, poison


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(dtype, device):
    ends = [6, 6, 31]

    def tensor(*shape):
        return draw(*shape, dtype=dtype, device=device)

    weight = tensor(3, 18, 35)
    for rows in (
        tensor(18, 33).T,
        tensor(66, 54)[::2, 1::3],
        tensor(1, 18).expand(33, 18),
        tensor(33, 1).expand(33, 18),
    ):
        assert not rows.is_contiguous()
        check_matmul(rows, weight, ends)
        check_outer(rows, tensor(33, 35), ends)
        check_outer(tensor(33, 35), rows, ends)
    for weight in (tensor(3, 35, 18).mT, tensor(1, 18, 35).expand(3, 18, 35), tensor(18, 35, 3).permute(2, 0, 1)):
        assert not weight.is_contiguous()
        check_matmul(tensor(33, 18), weight, ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_outside_of_the_operands_is_read_or_written(dtype, device):
    ends = [7, 7, 30]
    rows, weight = draw(32, 21, dtype=dtype, device=device), draw(3, 21, 37, dtype=dtype, device=device)
    rows[30:] = NAN
    around = torch.full((34, 39), 5.0, dtype=dtype, device=device)
    inside = around[1:-1, 1:-1].fill_(NAN)
    offsets = offsets_of(ends, device)
    expected = grouped_matmul(rows, weight, offsets)
    assert grouped_matmul(within_nan(rows), within_nan(weight), offsets, out=inside) is inside
    assert torch.equal(inside, expected) and torch.isfinite(expected).all()
    around[1:-1, 1:-1] = 5.0
    assert (around == 5.0).all()
    left = draw(32, 37, dtype=dtype, device=device)
    assert torch.equal(grouped_outer(within_nan(left), within_nan(rows), offsets), grouped_outer(left, rows, offsets))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # numpy's, in the interpreter
def test_rows_of_another_expert_may_be_anything(device):
    """Expert 1 has NaN and infinity; whoever multiplied them by zero would have NaN in a neighbour's rows."""
    ends = [5, 22, 40]
    rows, weight, right = draw(40, 19, device=device), draw(3, 19, 35, device=device), draw(40, 35, device=device)
    offsets = offsets_of(ends, device)
    clean, clean_outer = grouped_matmul(rows, weight, offsets), grouped_outer(rows, right, offsets)
    rows[5:22:2], rows[6:22:2], right[5:22], weight[1] = NAN, float("inf"), NAN, NAN
    got, outer = grouped_matmul(rows, weight, offsets), grouped_outer(rows, right, offsets)
    assert got[5:22].isnan().all() and outer[1].isnan().all()
    for others in (slice(0, 5), slice(22, 40)):
        assert torch.equal(got[others], clean[others])
    assert torch.equal(outer[::2], clean_outer[::2])


# ------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alpha(dtype, device):
    ends, num_rows = ROUTINGS["rows-of-nobody"]
    rows, right = draw(num_rows, 8, dtype=dtype, device=device), draw(num_rows, 35, dtype=dtype, device=device)
    check_matmul(rows, draw(4, 8, 35, dtype=dtype, device=device), ends, alpha=-0.37)
    check_outer(rows, right, ends, alpha=-0.37)


@pytest.mark.parametrize("alpha", [1.0, 2.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulate_leaves_rows_of_nobody_alone(dtype, alpha, device):
    ends, num_rows = ROUTINGS["rows-of-nobody"]
    rows, weight = draw(num_rows, 16, dtype=dtype, device=device), draw(4, 16, 35, dtype=dtype, device=device)
    rows[ends[-1] :] = NAN
    out = draw(num_rows, 70, dtype=dtype, device=device)[:, ::2]
    before = out.clone()
    check_matmul(rows, weight, ends, alpha=alpha, added_to=out)
    assert torch.equal(out[ends[-1] :], before[ends[-1] :])
    assert not torch.equal(out[: ends[-1]], before[: ends[-1]])


def test_a_given_output_is_overwritten_and_may_be_of_another_dtype(device):
    rows, weight = draw(30, 16, dtype=torch.float16, device=device), draw(2, 16, 35, dtype=torch.float16, device=device)
    out = torch.full((35, 30), NAN, device=device).T
    got = grouped_matmul(rows, weight, offsets_of([12, 25], device), out=out)
    assert got is out
    expected = yardsticks(matmul_by_hand, rows.float(), weight.float(), [12, 25])
    assert_within_budget({"out": out}, *expected)


def test_outer_sums_in_fp32_and_may_give_them(device):
    left, right = (draw(300, 33, dtype=torch.float16, device=device) for _ in range(2))
    wide = grouped_outer(left, right, offsets_of([100, 290], device), dtype=torch.float32)
    expected = yardsticks(outer_by_hand, left.float(), right.float(), [100, 290])
    assert_within_budget({"out": wide}, *expected)
    assert torch.equal(check_outer(left, right, [100, 290]), wide.half())
    check_outer(left, right, [100, 290], dtype=torch.float32)


def test_operands_that_need_gradients_and_the_result_that_has_none(device):
    rows, weight = (draw(*shape, device=device).requires_grad_() for shape in ((9, 5), (2, 5, 6)))
    assert not grouped_matmul(rows, weight, offsets_of([4, 9], device)).requires_grad
    assert not grouped_outer(rows, rows, offsets_of([4, 9], device)).requires_grad


def test_the_budget_sees_a_row_that_goes_to_the_wrong_expert(device):
    rows, weight, right = draw(40, 16, device=device), draw(3, 16, 35, device=device), draw(40, 35, device=device)
    wrong = offsets_of([11, 20, 40], device)
    products = {"out": grouped_matmul(rows, weight, wrong)}
    assert_mutant_caught(products, *yardsticks(matmul_by_hand, rows, weight, [10, 20, 40]))
    gradients = {"out": grouped_outer(rows, right, wrong)}
    assert_mutant_caught(gradients, *yardsticks(outer_by_hand, rows, right, [10, 20, 40]))


@pytest.mark.parametrize("experts", [1, 3, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 129, 1000])
def test_the_grid_has_a_program_for_every_tile(num_rows, experts):
    """The bound that the launch uses, against routings that make as many tiles as there can be."""
    block = choose_tile(num_rows // experts, 64, 64, 2).block_m
    for seed in range(50):
        ends = torch.randint(0, num_rows + 1, (experts,), generator=torch.Generator().manual_seed(seed)).sort().values
        counts = torch.cat([ends, torch.tensor([num_rows])]).diff(prepend=torch.tensor([0]))
        tiles = ((counts + block - 1) // block).sum().item()
        assert tiles <= kernels.most_row_tiles(num_rows, experts, block)


@pytest.mark.parametrize(
    ("shape", "element_size", "tile"),
    [
        ((128, 1536, 2048), 2, (128, 128, 64, 8)),
        ((128, 16, 2048), 2, (128, 16, 64, 4)),
        ((128, 2048, 8), 2, (64, 128, 16, 4)),
        ((3, 2048, 2048), 2, (16, 128, 64, 4)),
        ((128, 1536, 2048), 4, (64, 64, 16, 4)),
    ],
)
def test_tiles(shape, element_size, tile):
    assert choose_tile(*shape, element_size) == tile


def test_bad_input_is_refused(device):
    rows, weight, offsets = draw(9, 5, device=device), draw(2, 5, 6, device=device), offsets_of([4, 9], device)
    for bad in (
        (rows[:, :4], weight, offsets),
        (rows.half(), weight, offsets),
        (rows, weight[:1], offsets),
        (rows, weight, offsets.long()),
        (rows, weight, offsets.repeat(2)[::2]),
    ):
        with pytest.raises(KernelInputError, match=r"grouped_matmul: .* do not go together"):
            grouped_matmul(*bad)
    for bad in ((rows[:8], rows, offsets), (rows, rows.half(), offsets), (rows, rows, offsets.long())):
        with pytest.raises(KernelInputError, match=r"grouped_outer: .* do not go together"):
            grouped_outer(*bad)
    with pytest.raises(KernelInputError, match="no out to accumulate into"):
        grouped_matmul(rows, weight, offsets, accumulate=True)
    with pytest.raises(KernelInputError, match=r"out is \[9, 5\]; it has to be \[9, 6\]"):
        grouped_matmul(rows, weight, offsets, out=torch.zeros(9, 5, device=device))
