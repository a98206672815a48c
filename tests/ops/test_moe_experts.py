"""The experts of a sparse layer against a loop over experts in fp64: outputs and every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from budget import assert_mutant_caught
from expert_cases import (
    CASES,
    GATES,
    Case,
    check,
    compare,
    draw,
    draw_positive,
    results,
    run_loop,
    run_ours,
    wide,
)
from interpreter import run_kernels_as_a_gpu_would

from fastft.errors import KernelInputError, UnsupportedOptionError
from fastft.ops import moe


@pytest.fixture(autouse=True)
def kernels_can_run(request, monkeypatch, poisoned_empty):
    run_kernels_as_a_gpu_would(request, monkeypatch)


COMBINATIONS = [
    *(("reference", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *(("loop", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    ("grouped_mm", torch.bfloat16),  # what PyTorch's is made for
    *(("triton", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]


def name_of(value):
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("impl", "dtype"), COMBINATIONS, ids=name_of)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_a_loop(name, impl, dtype, device):
    case = replace(CASES[name], dtype=dtype)
    if impl == "grouped_mm":
        case = replace(case, width=case.width + -case.width % 8)
    check(case, device, impl)


@pytest.mark.parametrize("impl", ["reference", "loop", "triton"])
@pytest.mark.parametrize("name", ["interleaved", "adapters and biases", "all to one"])
def test_large_sums_are_no_chains(name, impl, device):
    """In fp32 a chain of products errs more than eager's sums do; what cancels hides it."""
    case = replace(CASES[name], tokens=149)
    compare(case, impl, [draw_positive(case, device, seed) for seed in range(2)], positive=True)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("trained", ["hidden", "topk_weights", "gate_up", "down", "down_bias", "A1", "B2"])
def test_each_gradient_alone_is_the_same(trained, impl, device):
    case = Case(rank=8, bias=True)
    leaves, topk_indices = draw(case, device)
    frozen = leaves.keys() - {trained}
    alone = results(run_ours, case, leaves, topk_indices, frozen, impl=impl)
    together = results(run_ours, case, leaves, topk_indices, impl=impl)
    assert torch.equal(alone[trained], together[trained])


def test_a_loop_that_forgets_weights_is_another_thing(device):
    case = Case()
    leaves, topk_indices = draw(case, device)
    oracle = results(run_loop, *wide(case, leaves), topk_indices, ("topk_weights",))
    eager = results(run_loop, case, leaves, topk_indices, ("topk_weights",))
    mutant = results(run_loop, case, leaves, topk_indices, ("topk_weights",), forget_weight=True)
    assert_mutant_caught(mutant, eager, oracle)


