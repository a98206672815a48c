"""The plan that each of the described devices would get, pinned op by op."""

from __future__ import annotations

import pytest
import torch
from described_devices import DESCRIBED

from fastft.ops.attention import verdicts as attention_verdicts
from fastft.ops.rms_norm.api import verdicts as rms_norm_verdicts
from fastft.ops.rope.api import verdicts as rope_verdicts
from fastft.ops.selection import select

# What "auto" takes for a model in the dtype one would choose there, and in bf16 where that is another.
PLANS = [
    # device, dtype, rms_norm, rope, attention
    ("T4", torch.float16, "triton", "triton", "sdpa"),
    ("T4", torch.bfloat16, "reference", "reference", "sdpa"),
    ("RTX 2080", torch.float16, "triton", "triton", "sdpa"),
    ("RTX 2080", torch.bfloat16, "reference", "reference", "sdpa"),
    ("A100", torch.float16, "triton", "triton", "fa2"),
    ("A100", torch.bfloat16, "triton", "triton", "fa2"),
    ("A100", torch.float32, "triton", "triton", "sdpa"),
    ("RTX 4090 laptop", torch.bfloat16, "triton", "triton", "fa2"),
    ("H100", torch.bfloat16, "triton", "triton", "fa2"),
    ("H100 MIG slice", torch.bfloat16, "triton", "triton", "fa2"),
    ("H200", torch.bfloat16, "triton", "triton", "fa2"),
    ("H200", torch.float32, "triton", "triton", "sdpa"),
    ("B200", torch.bfloat16, "triton", "triton", "fa2"),
    ("DGX Spark", torch.bfloat16, "triton", "triton", "fa2"),
    ("MI300", torch.bfloat16, "reference", "reference", "sdpa"),
    ("GTX 1070", torch.float16, "reference", "reference", "sdpa"),
    ("GTX 1070", torch.bfloat16, "reference", "reference", "sdpa"),
    ("CPU", torch.bfloat16, "reference", "reference", "sdpa"),
    ("CPU", torch.float32, "reference", "reference", "sdpa"),
    ("CPU interpreted", torch.bfloat16, "reference", "reference", "sdpa"),  # the interpreter: only by name
]


@pytest.mark.parametrize(
    ("name", "dtype", "norm", "rope", "attention"), PLANS, ids=lambda value: str(value).removeprefix("torch.")
)
def test_plan_of_a_described_device(name: str, dtype: torch.dtype, norm: str, rope: str, attention: str) -> None:
    capability = DESCRIBED[name]
    verdicts = {
        "rms_norm": rms_norm_verdicts(capability, dtype, hidden_size=4096, weight_dtype=dtype),
        "rope": rope_verdicts(capability, dtype),
        "attention": attention_verdicts(capability, dtype, 128),
    }
    choices = {op: select(op, "auto", found) for op, found in verdicts.items()}
    expected = {"rms_norm": norm, "rope": rope, "attention": attention}
    assert {op: choice.impl for op, choice in choices.items()} == expected
    assert all(choice.reason for choice in choices.values())


@pytest.mark.parametrize(
    ("name", "head_dim", "dropout", "words"),
    [
        ("H200", 256, True, ""),
        ("A100", 200, True, ""),
        ("H200", 257, False, "up to 256, this one is 257"),
        ("RTX 4090 laptop", 192, True, ""),
        ("RTX 4090 laptop", 256, False, ""),
        ("RTX 4090 laptop", 256, True, "no backward for head dimension 256 on sm89"),
        ("RTX 4090 laptop", 200, False, "no backward for head dimension 200 on sm89"),
        ("DGX Spark", 200, False, "no backward for head dimension 200 on sm121"),
    ],
)
def test_fa2_refuses_head_dimensions_that_it_cannot_train(name: str, head_dim: int, dropout: bool, words: str) -> None:
    verdict = attention_verdicts(DESCRIBED[name], torch.bfloat16, head_dim, dropout)["fa2"]
    assert bool(verdict) == (not words)
    assert words in verdict.reason


def test_skipping_fa2_is_explained() -> None:
    def reason(name: str, dtype: torch.dtype) -> str:
        return select("attention", "auto", attention_verdicts(DESCRIBED[name], dtype, 128)).reason

    assert "not fa2: PyTorch's own FlashAttention-2: needs sm80, this is sm75" in reason("T4", torch.float16)
    assert "fp16 and bf16 only, the tensors are torch.float32" in reason("H200", torch.float32)
    assert "not run on ROCm yet" in reason("MI300", torch.bfloat16)
