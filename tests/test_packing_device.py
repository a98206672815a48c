"""PackedSequences on a GPU: what waits for the device and what does not, and bad boundaries that only it knows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastft.packing
from fastft.packing import PackedSequences

ROOT = Path(fastft.packing.__file__).parents[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_cu_seqlens_on_a_device_waits_for_nothing(dtype):
    given = torch.tensor([0, 0, 3, 5], dtype=dtype, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = PackedSequences.from_cu_seqlens(given, 4, 5)
        _ = packed.position_ids, packed.doc_ids
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert packed.cu_seqlens_host is None
    assert (packed.num_sequences, packed.max_seqlen) == (3, 4)
    assert packed.segments == ((0, 0), (0, 3), (3, 5))
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1]
    given.fill_(77)  # a collator's buffer may be used again
    assert packed.cu_seqlens.tolist() == [0, 0, 3, 5]


BAD_ON_DEVICE = {
    "past the end": ([0, 3, 1_000_000], 1_000_000, 5),
    "decreasing": ([0, 4, 2, 5], 5, 5),
    "wrong start": ([1, 3, 5], 5, 5),
    "short": ([0, 3], 5, 5),
    "longer than max_seqlen": ([0, 5], 4, 5),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", BAD_ON_DEVICE)
def test_bad_boundaries_on_a_device_stop_before_attention_reads(case):
    boundaries, longest, tokens = BAD_ON_DEVICE[case]
    code = f"""
import torch
from fastft.ops.attention import varlen_attention
from fastft.packing import PackedSequences
q = torch.randn({tokens}, 2, 64, device="cuda", dtype=torch.bfloat16)
cu_seqlens = torch.tensor({boundaries}, device="cuda", dtype=torch.int32)
torch.cuda.synchronize()
packed = PackedSequences.from_cu_seqlens(cu_seqlens, {longest}, {tokens})
varlen_attention(q, q, q, packed)
torch.cuda.synchronize()
print("survived")
"""
    done = subprocess.run(  # a device assertion ends the process's CUDA context
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "survived" not in done.stdout
    assert "cu_seqlens must rise from 0 to the number of tokens" in done.stderr + done.stdout
    assert "device-side assert" in done.stderr
    assert "illegal memory access" not in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, torch.ones(1, 5)])
def test_positions_on_a_device_cost_one_synchronisation(mask, recwarn):
    ids = torch.tensor([[0, 1, 2, 0, 1]], device="cuda")
    mask = mask if mask is None else mask.cuda()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        packed = PackedSequences.from_position_ids(ids, mask)
        assert packed is not None
        _ = packed.segments, packed.position_ids, packed.doc_ids
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in recwarn if "called a synchronizing" in str(w.message)]) == 1


@pytest.mark.gpu
def test_moving_to_a_gpu_waits_for_nothing_and_back_waits():
    packed = PackedSequences.from_lengths([2, 3], "cpu")
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = packed.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved is packed.to(f"cuda:{torch.cuda.current_device()}")
    on_device = PackedSequences.from_cu_seqlens(moved.cu_seqlens, 3, 5)
    assert on_device.to("cpu", non_blocking=True).segments == ((0, 2), (2, 5))
