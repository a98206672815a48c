"""The order of experts: the same integers from every implementation, whatever the routing."""

from __future__ import annotations

import pytest
import torch
from interpreter import run_kernels_as_a_gpu_would

from fastft.capability import probe
from fastft.errors import KernelInputError, UnsupportedOptionError
from fastft.ops.moe import ExpertOrder, sort_by_expert, sort_verdicts

# (tokens, choices, experts): odd sizes, one of each, more experts than pairs, blocks that are full to the last pair.
SHAPES = [(37, 3, 5), (1, 1, 1), (1, 8, 128), (64, 2, 8), (129, 1, 7), (300, 8, 60), (5, 4, 257), (40, 2, 1000)]
IMPLS = ("triton", "reference")


@pytest.fixture(autouse=True)
def kernels_can_run(request, monkeypatch):
    run_kernels_as_a_gpu_would(request, monkeypatch)


def routing(tokens, choices, experts, device, dtype=torch.int64, seed=0):
    """Distinct experts for each token where there are enough."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, max(experts, choices), generator=generator)
    return (scores.argsort(dim=1)[:, :choices] % experts).to(dtype).to(device)


def by_hand(topk_indices, num_experts):
    """Expert after expert, pair after pair."""
    experts = topk_indices.flatten().tolist()
    pairs, offsets = [], []
    for expert in range(num_experts):
        pairs += [pair for pair, chosen in enumerate(experts) if chosen == expert]
        offsets.append(len(pairs))
    pairs += [pair for pair, chosen in enumerate(experts) if not 0 <= chosen < num_experts]
    rows = sorted(range(len(pairs)), key=pairs.__getitem__)
    return ExpertOrder(*(torch.tensor(numbers, dtype=torch.int32) for numbers in (pairs, rows, offsets)))


def check(topk_indices, num_experts):
    expected = by_hand(topk_indices, num_experts)
    for impl in IMPLS:
        found = sort_by_expert(topk_indices, num_experts, impl=impl)
        for name in ExpertOrder._fields:
            got = getattr(found, name)
            assert got.dtype == torch.int32 and got.device == topk_indices.device, (impl, name)
            assert torch.equal(got.cpu(), getattr(expected, name)), (impl, name)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_are_ordered_by_expert_and_then_by_token(shape, dtype, device):
    check(routing(*shape, device, dtype), shape[2])


def test_all_tokens_to_one_expert_and_none_to_the_others(device):
    for expert in (0, 3, 6):
        check(torch.full((150, 2), expert, device=device), 7)


def test_pairs_without_an_expert_come_last(device):
    topk_indices = routing(140, 3, 6, device)
    topk_indices[::3, 1] = 6  # as expert parallelism marks those of another rank
    topk_indices[1::7, 0] = -1
    topk_indices[5] = 2**31 - 1
    check(topk_indices, 6)
    check(torch.full((5, 2), 6, device=device), 6)


def test_strided_and_expanded_indices(device):
    wide = routing(60, 12, 16, device)
    for topk_indices in (wide[:, 1:9:2], wide.t()[:5], wide[3:4].expand(40, 12), wide[::2, :3]):
        assert not topk_indices.is_contiguous()
        check(topk_indices, 16)


def test_buffers_that_hold_something_else(device, monkeypatch):
    topk_indices = routing(90, 4, 9, device)
    empty = torch.empty

    def poisoned(*args, **kwargs):
        found = empty(*args, **kwargs)
        return found.fill_(-7) if found.dtype == torch.int32 else found

    monkeypatch.setattr(torch, "empty", poisoned)
    check(topk_indices, 9)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(0, 4), (6, 0)])
def test_no_pairs(shape, impl, device):
    found = sort_by_expert(torch.empty(shape, dtype=torch.int64, device=device), 5, impl=impl)
    assert found.pairs.numel() == found.rows.numel() == 0
    assert found.offsets.tolist() == [0] * 5


def test_more_blocks_than_a_scan_takes_at_a_time(device, monkeypatch):
    from fastft.ops.moe import triton_sort as kernels

    monkeypatch.setattr(kernels, "SCAN_BLOCK", 4)
    check(routing(400, 4, 3, device), 3)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "choices", "experts"), [(70_000, 8, 128), (140_000, 4, 32), (8192, 10, 512)])
def test_many_tokens_on_a_gpu(tokens, choices, experts):
    topk_indices = routing(tokens, choices, experts, "cuda")
    expected, found = (sort_by_expert(topk_indices, experts, impl=impl) for impl in ("reference", "triton"))
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.gpu
def test_the_kernels_do_not_wait_for_the_device():
    topk_indices = routing(500, 4, 16, "cuda")
    sort_by_expert(topk_indices, 16, impl="triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        sort_by_expert(topk_indices, 16, impl="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("topk_indices", "experts", "what"),
    [
        (torch.zeros(4, dtype=torch.int64), 3, r"\[4\]; give it int32 or int64 \[T, K\]"),
        (torch.zeros(4, 2), 3, "topk_indices is torch.float32"),
        (torch.zeros(4, 2, dtype=torch.int64), 0, "there has to be one at least"),
        (torch.zeros(1, 1, dtype=torch.int64).expand(2**20, 2**11), 3, "more than int32 counts"),
    ],
)
def test_bad_input_is_refused(topk_indices, experts, what):
    with pytest.raises(KernelInputError, match=what):
        sort_by_expert(topk_indices, experts)


def test_what_cannot_run_is_refused():
    topk_indices = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(UnsupportedOptionError, match="2000 experts are too many for one program"):
        sort_by_expert(topk_indices, 2000, impl="triton")
    with pytest.raises(UnsupportedOptionError, match="unknown implementation 'cuda'"):
        sort_by_expert(topk_indices, 3, impl="cuda")
    assert next(iter(sort_verdicts(probe(torch.device("cpu")), num_experts=8))) == "reference"


def test_under_compile_auto_is_the_reference():
    topk_indices = routing(20, 2, 4, "cpu")
    compiled = torch.compile(lambda x: sort_by_expert(x, 4), backend="eager")
    assert all(torch.equal(*pair) for pair in zip(compiled(topk_indices), by_hand(topk_indices, 4), strict=True))
