"""Experts under checkpoints, autocast and hooks: what is saved belongs together, and nothing is added twice."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastft.memory.policy import checkpoint_but_products
from fastft.ops import moe
from fastft.ops.moe import ExpertAdapter, ExpertWeights, Gate
from fastft.ops.moe.products import Loop

E, H, WIDTH, T, K, RANK = 4, 16, 24, 40, 2, 8


@pytest.fixture
def layer():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).requires_grad_()

    return {
        "hidden": normal(T, H),
        "topk_weights": torch.rand(T, K, generator=generator).requires_grad_(),
        "gate_up": normal(E, H, 2 * WIDTH, scale=0.3),
        "down": normal(E, WIDTH, H, scale=0.3),
        "gate_up_bias": normal(E, 2 * WIDTH),
        "down_bias": normal(E, H),
        "A1": normal(E, H, RANK, scale=0.3),
        "B1": normal(E, RANK, 2 * WIDTH, scale=0.3),
        "A2": normal(E, WIDTH, RANK, scale=0.3),
        "B2": normal(E, RANK, H, scale=0.3),
    }


def indices(seed=0, tokens=T):
    return torch.rand(tokens, E, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :K]


def run(layer, topk_indices, hidden=None, impl="loop"):
    weights = ExpertWeights(*(layer[name] for name in ("gate_up", "down", "gate_up_bias", "down_bias")))
    adapters = (ExpertAdapter(layer["A1"], layer["B1"], 0.5), ExpertAdapter(layer["A2"], layer["B2"], 2.0))
    hidden = layer["hidden"] if hidden is None else hidden
    return moe.experts(hidden, topk_indices, layer["topk_weights"], weights, Gate("silu"), adapters=adapters, impl=impl)


def gradients(out, layer):
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    return dict(zip(layer, torch.autograd.grad(out, list(layer.values()), upstream), strict=True))


def assert_equal(found, expected):
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("impl", ["loop", "grouped_mm", "reference"])
def test_a_second_forward_that_routes_otherwise_is_consistent_in_itself(layer, impl):
    """As where a router has noise and random numbers are not preserved: the gradient is that of the second forward."""
    other = indices()
    other[7] = (other[7] + 1) % E
    routed = iter((indices(), other))
    out = checkpoint(lambda hidden: run(layer, next(routed), hidden, impl), layer["hidden"], use_reentrant=False)
    found = gradients(out, layer)
    assert_equal(found, gradients(run(layer, other, impl=impl), layer))
    first = gradients(run(layer, indices(), impl=impl), layer)
    assert not torch.allclose(found["hidden"][7], first["hidden"][7])


visibly = Loop.add_matmul_


def past_the_dispatcher(self, out, rows, weight, alpha):
    """As a Triton kernel writes: no mode sees it, and no version counts it."""
    added = out.detach().clone()
    visibly(self, added, rows, weight, alpha)
    out.detach().numpy()[...] = added.numpy()


@pytest.mark.parametrize("impl", ["loop", "grouped_mm"])
def test_adapters_are_not_added_to_a_product_that_a_selective_checkpoint_kept(layer, impl, monkeypatch):
    monkeypatch.setattr(Loop, "add_matmul_", past_the_dispatcher)  # who adds adapters for grouped_mm on a CPU, too
    out = checkpoint_but_products(lambda hidden: run(layer, indices(), hidden, impl), layer["hidden"])
    found = gradients(out, layer)
    monkeypatch.undo()
    assert_equal(found, gradients(run(layer, indices(), impl=impl), layer))


@pytest.mark.parametrize("tokens", [1, T])
def test_one_expert_that_owns_all_rows_under_a_selective_checkpoint(layer, tokens):
    layer = {**layer, "hidden": layer["hidden"][:tokens].detach().requires_grad_()}
    layer["topk_weights"] = layer["topk_weights"][:tokens].detach().requires_grad_()
    one = torch.full((tokens, K), 2)
    out = checkpoint_but_products(lambda hidden: run(layer, one, hidden), layer["hidden"])
    assert_equal(gradients(out, layer), gradients(run(layer, one), layer))


def test_what_a_checkpoint_drops_is_free(layer):
    """Neither the first product nor the factors made for a call may be held until backward."""
    held = []
    for function in (checkpoint, lambda f, x, **_: f(x)):

        def forward(hidden):
            made = {**layer, "B1": layer["B1"] * 1.0}
            return run(made, indices(), hidden)

        out = function(forward, layer["hidden"], use_reentrant=False)
        gc.collect()
        live = [x for x in gc.get_objects() if torch.is_tensor(x)]
        held.append(sum(x.shape in ((T * K, 2 * WIDTH), (E, RANK, 2 * WIDTH)) for x in live))
        del out
    assert held[0] == 1  # B1 itself


@pytest.mark.parametrize("impl", ["loop", "reference", "grouped_mm"])
def test_an_undefined_gradient_stays_with_the_experts_of_its_token(layer, impl):
    topk_indices = torch.full((T, K), 3)
    topk_indices[0] = torch.tensor([0, 1])
    out = run(layer, topk_indices, impl=impl)
    upstream = torch.ones_like(out)
    upstream[0] = torch.nan
    names = ["gate_up_bias", "down_bias", "gate_up", "down"]
    for name, grad in zip(names, torch.autograd.grad(out, [layer[name] for name in names], upstream), strict=True):
        assert grad.flatten(1).isnan().any(1).tolist() == [True, True, False, False], name


def test_backward_under_autocast_is_that_without(layer):
    plain = gradients(run(layer, indices()), layer)
    out = run(layer, indices())
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(out, layer)
    for name in plain:
        assert torch.equal(found[name], plain[name]), name


def test_gradients_lie_in_memory_as_their_weights(layer):
    """Else adding them to `.grad` copies the whole stack."""
    transposed = {**layer, "gate_up": layer["gate_up"].detach().mT.contiguous().mT.requires_grad_()}
    for leaves in (layer, transposed):
        found = gradients(run(leaves, indices()), leaves)
        assert found["gate_up"].stride() == leaves["gate_up"].stride()
    assert transposed["gate_up"].stride() != layer["gate_up"].stride()
