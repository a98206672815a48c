"""Inputs for the tests of the addition fused with an RMSNorm, and how a result is measured, as in rms_norm_cases.py."""

from __future__ import annotations

import torch
from budget import assert_within_budget
from rms_norm_cases import EPS, make

from fastft.ops.rms_norm import add_rms_norm, reference

NAMES = ("x", "residual", "weight", "dh", "dy")


def inputs(shape, dtypes="bf16", device="cpu", rounding="llama"):
    """Tensors by name; the residual stream is larger than what a layer adds to it."""
    x, weight, dy = make(shape, dtypes, device, rounding=rounding)
    residual, _, dh = make(shape, dtypes, device, scale=3.0)
    return dict(zip(NAMES, (x, residual, weight, dh, dy), strict=True))


def kernel(x, residual, weight, eps, rounding):
    return add_rms_norm(x, residual, weight, eps, rounding=rounding, impl="triton")


def run(function, case, rounding="llama", eps=EPS, used="hy", trained=("x", "residual", "weight")):
    """Outputs and gradients; incoming gradients come in whatever dtype and are given in the outputs'."""
    leaves = {name: case[name] for name in ("x", "residual", "weight") if case[name] is not None}
    leaves = {name: leaf.detach().requires_grad_(name in trained) for name, leaf in leaves.items()}
    h, y = function(leaves["x"], leaves["residual"], leaves.get("weight"), eps, rounding)
    outputs = {name: output for name, output in (("h", h), ("y", y)) if name in used}
    torch.autograd.backward(
        list(outputs.values()), [case[f"d{name}"].to(output.dtype) for name, output in outputs.items()]
    )
    gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"h": h.detach(), "y": y.detach()} | gradients


def measure(case, rounding="llama", eps=EPS, **options):
    """(kernel, eager, oracle)"""
    eager = run(reference.add_rms_norm, case, rounding, eps, **options)
    rounded = case | {"dh": case["dh"].to(eager["h"].dtype), "dy": case["dy"].to(eager["y"].dtype)}
    wide = {name: None if tensor is None else tensor.double() for name, tensor in rounded.items()}
    oracle = run(reference.add_rms_norm, wide, rounding, eps, **options)
    found = run(kernel, case, rounding, eps, **options)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in eager.items()}
    return found, eager, oracle


def check(*args, **options):
    found, eager, oracle = measure(*args, **options)
    assert_within_budget(found, eager, oracle)
    return found
