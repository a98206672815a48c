"""Grouped products against an fp64 loop over experts, with NaN where kernels must not read or might forget to write."""

from __future__ import annotations

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget
from interpreter import run_kernels_as_a_gpu_would

pytest.importorskip("triton")

from fastft.errors import KernelInputError
from fastft.ops.moe import triton_grouped as kernels
from fastft.ops.moe.triton_grouped import choose_tile, grouped_matmul, grouped_outer

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


@pytest.fixture(autouse=True)
def kernels_can_run(request, monkeypatch, poisoned_empty):
    run_kernels_as_a_gpu_would(request, monkeypatch)


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
        ((128, 1536, 2048), 4, (64, 64, 32, 4)),
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


# -------------------------------------------------------------------------------------------------------- on a GPU


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
