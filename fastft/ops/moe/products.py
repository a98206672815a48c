"""Products of each expert's rows with its own weight: the implementations, and which can run where.

    matmul:  out[s] = rows[s] @ weight[e]                        [S, M] and [E, M, N] to [S, N]
    outer:   out[e] = sum over its rows of left[s]^T right[s]    [S, M] and [S, N] to [E, M, N]
    sums:    out[e] = sum over its rows of factors[s] rows[s]    [S] and [S, N] to [E, N]

Rows of expert e end at offsets[e]. Rows beyond the last offset belong to nobody: they are not read, and what `matmul`
writes there is undefined. Experts without rows get zeros from `outer` and `sums`, and what is undefined in one expert's
rows stays with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from ...capability import GPUCapability, Verdict

# PyTorch's kernel wants rows that begin at multiples of so many bytes.
ALIGNMENT = 16
# Columns up to which an outer product in fp32 is thin, and the fewest rows that it then takes at a time.
_THIN = 64
_FEWEST_ROWS = 32
# Major compute capabilities that its kernels are made for; elsewhere PyTorch goes from expert to expert.
_GROUPED_MM_MAJORS = (9, 10)


class Products(Protocol):
    """Made for one order of experts, and kept for its backward."""

    offsets: torch.Tensor

    def __init__(self, offsets: torch.Tensor) -> None: ...

    def matmul(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def add_matmul_(self, out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, alpha: float) -> None:
        """out += alpha * matmul(rows, weight), on rows that somebody owns."""

    def outer(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor: ...

    def sums(self, factors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor: ...


class GroupedMM:
    """`torch.nn.functional.grouped_mm`: CUTLASS, no waiting for the device."""

    def __init__(self, offsets: torch.Tensor) -> None:
        self.offsets = offsets

    def matmul(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _grouped_mm()(rows, weight, offs=self.offsets)

    def add_matmul_(self, out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, alpha: float) -> None:
        out.add_(self.matmul(rows, weight), alpha=alpha)

    def outer(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return _grouped_mm()(left.t(), right, offs=self.offsets)

    def sums(self, factors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.outer(_of_aligned_rows(factors, rows), rows)[:, 0]


class TritonProducts:
    """fastft's own kernels: any dtype and size, sums into what is there, no waiting for the device."""

    def __init__(self, offsets: torch.Tensor) -> None:
        self.offsets = offsets

    def matmul(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        from .triton_grouped import grouped_matmul

        return grouped_matmul(rows, weight, self.offsets)

    def add_matmul_(self, out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, alpha: float) -> None:
        from .triton_grouped import grouped_matmul

        grouped_matmul(rows, weight, self.offsets, out=out, alpha=alpha, accumulate=True)

    def outer(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        from .triton_grouped import grouped_outer

        return grouped_outer(left, right, self.offsets)

    def sums(self, factors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.outer(factors[:, None].to(rows.dtype), rows)[:, 0]


class Loop:
    """One `torch.mm` for each expert that has rows. The offsets come to the host once, for all products."""

    def __init__(self, offsets: torch.Tensor) -> None:
        self.offsets = offsets

    @cached_property
    def slices(self) -> list[tuple[int, slice]]:
        ends = self.offsets.tolist()
        return [(e, slice(b, end)) for e, (b, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > b]

    def matmul(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(rows.shape[0], weight.shape[2])
        for expert, own in self.slices:
            torch.mm(rows[own], weight[expert], out=out[own])
        return out

    def add_matmul_(self, out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, alpha: float) -> None:
        for expert, own in self.slices:
            out[own].addmm_(rows[own], weight[expert], alpha=alpha)

    def outer(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out = left.new_zeros(len(self.offsets), left.shape[1], right.shape[1])
        thin = min(left.shape[1], right.shape[1]) <= _THIN and left.dtype == torch.float32
        for expert, own in self.slices:
            if thin:
                out[expert] = _outer_in_pieces(left[own], right[own])
            else:
                torch.mm(left[own].t(), right[own], out=out[expert])
        return out

    def sums(self, factors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """In pairs of pairs, as autograd sums for a bias: in fp32, a product's chain over many rows errs far more."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        out = rows.new_zeros(len(self.offsets), rows.shape[1])
        for expert, own in self.slices:
            out[expert] = (rows[own].to(wide) * factors[own, None].to(wide)).sum(0)
        return out


IMPLEMENTATIONS: dict[str, type[GroupedMM] | type[TritonProducts] | type[Loop]] = {
    "grouped_mm": GroupedMM,
    "triton": TritonProducts,
    "loop": Loop,
}


def verdicts(capability: GPUCapability, dtype: torch.dtype, *, aligned: bool) -> dict[str, Verdict]:
    """What each implementation says, best first.

    Args:
        capability: of the device.
        dtype: of rows and weights.
        aligned: all rows and columns of the weights are multiples of `ALIGNMENT` bytes.
    """
    kind = capability.device.kind
    loop = Verdict(True, "a product for each expert; runs on any device, and waits for a GPU once a layer")
    if kind == "cpu":
        return {"loop": loop, "grouped_mm": _on_cpu(dtype, aligned), "triton": _triton(capability, dtype)}
    grouped_mm = _grouped_mm_exists()
    if grouped_mm and (kind != "cuda" or capability.device.arch[0] not in _GROUPED_MM_MAJORS):
        where = capability.device.architecture
        grouped_mm = Verdict(False, f"PyTorch's grouped_mm is made for sm90 and sm100, this is {where}")
    elif grouped_mm and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        grouped_mm = Verdict(False, f"PyTorch's grouped_mm is made for bf16, this is {name}")
    elif grouped_mm and not aligned:
        grouped_mm = _UNALIGNED
    found = {"grouped_mm": grouped_mm, "triton": _triton(capability, dtype), "loop": loop}
    if dtype == torch.float32:  # exact products: no tensor cores, where cuBLAS is ahead
        found = {"loop": loop, **{name: found[name] for name in ("triton", "grouped_mm")}}
    return found


_UNALIGNED = Verdict(False, f"PyTorch's grouped_mm wants sizes that are multiples of {ALIGNMENT} bytes")


def _on_cpu(dtype: torch.dtype, aligned: bool) -> Verdict:
    if dtype == torch.float64:
        return Verdict(False, "PyTorch's grouped_mm does not take float64")
    return _grouped_mm_exists() if aligned else _UNALIGNED


def _triton(capability: GPUCapability, dtype: torch.dtype) -> Verdict:
    if dtype == torch.float64:
        return Verdict(False, "the kernels sum in fp32")
    triton = capability.triton_for(dtype)
    if triton and capability.device.kind == "cuda" and not capability.tensor_core_dots:
        return capability.tensor_core_dots
    return triton


def _outer_in_pieces(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left^T right as a sum of sums, for the factors of an adapter.

    One chain over all rows errs up to four times as much as the gradient of the whole weight, whose many columns
    average it out before B takes them to the factor's few. As many pieces as each has rows: few are held.
    """
    rows = max(_FEWEST_ROWS, math.isqrt(len(left)))
    whole = len(left) // rows * rows
    pieces = [part[:whole].unflatten(0, (-1, rows)) for part in (left, right)]
    return torch.bmm(pieces[0].mT, pieces[1]).sum(0) + left[whole:].t() @ right[whole:]


def _of_aligned_rows(factors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[S] to [S, as many columns as are aligned], as left sides of an outer product have to be."""
    return factors[:, None].to(rows.dtype).expand(-1, ALIGNMENT // rows.element_size()).contiguous()


def _grouped_mm() -> Callable[..., torch.Tensor]:
    return F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm


def _grouped_mm_exists() -> Verdict:
    if hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm"):
        return Verdict(True, f"grouped_mm of PyTorch {torch.__version__}")
    return Verdict(False, f"PyTorch {torch.__version__} has no grouped_mm")
