"""Tensors kept on an autograd node: same protection as saved ones, and invisible to saved-tensor hooks."""

from __future__ import annotations

import pytest
import torch

from fastft.ops.kept import KeptTensors
from fastft.ops.lora_linear import lora_linear
from fastft.ops.rms_norm import rms_norm
from fastft.ops.rope import rope_qk


def test_an_in_place_write_between_forward_and_backward_is_noticed() -> None:
    weight = torch.ones(3)
    kept = KeptTensors((weight, None))
    assert kept.unchanged() == (weight, None)
    weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\(3,\).*version 1, expected 0"):
        kept.unchanged()


def test_inference_tensors_carry_no_version_and_are_kept() -> None:
    with torch.inference_mode():
        weight = torch.ones(3)
    assert KeptTensors((weight,)).unchanged()[0] is weight


def _saved_by(run) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return shapes


def test_ops_save_activations_only() -> None:
    x = torch.randn(5, 8, requires_grad=True)
    weight, lora_A, lora_B = torch.randn(6, 8), torch.randn(2, 8, requires_grad=True), torch.randn(6, 2)
    assert _saved_by(lambda: lora_linear(x, weight, None, lora_A, lora_B, 0.5)) == [(5, 8)]
    lora_B.requires_grad_()
    assert _saved_by(lambda: lora_linear(x, weight, None, lora_A, lora_B, 0.5)) == [(5, 8), (5, 2)]
    assert _saved_by(lambda: rms_norm(x, torch.ones(8), 1e-6, impl="triton")) == [(5, 8), (5,)]
    q, angles = torch.randn(5, 2, 4, requires_grad=True), torch.randn(5, 2)
    assert _saved_by(lambda: rope_qk(q, q, angles, angles, impl="triton")) == []


@pytest.mark.parametrize("changed", ["weight", "lora_A", "lora_B", "norm", "cos"])
def test_backward_refuses_changed_parameters(changed: str) -> None:
    x = torch.randn(5, 8, requires_grad=True)
    weight, norm, cos = torch.randn(8, 8), torch.ones(8), torch.randn(5, 2)
    lora_A, lora_B = torch.randn(2, 8, requires_grad=True), torch.randn(8, 2)
    y = lora_linear(x, weight, None, lora_A, lora_B, 0.5)
    z = rms_norm(y, norm, 1e-6, impl="triton")
    out, _ = rope_qk(z.view(5, 2, 4), z.view(5, 2, 4), cos, cos, impl="triton")
    with torch.no_grad():
        {"weight": weight, "lora_A": lora_A, "lora_B": lora_B, "norm": norm, "cos": cos}[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
