"""Inputs for the RMSNorm tests, and how a result is measured against the oracle and against eager torch."""

from __future__ import annotations

import torch
from budget import assert_within_budget

from fastft.ops.rms_norm import reference, rms_norm

EPS = 1e-6
ROUNDINGS = ("llama", "fp32_weight", "gemma")
# x dtype, weight dtype
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16_fp32": (torch.bfloat16, torch.float32),
    "fp32_bf16": (torch.float32, torch.bfloat16),
}


def make(shape, dtypes="bf16", device="cpu", scale=1.0, rounding="llama"):
    x_dtype, weight_dtype = DTYPES[dtypes]
    x = (torch.randn(shape) * scale).to(device, x_dtype)
    weight = (torch.randn(shape[-1]) * 0.3 + (rounding != "gemma")).to(device, weight_dtype)
    # Rows of very different size, so that a wrong row cannot hide behind the others.
    dy = torch.randn(shape) * torch.logspace(-1, 1, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return x, weight, dy.to(device)


def run(function, x, weight, dy, rounding, eps=EPS):
    """Output and gradients; dy comes in whatever dtype and is given in the output's."""
    x = x.detach().requires_grad_()
    weight = weight.detach().requires_grad_() if weight is not None else None
    y = function(x, weight, eps, rounding)
    y.backward(dy.to(y.dtype))
    found = {"y": y, "dx": x.grad}
    return found if weight is None else found | {"dweight": weight.grad}


def kernel(x, weight, eps, rounding):
    return rms_norm(x, weight, eps, rounding=rounding, impl="triton")


def oracle_and_eager(x, weight, dy, rounding, eps=EPS):
    wide_weight = weight.double() if weight is not None else None
    eager = run(reference.rms_norm, x, weight, dy, rounding, eps)
    dy = dy.to(eager["y"].dtype)
    return run(reference.rms_norm, x.double(), wide_weight, dy.double(), rounding, eps), eager


def measure(x, weight, dy, rounding, eps=EPS):
    oracle, eager = oracle_and_eager(x, weight, dy, rounding, eps)
    found = run(kernel, x, weight, dy, rounding, eps)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in eager.items()}
    return found, eager, oracle


def check(*args, **kwargs):
    assert_within_budget(*measure(*args, **kwargs))
