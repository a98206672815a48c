"""Who multiplies in the experts of a sparse layer, by what a device and its weights are."""

from __future__ import annotations

import pytest
import torch
from described_devices import DESCRIBED

from fastft.capability import probe
from fastft.errors import UnsupportedOptionError
from fastft.ops import moe
from fastft.ops.moe import ExpertWeights

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("card", "dtype", "aligned", "expected"),
    [
        ("H200", BF16, True, "grouped_mm"),
        ("H200", BF16, False, "triton"),
        ("H200", FP16, True, "triton"),
        ("H200", FP32, True, "loop"),
        ("A100", BF16, True, "triton"),
        ("B200", BF16, True, "grouped_mm"),
        ("DGX Spark", BF16, True, "triton"),
        ("T4", FP16, True, "loop"),  # Triton has no tensor cores there
        ("MI300", BF16, True, "loop"),
    ],
)
def test_who_multiplies_where(card, dtype, aligned, expected):
    verdicts = moe.verdicts(DESCRIBED[card], dtype, aligned=aligned)
    assert next(name for name, verdict in verdicts.items() if verdict) == expected
    assert all(verdict.reason for verdict in verdicts.values())


def test_a_cpu_has_the_reference_and_unknown_names_are_refused():
    assert next(iter(moe.verdicts(probe(torch.device("cpu")), BF16, aligned=True))) == "reference"
    with pytest.raises(UnsupportedOptionError, match="unknown implementation"):
        moe.resolve(torch.device("cpu"), FP32, True, "sonic")


def test_alignment_is_that_of_rows_and_of_memory():
    def weights(hidden, width, dtype=BF16, shift=0):
        memory = torch.zeros(2 * 2 * width * hidden + 8, dtype=dtype)[shift:]
        gate_up = memory[: 2 * 2 * width * hidden].view(2, 2 * width, hidden)
        return ExpertWeights(gate_up.mT, torch.zeros(2, hidden, width, dtype=dtype).mT)

    assert moe.is_aligned(weights(32, 16)) and moe.is_aligned(weights(4, 4, FP32))
    assert not moe.is_aligned(weights(36, 16)) and not moe.is_aligned(weights(32, 12))
    assert not moe.is_aligned(weights(32, 16, shift=1))
    strided = weights(32, 16)._replace(down=torch.zeros(2, 64, 32, dtype=BF16)[:, ::2, ::2].mT)
    assert not moe.is_aligned(strided)
