"""The metadata benchmark: its batch, and that each of its cases runs; what it counts needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import metadata  # noqa: E402
from fastft import PackedSequences  # noqa: E402


def test_positions_and_boundaries_of_the_batch_say_the_same() -> None:
    batch = metadata.make_batch(100, 7, torch.device("cpu"))
    found = PackedSequences.from_position_ids(batch["position_ids"])
    assert found is not None and found.num_sequences == 7 and found.max_seqlen == batch["max_seqlen"]
    assert torch.equal(found.cu_seqlens, batch["cu_seqlens"])


@pytest.mark.parametrize("case", metadata.CASES.values(), ids=lambda case: case.__name__)
def test_each_case_runs(case) -> None:
    case(metadata.make_batch(64, 5, torch.device("cpu")), 3)


def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "metadata.py")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env={"CUDA_VISIBLE_DEVICES": ""})
    assert finished.returncode == 1 and "needs a CUDA GPU" in finished.stderr
