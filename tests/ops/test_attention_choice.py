"""Packed attention: which engine runs, autocast, and what is refused with which words."""

from __future__ import annotations

import pytest
import torch
from attention_cases import make_case

from fastft.capability import probe
from fastft.errors import KernelInputError, UnsupportedOptionError
from fastft.ops.attention import IMPLEMENTATIONS, resolve, varlen_attention, verdicts
from fastft.packing import PackedSequences

gpu = pytest.mark.gpu


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_autocast_changes_neither_dtype_nor_numbers(device, impl):
    case = make_case((19, 5), device=device)
    q = case.q.detach().requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = varlen_attention(q, case.k, case.v, case.packed, impl=impl)
    out.backward(case.grad)
    plain = case.run(impl)
    assert torch.equal(out, plain["out"])
    assert torch.equal(q.grad, plain["dq"])


def test_auto_takes_the_best_for_the_tensors_own_device(device):
    for dtype in (torch.float32, torch.bfloat16):
        expected = "fa2" if device.type == "cuda" and dtype == torch.bfloat16 else "sdpa"
        on_this_gpu = make_case((3,), device=device).q.device
        assert resolve("auto", on_this_gpu, dtype, 64).impl == expected
        case = make_case((19, 5), dtype=dtype, device=device)
        assert torch.equal(case.run("auto")["out"], case.run(expected)["out"])


def test_verdicts_list_every_implementation_with_a_reason():
    found = verdicts(probe("cpu"), torch.float32, 64)
    assert tuple(found) == IMPLEMENTATIONS
    assert all(verdict.reason for verdict in found.values())


def test_fa2_on_a_cpu_is_refused_with_an_alternative():
    with pytest.raises(UnsupportedOptionError, match=r"needs an NVIDIA GPU.*attention='sdpa'"):
        make_case((3,), dtype=torch.bfloat16).run("fa2")


@gpu
def test_fa2_in_fp32_is_refused_with_an_alternative():
    with pytest.raises(UnsupportedOptionError, match=r"fp16 and bf16 only.*attention='sdpa'"):
        make_case((3,), device="cuda").run("fa2")


@gpu
def test_fa2_above_its_largest_head_dimension_is_refused_with_an_alternative():
    case = make_case((3,), dtype=torch.bfloat16, device="cuda", head_dim=264)
    with pytest.raises(UnsupportedOptionError, match=r"up to 256, this one is 264.*attention='sdpa'"):
        case.run("fa2")
    case.assert_within_budget("sdpa", case.run("auto"))


def test_unknown_engine_is_refused():
    with pytest.raises(UnsupportedOptionError, match=r"unknown implementation 'flash'.*'fa2', 'sdpa', 'reference'"):
        make_case((3,)).run("flash")


# ------------------------------------------------------------------------------------------------ messages

Q, K = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
FIVE = PackedSequences.from_lengths([2, 3], "cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((Q, K, K, PackedSequences.from_lengths([2, 2], "cpu")), "cover 4 tokens, q has 5"),
        ((Q[:, :3], K, K, FIVE), "3 query heads cannot share 2 key heads"),
        ((Q, K[:, :0], K[:, :0], FIVE), "cannot share 0 key heads"),
        ((Q[None], K[None], K[None], FIVE), "drop a batch dimension"),
        ((Q, K[None], K[None], FIVE), "drop a batch dimension"),
        ((Q, K[:4], K[:4], FIVE), r"\(4, 2, 16\)"),
        ((Q, K, K[:, :1], FIVE), r"\(5, 1, 16\)"),
        ((Q, K[..., :8], K[..., :8], FIVE), r"\(5, 2, 8\)"),
        ((Q.long(), K.long(), K.long(), FIVE), "floating-point"),
        ((Q, K.double(), K, FIVE), "one dtype, got torch.float32, torch.float64"),
        ((Q, K.to("meta"), K, FIVE), "one device, got cpu, meta"),
        ((Q, K, K, FIVE.to("meta")), r"packed\.to\(q\.device\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(KernelInputError, match=words):
        varlen_attention(*arguments)


@pytest.mark.parametrize("window_size", [(-1, 0), (3, -1)])
def test_negative_windows_are_refused(window_size):
    with pytest.raises(KernelInputError, match="None is unbounded"):
        varlen_attention(Q, K, K, FIVE, window_size=window_size)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_dropout_that_is_no_probability_is_refused(dropout):
    with pytest.raises(KernelInputError, match="probability"):
        varlen_attention(Q, K, K, FIVE, dropout=dropout)
