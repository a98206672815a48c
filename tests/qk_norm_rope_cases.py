"""QK-norm and RoPE as tests draw them, with the Hugging Face formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from budget import assert_within_budget
from rope_cases import hf_rope

from fastft.ops.qk_norm_rope import qk_norm_rope
from fastft.ops.rms_norm import rms_norm

INPUTS = ("q", "k", "q_weight", "k_weight")
ROUNDINGS = ["llama", "fp32_weight", "gemma"]
LAYOUTS = ["half", "interleaved"]
DTYPES = [pytest.param(dtype, id=str(dtype).split(".")[1]) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
Op = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """Inputs, upstream gradients (given in the outputs' dtype) and options."""

    q: torch.Tensor
    k: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    dq_out: torch.Tensor
    dk_out: torch.Tensor
    options: dict = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def run(self, op: Op, trained: tuple[str, ...] = INPUTS) -> dict[str, torch.Tensor]:
        """Outputs, and the gradients of what is trained; strides are kept."""
        inputs = {name: getattr(self, name).detach().requires_grad_(name in trained) for name in INPUTS}
        out = op(*inputs.values(), self.cos, self.sin, **self.options)
        upstream = [g.to(x.dtype) for g, x in zip((self.dq_out, self.dk_out), out, strict=True)]
        needing = [(x, g) for x, g in zip(out, upstream, strict=True) if x.requires_grad]
        torch.autograd.backward(*zip(*needing, strict=True))
        gradients = {f"d{name}": inputs[name].grad for name in trained}
        return {"q_out": out[0].detach(), "k_out": out[1].detach(), **gradients}

    def triton(self, **changes) -> dict[str, torch.Tensor]:
        return replace(self, **changes).run(kernel)

    def eager(self) -> dict[str, torch.Tensor]:
        return self.run(hugging_face)

    def oracle(self) -> dict[str, torch.Tensor]:
        wide = {name: value.double() for name, value in self.tensors().items()}
        out = self.run(hugging_face)  # to whose dtype upstream gradients are rounded in the other runs
        wide |= {f"d{name}": getattr(self, f"d{name}").to(out[name].dtype).double() for name in ("q_out", "k_out")}
        return replace(self, **wide).run(reference)


def kernel(*args, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return qk_norm_rope(*args, impl="triton", **options)


def reference(*args, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return qk_norm_rope(*args, impl="reference", **options)


def hugging_face(
    q, k, q_weight, k_weight, cos, sin, eps, rounding="llama", head_dim=None, layout="half", whole_width=False
):
    """The modules' own composition, every operation in the dtype of its inputs."""
    out = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        heads = x if head_dim is None else x.unflatten(-1, (-1, head_dim))
        rows = heads.flatten(-2) if whole_width else heads
        normed = rms_norm(rows, weight, eps, rounding=rounding, impl="reference").reshape(heads.shape)
        angles = (table[0] if table.ndim == heads.ndim else table for table in (cos, sin))
        out.append(hf_rope(normed, *angles, layout).reshape(x.shape))
    return tuple(out)


def make(
    tokens: tuple[int, ...] = (6,),
    num_q_heads: int = 4,
    num_k_heads: int = 2,
    head_dim: int = 32,
    rotary: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    angle_dims: tuple[int, ...] | None = None,
    eps: float = 1e-6,
    **options,
) -> Case:
    """Tokens of very different upstream gradients, so that a wrong one cannot hide behind the others."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    def upstream(*shape: int) -> torch.Tensor:
        return random(*tokens, *shape) * torch.logspace(-0.5, 0.5, tokens[-1], device=device)[:, None, None]

    def weight(heads: int) -> torch.Tensor:
        width = heads * head_dim if options.get("whole_width") else head_dim
        return (random(width) * 0.3 + (options.get("rounding") != "gemma")).to(weight_dtype or dtype)

    angles = torch.rand(*(angle_dims or tokens), (rotary or head_dim) // 2, device=device) * 6.3
    return Case(
        random(*tokens, num_q_heads, head_dim).to(dtype), random(*tokens, num_k_heads, head_dim).to(dtype),
        weight(num_q_heads), weight(num_k_heads), angles.cos().to(dtype), angles.sin().to(dtype),
        upstream(num_q_heads, head_dim), upstream(num_k_heads, head_dim), {"eps": eps, **options},
    )  # fmt: skip


def check(case: Case) -> None:
    found, eager = case.triton(), case.eager()
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in eager.items()}
    assert found["q_out"].is_contiguous() and found["k_out"].is_contiguous()
    assert_within_budget(found, eager, case.oracle())
