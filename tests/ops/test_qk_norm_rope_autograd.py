"""QK-norm and RoPE in one kernel: whatever autograd may hand it, which implementation runs, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from budget import assert_within_budget
from interpreter import run_kernels_as_a_gpu_would
from qk_norm_rope_cases import (
    INPUTS,
    check,
    kernel,
    make,
)

from fastft.capability import DeviceFacts, SoftwareFacts, assess
from fastft.errors import KernelInputError, UnsupportedOptionError
from fastft.ops.qk_norm_rope import launch, qk_norm_rope, verdicts
from fastft.ops.qk_norm_rope.specialise import compile_cases


@pytest.fixture(autouse=True)
def as_on_a_gpu(request, monkeypatch):
    run_kernels_as_a_gpu_would(request, monkeypatch)


# ------------------------------------------------------------------------------------------------ autograd


@pytest.fixture
def backwards(monkeypatch) -> list[dict]:
    """What every launch of the backward kernel gets: pointers by name, constants."""
    launched, seen = launch._launch_bwd, []
    names = launch.qk_norm_rope_bwd_kernel.arg_names

    def recording(programs, pointers, numbers, constants):
        seen.append(dict(zip(names, pointers, strict=False)) | constants)
        launched(programs, pointers, numbers, constants)

    monkeypatch.setattr(launch, "_launch_bwd", recording)
    return seen


SUBSETS = [names for count in range(1, 4) for names in itertools.combinations(INPUTS, count)]


@pytest.mark.parametrize("trained", SUBSETS, ids="+".join)
def test_frozen_inputs_cost_nothing(device, trained, backwards, poisoned_empty):
    case = make((9,), device=device, rounding="gemma")
    found, expected = case.run(kernel, trained), case.triton()
    torch.testing.assert_close(found, {name: expected[name] for name in found})
    launched = backwards[0]
    for name in ("q", "k"):
        assert (launched[f"d{name}_ptr"] is not None) == (name in trained)
        assert (launched[f"{name}_partials_ptr"] is not None) == (f"{name}_weight" in trained)
        used = name in trained or f"{name}_weight" in trained
        assert (launched[f"H{name.upper()}"] > 0) == (launched[f"{name}_ptr"] is not None) == used


@pytest.mark.parametrize("used", ["q", "k"])
def test_an_unused_output_costs_nothing(device, used, backwards):
    case = make((9,), device=device)
    inputs = {name: getattr(case, name).requires_grad_() for name in INPUTS}
    out = dict(zip("qk", kernel(*inputs.values(), case.cos, case.sin, eps=1e-6), strict=True))
    out[used].backward(getattr(case, f"d{used}_out"))
    expected = case.triton()
    for name, value in inputs.items():
        if name.startswith(used):
            torch.testing.assert_close(value.grad, expected[f"d{name}"])
        else:
            assert value.grad is None
    assert (backwards[0]["HQ"], backwards[0]["HK"]) == ((4, 0) if used == "q" else (0, 2))


def test_nothing_is_launched_backward_when_nothing_is_trained(device):
    case = make(device=device)
    q, k = kernel(case.q, case.k, case.q_weight, case.k_weight, case.cos, case.sin, eps=1e-6)
    assert not q.requires_grad and not k.requires_grad


def test_sum_as_a_loss(device):
    """Its gradients are one element, expanded."""
    case = make((5,), device=device)
    ones = {"dq_out": torch.ones(()).expand(5, 4, 32), "dk_out": torch.ones(()).expand(5, 2, 32)}
    check(replace(case, **{name: value.to(device) for name, value in ones.items()}))


def test_the_weights_gradients_are_deterministic(device):
    case = make((67,), device=device)
    first, second = case.triton(), case.triton()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_saves_q_k_and_rstd_only(device):
    shapes = []
    case = make((6,), device=device)
    q = case.q.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
        kernel(q, case.k.requires_grad_(), case.q_weight, case.k_weight, case.cos, case.sin, eps=1e-6)
        assert shapes == [(6, 4, 32), (24,), (6, 2, 32), (12,)]
        shapes.clear()
        kernel(q, case.k.detach(), case.q_weight, case.k_weight, case.cos, case.sin, eps=1e-6)
        assert shapes == [(6, 4, 32), (24,)]


@pytest.mark.parametrize("changed", ["q", "q_weight", "cos"])
def test_backward_refuses_what_was_changed_since(changed):
    case = make()
    q_in = torch.randn(6, 4, 32, requires_grad=True) * 1
    q, _ = kernel(q_in, case.k, case.q_weight, case.k_weight, case.cos, case.sin, eps=0.1)
    with torch.no_grad():
        {"q": q_in, "q_weight": case.q_weight, "cos": case.cos}[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()


@pytest.mark.parametrize("constant", [True, False], ids=["constant gradient", "gradient with a graph"])
def test_create_graph_is_refused(constant):
    case = make()
    x = case.q.requires_grad_()
    q, k = kernel(x, case.k, case.q_weight, case.k_weight, case.cos, case.sin, eps=1e-6)
    loss = q.sum() + k.sum() if constant else q.square().sum()
    with pytest.raises(UnsupportedOptionError, match=r"create_graph=True.*rms_norm=False"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_in_a_checkpoint(use_reentrant, device):
    case = make(dtype=torch.bfloat16, device=device)

    def checkpointed(*args, **options):
        return torch.utils.checkpoint.checkpoint(lambda *a: kernel(*a, **options), *args, use_reentrant=use_reentrant)

    found, expected = case.run(checkpointed), case.triton()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_full_graph_compile(device):
    case = make(device=device)
    compiled = torch.compile(qk_norm_rope, fullgraph=True, backend="aot_eager")
    assert_within_budget(case.run(compiled), case.eager(), case.oracle())


# ------------------------------------------------------------------------------------------------ choice and messages


def gpu(arch):
    return assess(DeviceFacts("cuda", arch=arch, sm_count=100), SoftwareFacts("2.13", triton_version="3.9"))


@pytest.mark.parametrize(
    ("capability", "dtypes", "sizes", "expected"),
    [
        (gpu((9, 0)), (torch.bfloat16, torch.float32), {"head_dim": 128, "rotary_dim": 128}, "triton"),
        (gpu((9, 0)), (torch.bfloat16, torch.float64), {"head_dim": 128, "rotary_dim": 128}, "reference"),
        (gpu((9, 0)), (torch.bfloat16,), {"head_dim": 128, "rotary_dim": 128, "num_heads": 64}, "triton"),
        (gpu((9, 0)), (torch.bfloat16,), {"head_dim": 128, "rotary_dim": 128, "num_heads": 65}, "reference"),
        (gpu((9, 0)), (torch.bfloat16,), {"head_dim": 128, "rotary_dim": 96, "num_heads": 64}, "reference"),
        (gpu((7, 5)), (torch.float16, torch.bfloat16), {"head_dim": 64, "rotary_dim": 64}, "reference"),
        (gpu((7, 5)), (torch.float16,), {"head_dim": 64, "rotary_dim": 64}, "triton"),
        (assess(DeviceFacts("cpu"), SoftwareFacts("2.13")), (torch.float32,), {"head_dim": 64, "rotary_dim": 64},
         "reference"),
    ],
)  # fmt: skip
def test_auto_takes_the_first_that_can_run(capability, dtypes, sizes, expected):
    found = verdicts(capability, *dtypes, **sizes)
    assert next(name for name, verdict in found.items() if verdict) == expected
    assert all(verdict.reason for verdict in found.values())


def refused(match: str, error: type[Exception] = KernelInputError, **changes) -> None:
    case = make((5,), 3, 2, 16)
    args = {name: value for name, value in case.tensors().items() if name[1:] not in ("q_out", "k_out")}
    with pytest.raises(error, match=match):
        qk_norm_rope(**{**args, "eps": 1e-6, **changes})


def test_messages_say_what_does_not_fit():
    refused(r"q \[5, 3, 16\] and k \[4, 2, 16\].*different tokens", k=torch.rand(4, 2, 16))
    refused("head dimensions", k=torch.rand(5, 2, 12))
    refused(r"q_weight has shape \[48\] and needs \[16\]", q_weight=torch.ones(48))
    refused(r"k_weight has shape \[16\] and needs \[32\]", q_weight=torch.ones(48), whole_width=True)
    refused(r"cos \[5, 8\] and sin \[5, 4\]", sin=torch.rand(5, 4))
    refused("rotate 32 elements, and head_dim is 16", cos=torch.rand(5, 16), sin=torch.rand(5, 16))
    refused("are for tokens .4., but q and k have .5.", cos=torch.rand(4, 8), sin=torch.rand(4, 8))
    refused("are for tokens .2, 5., but", cos=torch.rand(2, 5, 8), sin=torch.rand(2, 5, 8))
    refused("does not divide the 48 features", q=torch.rand(5, 48), k=torch.rand(5, 32), head_dim=10)
    refused("without head_dim it must be", q=torch.rand(5, 48))
    refused("with head_dim it must be", q=torch.rand(1, 5, 3, 16), head_dim=16)
    refused("has no heads", k=torch.rand(5, 0, 16))
    refused("q is torch.int64", q=torch.ones(5, 3, 16, dtype=torch.int64))
    refused("k_weight is torch.int32", k_weight=torch.ones(16, dtype=torch.int32))
    refused("q is on cpu and q_weight on meta", q_weight=torch.ones(16, device="meta"))
    refused("cos.detach", cos=torch.rand(5, 8, requires_grad=True))
    refused("unknown rounding 't5'.*llama", UnsupportedOptionError, rounding="t5")
    refused("unknown layout 'neox'", UnsupportedOptionError, layout="neox")
    refused("unknown implementation 'cuda'", UnsupportedOptionError, impl="cuda")
    refused("precision of fp64", UnsupportedOptionError, q=torch.rand(5, 3, 16).double(), impl="triton")
    wide = {"q": torch.rand(5, 80, 128), "k": torch.rand(5, 2, 128), "whole_width": True, "impl": "triton"}
    weights = {"q_weight": torch.ones(80 * 128), "k_weight": torch.ones(256)}
    refused(r"80 heads of 128, \d+ elements.*rms_norm and rope_qk", UnsupportedOptionError, **wide, **weights)


def test_compile_cases_name_every_argument():
    for case in compile_cases():
        assert list(case.signature) == list(case.kernel.arg_names)
        assert {name for name, kind in case.signature.items() if kind == "constexpr"} == set(case.constexprs)
