"""Inputs of the rope tests, and the three computations they compare: candidate, same-dtype eager, fp64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from fastft.ops.rope import launch, rope_qk, rope_qk_
from fastft.ops.rope.reference import rope_qk_reference


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """A list that gets the constants of every kernel launch of the test."""
    launches: list[dict] = []
    launched = launch._launch

    def recording(programs, pointers, numbers, constants):
        launches.append(constants)
        launched(programs, pointers, numbers, constants)

    monkeypatch.setattr(launch, "_launch", recording)
    return launches


def hf_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """The Hugging Face formula in the dtype of its arguments; x [..., H, D], cos and sin [..., R/2]."""
    half = cos.shape[-1]
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    if layout == "half":
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        turned = torch.cat((-rotary[..., half:], rotary[..., :half]), dim=-1)
    else:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        turned = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((rotary * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2), rest), dim=-1)


@dataclass(frozen=True)
class Case:
    """q, k, the angles of every token, upstream gradients."""

    q: torch.Tensor
    k: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    layout: str = "half"
    options: dict = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> Case:
        tensors = {name: getattr(self, name).to(dtype) for name in ("q", "k", "cos", "sin", "dq", "dk")}
        return replace(self, **tensors)

    def run(self, rope: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Outputs and gradients of `rope(q, k, cos, sin, layout=..., **options)`; strides of q and k are kept."""
        q, k = self.q.detach().requires_grad_(), self.k.detach().requires_grad_()
        out_q, out_k = rope(q, k, self.cos, self.sin, layout=self.layout, **self.options)
        dq, dk = torch.autograd.grad((out_q, out_k), (q, k), (self.dq, self.dk))
        return {"q": out_q.detach(), "k": out_k.detach(), "dq": dq, "dk": dk}

    def triton(self) -> dict[str, torch.Tensor]:
        return self.run(lambda *args, **kwargs: rope_qk(*args, **kwargs, impl="triton"))

    def triton_in_place(self) -> dict[str, torch.Tensor]:
        # x * 1 stands for the producer: a leaf cannot be written.
        return self.run(lambda q, k, *args, **kwargs: rope_qk_(q * 1, k * 1, *args, **kwargs, impl="triton"))

    def eager(self) -> dict[str, torch.Tensor]:
        def rope(q, k, cos, sin, layout, head_dim=None):
            heads = [x if head_dim is None else x.unflatten(-1, (-1, head_dim)) for x in (q, k)]
            cos, sin = (x[0] if x.ndim == heads[0].ndim else x for x in (cos, sin))
            out = [hf_rope(x, cos, sin, layout) for x in heads]
            return out if head_dim is None else [x.flatten(-2) for x in out]

        return self.run(rope)

    def oracle(self) -> dict[str, torch.Tensor]:
        return self.to(torch.float64).run(rope_qk_reference)


def make_case(
    tokens: tuple[int, ...] = (5,),
    num_q_heads: int = 3,
    num_k_heads: int = 2,
    head_dim: int = 16,
    rotary: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "half",
    angle_dims: tuple[int, ...] | None = None,
) -> Case:
    """A case with random angles, a different one for every token, and random upstream gradients."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    angles = torch.rand(*(angle_dims or tokens), (rotary or head_dim) // 2, device=device) * 6.3
    q_shape, k_shape = (*tokens, num_q_heads, head_dim), (*tokens, num_k_heads, head_dim)
    return Case(
        random(*q_shape), random(*k_shape), angles.cos().to(dtype), angles.sin().to(dtype),
        random(*q_shape), random(*k_shape), layout,
    )  # fmt: skip
