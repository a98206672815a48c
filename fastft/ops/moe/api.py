"""The public functions of mixture of experts: checks, and the choice between Triton kernels and plain torch."""

from __future__ import annotations

from functools import lru_cache

import torch

from ...capability import GPUCapability, Verdict, probe
from ...errors import KernelInputError
from ..selection import AUTO, select
from . import reference
from .order import ExpertOrder

# Each program of the kernels compares its pairs with all experts: with more its block would be too small.
TRITON_MAX_EXPERTS = 1024
# The last block of pairs may reach beyond the last pair, in int32.
_MAX_PAIRS = 2**31 - 2**7


def sort_by_expert(topk_indices: torch.Tensor, num_experts: int, *, impl: str = AUTO) -> ExpertOrder:
    """Order the pairs of tokens and experts by expert, and within an expert by token and choice.

        pairs = argsort(topk_indices.flatten(), stable)         rows[pairs[i]] = i
        offsets[e] = number of pairs whose expert is at most e

    Deterministic, and all implementations give the same integers. The kernels do not wait for the device.

    Args:
        topk_indices: int32 or int64 [T, K], any strides. Experts outside of [0, num_experts) stand for none, as expert
            parallelism marks the experts of other ranks; such pairs come last, behind `offsets[-1]`.
        num_experts: E.
        impl: "auto", "triton" (a counting sort) or "reference". Under torch.compile "auto" is the reference.

    Returns:
        `ExpertOrder`: pairs and rows, int32 [T * K], and offsets, int32 [E].

    Raises:
        KernelInputError: topk_indices is not [T, K] of integers or has more than 2^31 - 128 pairs; no experts.
        UnsupportedOptionError: an implementation that cannot run here.

    Source: counting sort, Knuth, The Art of Computer Programming, volume 3, section 5.2.
    """
    if topk_indices.ndim != 2 or topk_indices.dtype not in (torch.int32, torch.int64):
        raise KernelInputError(
            f"sort_by_expert: topk_indices is {topk_indices.dtype} {list(topk_indices.shape)}; give it int32 or int64 "
            "[T, K], each token's experts"
        )
    if num_experts < 1:
        raise KernelInputError(f"sort_by_expert: num_experts is {num_experts}; there has to be one at least")
    if topk_indices.numel() > _MAX_PAIRS:
        raise KernelInputError(
            f"sort_by_expert: {topk_indices.numel():,} pairs are more than int32 counts; route fewer tokens at a time"
        )
    if impl == AUTO and torch.compiler.is_compiling():
        return reference.sort_by_expert(topk_indices, num_experts)
    chosen = _implementation(topk_indices.device, num_experts, impl)
    if chosen == "reference" or topk_indices.numel() == 0:
        return reference.sort_by_expert(topk_indices, num_experts)
    from .triton import sort_by_expert as triton_sort_by_expert

    return triton_sort_by_expert(topk_indices, num_experts)


def verdicts(capability: GPUCapability, *, num_experts: int) -> dict[str, Verdict]:
    """What each implementation of `sort_by_expert` says about a case, best first.

    Args:
        capability: of the device that the indices are on.
        num_experts: E.

    Returns:
        "triton" and "reference" with their verdicts; the reference comes first without a GPU.
    """
    if num_experts > TRITON_MAX_EXPERTS:
        triton = Verdict(False, f"{num_experts} experts are too many for one program (at most {TRITON_MAX_EXPERTS})")
    else:
        triton = capability.triton_for(torch.float32)
    found = {"triton": triton, "reference": Verdict(True, "plain torch; runs on any device, and waits for a GPU")}
    return found if capability.device.kind != "cpu" else dict(reversed(found.items()))


@lru_cache(maxsize=64)
def _implementation(device: torch.device, num_experts: int, impl: str) -> str:
    """Decided once per device and number of experts."""
    return select("sort_by_expert", impl, verdicts(probe(device), num_experts=num_experts)).impl