@pytest.mark.parametrize("impl", ["reference", "loop", "triton"])
def test_no_tokens_give_trained_experts_gradients_of_zero(impl, device):
    case = Case(tokens=0)
    leaves, topk_indices = draw(case, device)
    found = results(run_ours, case, leaves, topk_indices, impl=impl)
    assert found["out"].shape == (0, 24)
    assert not found["gate_up"].any() and not found["down"].any()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_idle_experts_get_gradients_of_zero(impl, device):
    case = Case(routing="one")
    leaves, topk_indices = draw(case, device)
    found = results(run_ours, case, leaves, topk_indices, impl=impl)
    idle = [expert for expert in range(case.experts) if expert != case.experts // 2]
    assert not found["gate_up"][idle].any() and found["gate_up"][case.experts // 2].any()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_strided_and_expanded_inputs(impl, device):
    case = Case(tokens=16)
    leaves, topk_indices = draw(case, device)
    plain = run_ours(case, leaves, topk_indices, impl)
    strided = dict(leaves)
    strided["hidden"] = torch.stack((leaves["hidden"], torch.full_like(leaves["hidden"], torch.nan)), -1)[..., 0]
    strided["topk_weights"] = leaves["topk_weights"].t().contiguous().t()
    assert torch.equal(run_ours(case, strided, topk_indices.t().contiguous().t().int(), impl), plain)
    hidden = leaves["hidden"].clone().requires_grad_()
    out = run_ours(case, {**leaves, "hidden": hidden}, topk_indices, impl)
    (expanded,) = torch.autograd.grad(out, hidden, torch.ones((), device=device).expand_as(out), retain_graph=True)
    (dense,) = torch.autograd.grad(out, hidden, torch.ones_like(out))
    assert torch.equal(expanded, dense)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_what_is_saved(impl, device):
    """The input, the pre-activation, the routing: no gathered rows, no activation, no output of an expert."""
    case = Case(tokens=64, hidden=32, width=16, choices=4)
    leaves, topk_indices = draw(case, device)
    for name in ("hidden", "topk_weights", "gate_up"):
        leaves[name].requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        run_ours(case, leaves, topk_indices, impl)
    shapes = sorted(tuple(x.shape) for x in saved)
    routing = [(64, 4), (64 * 4,), (64 * 4,), (5,)]  # integers: indices, pairs, rows, offsets
    assert shapes == sorted([(64, 32), (64, 4), (64 * 4, 2 * 16), *routing])
    assert sum(x.is_floating_point() for x in saved) == 3


def test_a_checkpoint_runs_only_the_first_product_again(device):
    """Of what follows nothing is saved, and so nothing is made again."""
    case = Case()
    leaves, topk_indices = draw(case, device)
    leaves["hidden"].requires_grad_()
    counted = []
    original = moe.reference.combine_rows

    def combine(rows, order, topk_weights, *rest):
        counted.append("out" if topk_weights is not None else "grad")
        return original(rows, order, topk_weights, *rest)

    moe.api._pieces.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe.reference, "combine_rows", combine)
        out = torch.utils.checkpoint.checkpoint(
            lambda hidden: run_ours(case, {**leaves, "hidden": hidden}, topk_indices, "reference"),
            leaves["hidden"],
            use_reentrant=False,
        )
        out.sum().backward()
    moe.api._pieces.cache_clear()
    assert counted == ["out", "grad"]


def test_backward_twice_and_through_two_calls(device):
    case = Case(rank=8)
    leaves, topk_indices = draw(case, device)
    hidden = leaves["hidden"].clone().requires_grad_()
    own = {**leaves, "hidden": hidden}
    out = run_ours(case, own, topk_indices, "reference") + run_ours(case, own, topk_indices, "reference")
    (first,) = torch.autograd.grad(out.sum(), hidden, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), hidden)
    assert torch.equal(first, second)
    alone = run_ours(case, own, topk_indices, "reference")
    assert torch.equal(2 * torch.autograd.grad(alone.sum(), hidden)[0], first)


def test_a_weight_written_between_forward_and_backward_is_noticed(device):
    case = Case()
    leaves, topk_indices = draw(case, device)
    leaves["hidden"].requires_grad_()
    out = run_ours(case, leaves, topk_indices, "reference")
    leaves["down"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused(device):
    case = Case()
    leaves, topk_indices = draw(case, device)
    leaves["hidden"].requires_grad_()
    out = run_ours(case, leaves, topk_indices, "reference")
    with pytest.raises(UnsupportedOptionError, match="experts=False"):
        torch.autograd.grad(out.sum(), leaves["hidden"], create_graph=True)


def test_bad_input_is_refused(device):
    case = Case(rank=8)
    leaves, topk_indices = draw(case, device)
    for name, wrong, message in (
        ("hidden", leaves["hidden"].double(), "hidden is torch.float64"),
        ("down", leaves["down"][:, :, 1:], "weights.down"),
        ("A2", leaves["A2"][..., 1:], "down.B"),
        ("topk_weights", leaves["topk_weights"][:, 1:], "topk_weights"),
    ):
        with pytest.raises(KernelInputError, match=message):
            run_ours(case, {**leaves, name: wrong}, topk_indices, "reference")


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("gate", GATES)
def test_infinite_and_undefined_numbers_stay_with_their_tokens(gate, impl, device):
    """They come out as stock has them, and nobody else sees them."""
    case = Case(tokens=9, gate=gate, width=16)
    leaves, topk_indices = draw(case, device)
    plain = run_ours(case, leaves, topk_indices, impl)
    for number in (float("inf"), float("-inf"), float("nan")):
        hidden = leaves["hidden"].clone()
        hidden[4, 3] = number
        found = run_ours(case, {**leaves, "hidden": hidden}, topk_indices, impl)
        expected = run_loop(case, {**leaves, "hidden": hidden}, topk_indices)
        others = [token for token in range(9) if token != 4]
        assert torch.equal(found[others], plain[others])
        assert torch.equal(found[4].isnan(), expected[4].isnan()) and not found[4].isfinite().any()
