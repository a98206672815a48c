"""A stable counting sort of (token, expert) pairs.

    counts[e, b]  = pairs of expert e in block b
    starts[e, b]  = sum of counts[e, :b]                     totals[e] = sum of counts[e, :]
    row of pair i = sum of totals[:e] + starts[e, b] + earlier pairs of its block with its expert e
                    without an expert: sum of totals + earlier pairs that have none

Shapes: topk_indices [T, K], S = T * K pairs in blocks of BLOCK; counts and starts [E, blocks], totals [E]; pairs, rows
[S], offsets [E]. All int32, but the indices may be int64. Any card that Triton compiles for.
Bytes a pair: 2 x 4 or 8 read, 8 written; counts add 4 x 4 E / BLOCK.

Three launches, whose order on the stream is their only synchronisation: each is deterministic, and none waits for the
host. Ranks within a block are counted by comparing all its pairs, which for BLOCK pairs is BLOCK^2 integer comparisons
in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..launching import Launcher
from .order import ExpertOrder

# Of a program's pairs with each other or with the experts, all there at a time: 64 for each of 256 threads.
COMPARISONS = 16384
# Blocks whose counts a program of the scan takes at a time.
SCAN_BLOCK = 1024


@triton.jit
def _expert_of(indices_ptr, pair, num_pairs, stride_token, stride_choice, E: tl.constexpr, K: tl.constexpr):
    """The expert of each pair, E for none."""
    token = (pair // K).to(tl.int64)
    choice = pair % K
    expert = tl.load(indices_ptr + token * stride_token + choice * stride_choice, mask=pair < num_pairs, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _count_kernel(
    indices_ptr,  # [T, K], any strides
    counts_ptr,  # [E, num_blocks]
    num_pairs,
    num_blocks,
    stride_token,
    stride_choice,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = _expert_of(indices_ptr, pair, num_pairs, stride_token, stride_choice, E, K)
    bucket = tl.arange(0, BUCKETS)
    count = tl.sum((expert[:, None] == bucket[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + bucket.to(tl.int64) * num_blocks + block, count, mask=bucket < E)


@triton.jit(do_not_specialize=["num_blocks"])
def _scan_kernel(
    counts_ptr,  # [E, num_blocks]; each row becomes its exclusive prefix sum
    totals_ptr,  # [E]
    num_blocks,
    SCAN_BLOCK: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    total = tl.zeros([], dtype=tl.int32)
    for first in range(0, num_blocks, SCAN_BLOCK):
        block = first + tl.arange(0, SCAN_BLOCK)
        mask = block < num_blocks
        count = tl.load(counts_ptr + expert * num_blocks + block, mask=mask, other=0)
        tl.store(counts_ptr + expert * num_blocks + block, total + tl.cumsum(count, axis=0) - count, mask=mask)
        total += tl.sum(count, axis=0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place_kernel(
    indices_ptr,  # [T, K], any strides
    starts_ptr,  # [E, num_blocks]
    totals_ptr,  # [E]
    pairs_ptr,  # [num_pairs]
    rows_ptr,  # [num_pairs]
    offsets_ptr,  # [E]
    num_pairs,
    num_blocks,
    stride_token,
    stride_choice,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    block = tl.program_id(0)
    bucket = tl.arange(0, BUCKETS)
    total = tl.load(totals_ptr + bucket, mask=bucket < E, other=0)
    ends = tl.cumsum(total, axis=0)
    if block == 0:
        tl.store(offsets_ptr + bucket, ends, mask=bucket < E)
    before = tl.load(starts_ptr + bucket.to(tl.int64) * num_blocks + block, mask=bucket < E, other=0)
    first = ends - total + before
    first_of_none = tl.sum(total, axis=0) + block * BLOCK - tl.sum(before, axis=0)

    place = tl.arange(0, BLOCK)
    pair = block * BLOCK + place
    expert = _expert_of(indices_ptr, pair, num_pairs, stride_token, stride_choice, E, K)
    earlier = (expert[:, None] == expert[None, :]) & (place[None, :] < place[:, None])
    row = tl.sum(tl.where(expert[:, None] == bucket[None, :], first[None, :], 0), axis=1)
    row = tl.where(expert < E, row, first_of_none) + tl.sum(earlier.to(tl.int32), axis=1)
    mask = pair < num_pairs
    tl.store(rows_ptr + pair, row, mask=mask)
    tl.store(pairs_ptr + row, pair, mask=mask)


_count, _scan, _place = Launcher(_count_kernel), Launcher(_scan_kernel), Launcher(_place_kernel)


def sort_by_expert(topk_indices: torch.Tensor, num_experts: int) -> ExpertOrder:
    """The kernels on topk_indices [T, K], not empty; see `fastft.ops.moe.sort_by_expert`."""
    num_pairs, choices = topk_indices.numel(), topk_indices.shape[1]
    constants = _constants(num_experts, choices)
    num_blocks = triton.cdiv(num_pairs, constants["BLOCK"])
    numbers = (num_pairs, num_blocks, *topk_indices.stride())

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=topk_indices.device)

    counts, totals, offsets = empty(num_experts, num_blocks), empty(num_experts), empty(num_experts)
    pairs, rows = empty(num_pairs), empty(num_pairs)
    _count(num_blocks, (topk_indices, counts), numbers, constants)
    _scan(num_experts, (counts, totals), (num_blocks,), {"SCAN_BLOCK": SCAN_BLOCK})
    _place(num_blocks, (topk_indices, counts, totals, pairs, rows, offsets), numbers, constants)
    return ExpertOrder(pairs, rows, offsets)


@lru_cache(maxsize=64)
def _constants(num_experts: int, choices: int) -> dict[str, int]:
    """8,192 tokens of 8 experts each are 65,536 pairs, in 512 programs where there are up to 128 experts."""
    buckets = max(triton.next_power_of_2(num_experts), 16)
    block = min(128, COMPARISONS // buckets)
    return {"E": num_experts, "K": choices, "BLOCK": block, "BUCKETS": buckets, "num_warps": 8}


def compile_cases() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """Every kernel with the widest and the usual numbers of experts, for `tests/cross_compile.py`."""
    for indices, experts in (("*i64", 128), ("*i32", 32), ("*i64", 1024)):
        constants = _constants(experts, 8)
        warps = constants["num_warps"]
        constants = {name: value for name, value in constants.items() if name != "num_warps"}
        numbers = {"num_pairs": "i32", "num_blocks": "i32", "stride_token": "i64", "stride_choice": "i64"}
        names = dict.fromkeys(constants, "constexpr")
        table = "*i32"
        yield _count_kernel, {"indices_ptr": indices, "counts_ptr": table, **numbers, **names}, constants, warps
        outputs = dict.fromkeys(("starts_ptr", "totals_ptr", "pairs_ptr", "rows_ptr", "offsets_ptr"), table)
        yield _place_kernel, {"indices_ptr": indices, **outputs, **numbers, **names}, constants, warps
    signature = {"counts_ptr": "*i32", "totals_ptr": "*i32", "num_blocks": "i32", "SCAN_BLOCK": "constexpr"}
    yield _scan_kernel, signature, {"SCAN_BLOCK": SCAN_BLOCK}, 4
