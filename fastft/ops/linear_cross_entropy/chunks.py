"""The walk over chunks of tokens: logits of a chunk, their losses, and the products that make gradients of it.

    logits = h W^T + b       [C, V]: one buffer, used again by each chunk
    losses, statistics; the gradient by logits in their place       (`triton.cross_entropy_rows_`)
    dh = dlogits W           dW += dlogits^T h          db += sum of dlogits

Few and large chunks: each one but the first reads and writes all of the fp32 sum dW once more (5 GB for 151,936 x 4096,
as long as 1.2 ms of GEMM on an H200). Rows of logits are padded to multiples of 64 in memory, so that GEMMs and kernels
find them aligned whatever the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..products import as_rows, mm_to, to_dtype
from .rows import RowOptions, RowOutputs, TokenStatistics, accumulation_dtype

# `triton.cross_entropy_rows_` or the reference's.
RowKernel = Callable[..., None]

_PADDING = 64
# Rows of a chunk are multiples of a GEMM's tile, the last chunk aside.
_ROW_MULTIPLE = 128


class Head(NamedTuple):
    """Tokens, and the layer that makes logits of them."""

    hidden: torch.Tensor  # [N, H], any strides
    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None  # [V]
    targets: torch.Tensor  # [M] int64, contiguous
    rows: torch.Tensor | None  # [M] int64: which of the N they are of; None for all


class Way(NamedTuple):
    """How to walk."""

    kernel: RowKernel
    options: RowOptions
    dtype: torch.dtype  # to multiply in
    logits_per_chunk: int


class Sums(NamedTuple):
    """Gradients for an upstream gradient of one a row; None where not needed."""

    hidden: torch.Tensor | None  # [M, H]
    weight: torch.Tensor | None  # [V, H]
    bias: torch.Tensor | None  # [V]


def chunk_rows(num_rows: int, vocab_size: int, logits_per_chunk: int) -> int:
    """Rows of a chunk: chunks as equal as multiples of a GEMM's tile allow, of one row at least."""
    most = max(1, logits_per_chunk // _padded(vocab_size))
    if most > _ROW_MULTIPLE:
        most -= most % _ROW_MULTIPLE
    chunks = -(-num_rows // most)
    rows = -(-num_rows // max(1, chunks))
    return min(most, max(1, -(-rows // _ROW_MULTIPLE)) * _ROW_MULTIPLE)


def walk(
    head: Head,
    way: Way,
    needs: tuple[bool, bool, bool],
    *,
    with_statistics: bool = False,
    row_weights: torch.Tensor | None = None,
) -> tuple[RowOutputs, Sums]:
    """Losses of all rows, and what is needed of the gradients by hidden, weight and bias.

    Args:
        head: what to make logits of.
        way: how.
        needs: whether to make each gradient.
        with_statistics: whether the outputs have statistics.
        row_weights: [M] fp32, of size one at most: each row's upstream gradient, for those of weight and bias alone.
            None for ones.
    """
    num_rows, vocab_size = head.targets.shape[0], head.weight.shape[0]
    outputs = _outputs(num_rows, way.dtype, head.hidden.device, with_statistics)
    weight = as_rows(head.weight, way.dtype)
    bias = None if head.bias is None else to_dtype(head.bias, way.dtype)
    chunk = chunk_rows(num_rows, vocab_size, way.logits_per_chunk)
    sums = _Accumulator(head, way, needs, single=chunk >= num_rows)
    buffer = weight.new_empty((min(chunk, num_rows), _padded(vocab_size)))
    for start, end in _spans(num_rows, chunk):
        hidden = head.hidden[start:end] if head.rows is None else head.hidden[head.rows[start:end]]
        hidden = as_rows(hidden, way.dtype)
        padded = buffer[: end - start]
        logits = padded[:, :vocab_size]
        if bias is None:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden, weight.t(), out=logits)
        part = outputs.slice(start, end)
        way.kernel(padded, vocab_size, head.targets[start:end], way.options, part, with_gradient=any(needs))
        if needs[1]:  # zero times what is not finite there would be NaN in all of the weight's gradient
            ignored = head.targets[start:end] == way.options.ignore_index
            hidden = hidden.masked_fill(ignored[:, None], 0)
        sums.add(start, end, logits, hidden, weight, None if row_weights is None else row_weights[start:end, None])
    return outputs, sums.result()


class _Accumulator:
    """The gradients of a walk, chunk after chunk."""

    def __init__(self, head: Head, way: Way, needs: tuple[bool, bool, bool], *, single: bool) -> None:
        self._needs, self._dtype = needs, way.dtype
        self._sum_dtype = self._weight_dtype = accumulation_dtype(way.dtype)
        # A single product in bf16 comes rounded from the GEMM's own fp32 sum: half the memory, and not written twice.
        # fp16 would overflow, since rows are not scaled yet.
        if single and way.dtype == torch.bfloat16 and head.weight.dtype == torch.bfloat16:
            self._weight_dtype = torch.bfloat16
        self._vocab_size, hidden_size = head.weight.shape
        self._hidden = head.weight.new_empty((len(head.targets), hidden_size), dtype=way.dtype) if needs[0] else None
        self._weight_shape, self._device = head.weight.shape, head.weight.device
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None

    def add(
        self,
        start: int,
        end: int,
        dlogits: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        row_weights: torch.Tensor | None,
    ) -> None:
        if self._hidden is not None:
            torch.mm(dlogits, weight, out=self._hidden[start:end])
        if self._needs[1]:
            if row_weights is not None:
                hidden = (hidden * row_weights).to(self._dtype)
            self._weight = _add_mm(self._weight, dlogits.t(), hidden, self._weight_dtype)
        if self._needs[2]:
            if row_weights is None:
                part = dlogits.sum(0, dtype=self._sum_dtype)
            else:
                part = mm_to(row_weights.t().to(self._dtype), dlogits, self._sum_dtype)[0]
            self._bias = part if self._bias is None else self._bias.add_(part)

    def result(self) -> Sums:
        """Zeros where no row came."""
        weight, bias = self._weight, self._bias
        if self._needs[1] and weight is None:
            weight = torch.zeros(self._weight_shape, dtype=self._weight_dtype, device=self._device)
        if self._needs[2] and bias is None:
            bias = torch.zeros(self._vocab_size, dtype=self._sum_dtype, device=self._device)
        return Sums(self._hidden, weight, bias)


def _add_mm(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """total + a b in dtype, written to total."""
    if a.dtype == dtype:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if a.is_cuda and torch.version.hip is None:
        if total is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    a, b = a.to(dtype), b.to(dtype)
    return torch.mm(a, b) if total is None else total.addmm_(a, b)


def _outputs(num_rows: int, dtype: torch.dtype, device: torch.device, with_statistics: bool) -> RowOutputs:
    def empty(kind: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, dtype=kind, device=device)

    wide = accumulation_dtype(dtype)
    if not with_statistics:
        return RowOutputs(empty(wide))
    return RowOutputs(empty(wide), TokenStatistics(empty(wide), empty(wide), empty(torch.int64)))


def _spans(num_rows: int, chunk: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_rows, chunk):
        yield start, min(start + chunk, num_rows)


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // _PADDING) * _PADDING
