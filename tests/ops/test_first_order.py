"""Ops without a second derivative refuse create_graph=True, whatever gradient arrives."""

from __future__ import annotations

import pytest
import torch

from fastft.errors import UnsupportedOptionError
from fastft.ops.lora_linear import lora_linear
from fastft.ops.rms_norm import rms_norm


def _lora(x: torch.Tensor) -> torch.Tensor:
    return lora_linear(x, torch.ones(6, 8), None, torch.ones(2, 8), torch.ones(6, 2), 0.5, impl="fused")


def _norm(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, torch.ones(8), 1e-6, impl="triton")


@pytest.mark.parametrize(("op", "option"), [(_lora, "lora"), (_norm, "rms_norm")], ids=["lora", "rms_norm"])
@pytest.mark.parametrize("constant", [True, False], ids=["constant dy", "dy with a graph"])
def test_create_graph_is_refused(op, option, constant):
    x = torch.randn(3, 8, requires_grad=True)
    loss = op(x).sum() if constant else op(x).square().sum()
    with pytest.raises(UnsupportedOptionError, match=f"create_graph=True.*{option}=False"):
        torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(op(x).sum(), x)
