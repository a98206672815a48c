"""Gradients of RoPE: launches, incoming gradients of any kind, frozen inputs, second derivatives, refused writes."""

from __future__ import annotations

import functools

import pytest
import torch
from interpreter import run_kernels_as_a_gpu_would
from rope_cases import make_case, record_launches

from fastft.errors import KernelInputError
from fastft.ops.rope import rope_qk, rope_qk_
from fastft.ops.rope.reference import rope_qk_reference


@pytest.fixture(autouse=True)
def as_on_a_gpu(request, monkeypatch):
    run_kernels_as_a_gpu_would(request, monkeypatch)


# ------------------------------------------------------------------------------------------------ gradients


def test_one_launch_forward_and_one_backward(device, monkeypatch):
    launches = record_launches(monkeypatch)
    make_case((5,), device=device).triton()
    assert [(launch["HQ"], launch["HK"], launch["INVERSE"]) for launch in launches] == [
        (3, 2, False),
        (3, 2, True),
    ]


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_sum_as_a_loss(device, impl):
    """Its gradients are one element, expanded: a kernel that writes into them, or assumes strides, gets them wrong."""
    case = make_case((5,), device=device)
    q, k = case.q.requires_grad_(), case.k.requires_grad_()
    out = rope_qk(q, k, case.cos, case.sin, impl=impl)
    (out[0].sum() + out[1].sum()).backward()
    expected_q, expected_k = q.detach().clone().requires_grad_(), k.detach().clone().requires_grad_()
    out = rope_qk_reference(expected_q, expected_k, case.cos, case.sin)
    (out[0] * torch.ones_like(out[0])).sum().backward()
    (out[1] * torch.ones_like(out[1])).sum().backward()
    assert torch.equal(q.grad, expected_q.grad) and torch.equal(k.grad, expected_k.grad)


def test_incoming_gradients_are_never_written(device):
    case = make_case((5,), device=device)
    q, k = case.q.requires_grad_(), case.k.requires_grad_()
    shared = torch.randn(5, 3, 16, device=device)
    before = shared.clone()
    out_q, out_k = rope_qk(q, k, case.cos, case.sin, impl="triton")
    extra = q * 1  # a sibling that receives the very same gradient tensor
    torch.autograd.backward((out_q, extra, out_k), (shared, shared, case.dk))
    assert torch.equal(shared, before)


@pytest.mark.parametrize("used", ["q", "k"])
def test_an_unused_output_costs_nothing(device, used, monkeypatch):
    launches = record_launches(monkeypatch)
    case = make_case((5,), device=device)
    q, k = case.q.requires_grad_(), case.k.requires_grad_()
    out = dict(zip("qk", rope_qk(q, k, case.cos, case.sin, impl="triton"), strict=True))
    out[used].backward(getattr(case, f"d{used}"))
    assert {"q": q.grad, "k": k.grad}["k" if used == "q" else "q"] is None
    assert (launches[-1]["HQ"], launches[-1]["HK"]) == ((3, 0) if used == "q" else (2, 0))


@pytest.mark.parametrize("frozen", ["q", "k"])
def test_a_frozen_input_costs_nothing(device, frozen, monkeypatch):
    launches = record_launches(monkeypatch)
    case = make_case((5,), device=device)
    trained = case.q if frozen == "k" else case.k
    trained.requires_grad_()
    out_q, out_k = rope_qk(case.q, case.k, case.cos, case.sin, impl="triton")
    torch.autograd.backward((out_q, out_k), (case.dq, case.dk))
    assert trained.grad is not None and launches[-1]["HK"] == 0


def test_no_gradient_no_launch(device, monkeypatch):
    launches = record_launches(monkeypatch)
    case = make_case((5,), device=device)
    q, _ = rope_qk(case.q, case.k, case.cos, case.sin, impl="triton")
    assert not q.requires_grad and len(launches) == 1


@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
def test_double_backward(device, in_place):
    case = make_case((3,), device=device)

    def second_gradient(rope):
        q, k = case.q.detach().requires_grad_(), case.k.detach().requires_grad_()
        out_q, out_k = rope(q * 1, k * 1, case.cos, case.sin)
        dq, dk = torch.autograd.grad(out_q.pow(3).sum() + out_k.pow(2).sum(), (q, k), create_graph=True)
        return torch.autograd.grad((dq * case.dq).sum() + (dk * case.dk).sum(), (q, k))

    fused = second_gradient(functools.partial(rope_qk_ if in_place else rope_qk, impl="triton"))
    for got, expected in zip(fused, second_gradient(rope_qk_reference), strict=True):
        torch.testing.assert_close(got, expected)


# ------------------------------------------------------------------------------------------------ refusals


def refused(match: str, q: torch.Tensor, k: torch.Tensor, **options) -> None:
    before = q.detach().clone(), k.detach().clone()
    tokens = q.shape[0]
    angles = torch.rand(tokens, 4)
    with pytest.raises(KernelInputError, match=match):
        rope_qk_(q, k, angles, angles, **options)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


def test_refusals_come_before_the_write_and_name_the_reason():
    q, k = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
    refused("q cannot be written.*leaf that requires grad", q.clone().requires_grad_(), k)
    refused("k cannot be written.*view of, a leaf", q, torch.randn(5, 4, 8, requires_grad=True)[:, :2])
    refused("k cannot be written.*share memory", q, torch.randn(5, 1, 8).expand(5, 2, 8))
    refused("share memory", torch.randn(64).as_strided((5, 4, 8), (4, 8, 1)), k)
    refused("q and k share memory", q, q)
    refused("q and k share memory", q, q[:, 1:3])
    refused("MULTI_OUTPUT_NODE", *(torch.randn(5, 6, 8, requires_grad=True) * 1).split([4, 2], dim=1))
    with torch.inference_mode():
        frozen = torch.randn(5, 4, 8)
    refused("made in inference mode", frozen, k)
    with torch.no_grad():
        made_without_grad = (torch.randn(5, 4, 8, requires_grad=True))[:]
    refused("leaf", made_without_grad.requires_grad_(False), k)


@pytest.mark.parametrize("tokens", [1, 5])
def test_neighbours_in_one_buffer_may_be_written(device, tokens):
    for fused in (torch.randn(tokens, 6, 8, device=device), torch.randn(tokens, 9, 8, device=device)[:, 1:7]):
        expected = fused.clone()
        angles = torch.rand(tokens, 4, device=device)
        first, second = rope_qk_reference(expected[:, 2:], expected[:, :2], angles.cos(), angles.sin())
        rope_qk_(fused[:, 2:], fused[:, :2], angles.cos(), angles.sin(), impl="triton")
        assert torch.equal(fused, torch.cat((second, first), dim=1))
