"""Packed attention by the book: one dense masked softmax a document, in fp64 (the oracle) or in the case's dtype.

The budget of the fused engines is torch's own fused attention, which is what a model runs without fastft: on a GPU in
half precision its FlashAttention-2, one call a document (as stock padding-free batches), elsewhere one call under one
mask over all tokens. The plain softmax would be the wrong yardstick for the error of a row: where the true dq is zero
or nearly so (a query that sees one or two keys), it cancels exactly, while every flash backward subtracts two sums that
round differently. Over all rows, in the largest and the mean error, half precision has to keep the plain softmax's
budget as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.attention
from budget import assert_within_budget, budget_violations

from fastft.ops.attention import fa2, varlen_attention
from fastft.packing import PackedSequences

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Case:
    """Tensors and options of one call, and the gradient that arrives at its output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    lengths: tuple[int, ...]
    causal: bool = True
    window_size: Window = (None, None)
    softmax_scale: float | None = None
    packed: PackedSequences = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", PackedSequences.from_lengths(self.lengths, self.q.device))

    def run(self, impl: str, packed: PackedSequences | None = None, **options) -> dict[str, torch.Tensor]:
        """Output and gradients of an engine."""
        q, k, v = _leaves(self.q, self.k, self.v)
        options = {
            "causal": self.causal, "window_size": self.window_size, "softmax_scale": self.softmax_scale, **options,
        }  # fmt: skip
        out = varlen_attention(q, k, v, packed or self.packed, impl=impl, **options)
        return _named(out, q, k, v, self.grad)

    def eager(self) -> dict[str, torch.Tensor]:
        q, k, v = _leaves(self.q, self.k, self.v)
        return _named(self._dense(q, k, v), q, k, v, self.grad)

    def fused(self) -> dict[str, torch.Tensor]:
        q, k, v = _leaves(self.q, self.k, self.v)
        flash = q.is_cuda and q.dtype is not torch.float32 and q.shape[2] <= fa2.MAX_HEAD_DIM
        if flash and self.window_size == (None, None):
            return _named(self._flash(q, k, v), q, k, v, self.grad)
        group, allowed = q.shape[1] // k.shape[1], torch.block_diag(*(self._seen(length) for length in self.lengths))
        queries, keys, values = (
            x.repeat_interleave(repeats, dim=1).transpose(0, 1)[None] for x, repeats in ((q, 1), (k, group), (v, group))
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, allowed.bool().to(q.device), scale=self.softmax_scale
        )
        return _named(out[0].transpose(0, 1), q, k, v, self.grad)

    def _flash(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        parts = [q[:0] * 1.0]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            for document in zip(*(x.contiguous().split(self.lengths) for x in (q, k, v)), strict=True):
                if not len(document[0]):
                    continue
                queries, keys, values = (x.clone().transpose(0, 1)[None] for x in document)
                out = torch.nn.functional.scaled_dot_product_attention(
                    queries, keys, values, is_causal=self.causal, scale=self.softmax_scale
                )
                parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    def assert_within_budget(self, impl: str, got: dict[str, torch.Tensor]) -> None:
        eager, oracle = self.eager(), self.oracle()
        yardstick = eager if impl == "reference" else self.fused()
        if max(self.lengths) == 1 or (self.causal and self.window_size[0] == 0) or self.window_size == (0, 0):
            # A softmax over one key has no gradient, so there is no typical size to measure its noise against.
            for name in ("dq", "dk"):
                assert got[name].abs().max().item() < 1e-4
            got = {name: got[name] for name in ("out", "dv")}
        # A row is a token: one head alone may put all its weight on one key, and then has next to no gradient.
        rows = [{name: every[name].flatten(1) for name in got} for every in (got, yardstick, oracle)]
        assert [every.shape for every in got.values()] == [oracle[name].shape for name in got]
        assert_within_budget(*rows)
        if impl != "reference" and self.q.dtype is not torch.float32:
            violations = budget_violations(got, *({name: every[name] for name in got} for every in (eager, oracle)))
            assert not [each for each in violations if " row error " not in each]

    def assert_mutant_caught(self, impl: str, mutant: dict[str, torch.Tensor]) -> None:
        with pytest.raises(pytest.fail.Exception, match="error budget exceeded"):
            self.assert_within_budget(impl, mutant)

    def oracle(self) -> dict[str, torch.Tensor]:
        q, k, v = (x.double() for x in _leaves(self.q, self.k, self.v))
        return _named(self._dense(q, k, v), q, k, v, self.grad.double())

    def _dense(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group, scale = q.shape[1] // k.shape[1], self.softmax_scale or q.shape[2] ** -0.5
        parts, start = [q[:0] * 1.0], 0
        for length in self.lengths:
            rows = slice(start, start + length)
            queries, keys, values = (x[rows].transpose(0, 1) for x in (q, k, v))
            keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
            scores = (queries @ keys.mT * scale).masked_fill(~self._seen(length).to(q.device), float("-inf"))
            weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
            parts.append((weights @ values).transpose(0, 1))
            start += length
        return torch.cat(parts)

    def _seen(self, length: int) -> torch.Tensor:
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]  # of a key from its query
        left, right = self.window_size
        seen = torch.ones(length, length, dtype=torch.bool)
        if self.causal:
            seen &= distance <= 0
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
        return seen

    def with_other_numbers_in(self, rows: slice) -> Case:
        """The same case with other q, k and v in some rows."""

        def changed(x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            x[rows] = torch.randn_like(x[rows]) * 3
            return x

        return replace(self, q=changed(self.q), k=changed(self.k), v=changed(self.v))


def _leaves(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of the same memory, with the same strides, that collect gradients."""
    return tuple(x.detach().requires_grad_() for x in tensors)


def _named(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> dict:
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def make_case(
    lengths: tuple[int, ...],
    *,
    heads: int = 4,
    key_heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "contiguous",
    **options,
) -> Case:
    """Random tensors; `layout` says how they lie in memory: "contiguous", "fused" (views of one projection's output),
    "transposed" (as a model passes them, from [B, H, L, D]) or "odd" (starting anywhere, rows of odd width)."""
    tokens = sum(lengths)
    shapes = [(tokens, heads, head_dim), (tokens, key_heads, head_dim), (tokens, key_heads, head_dim)]
    if layout == "fused":
        fused = torch.randn(tokens, heads + 2 * key_heads, head_dim, device=device, dtype=dtype)
        q, k, v = fused.split([heads, key_heads, key_heads], dim=1)
    elif layout == "transposed":
        q, k, v = (
            torch.randn(1, h, t, d, device=device, dtype=dtype).transpose(1, 2).flatten(0, 1) for t, h, d in shapes
        )
    elif layout == "odd":
        q, k, v = (torch.randn(t, h, d + 1, device=device, dtype=dtype)[..., 1:] for t, h, d in shapes)
    else:
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    return Case(q, k, v, torch.randn(tokens, heads, head_dim, device=device, dtype=dtype), lengths, **options)
