"""The public functions of mixture of experts: checks, and the choice of implementations."""

from __future__ import annotations

from functools import lru_cache

import torch

from ...capability import GPUCapability, Verdict, probe
from ...errors import KernelInputError
from ..packed_weight import PackedWeight
from ..selection import AUTO, Choice, select
from . import products, reference
from .experts import ExpertAdapter, ExpertWeights, Pieces, Run, Setup, run_experts
from .gate import Gate
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
    chosen = _sort_implementation(topk_indices.device, num_experts, impl)
    if chosen == "reference" or topk_indices.numel() == 0:
        return reference.sort_by_expert(topk_indices, num_experts)
    from .triton_sort import sort_by_expert as triton_sort_by_expert

    return triton_sort_by_expert(topk_indices, num_experts)


def sort_verdicts(capability: GPUCapability, *, num_experts: int) -> dict[str, Verdict]:
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
def _sort_implementation(device: torch.device, num_experts: int, impl: str) -> str:
    """Decided once per device and number of experts."""
    return select("sort_by_expert", impl, sort_verdicts(probe(device), num_experts=num_experts)).impl


# ------------------------------------------------------------------------------------------------------ experts


def experts(
    hidden: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    gate: Gate,
    *,
    adapters: tuple[ExpertAdapter | None, ExpertAdapter | None] = (None, None),
    impl: str = AUTO,
) -> torch.Tensor:
    """The experts' part of a sparse layer: each token's experts, weighted and summed.

        out[t] = sum over k of topk_weights[t, k] * (gate(hidden[t] W1[e] + b1[e]) W2[e] + b2[e])

    where e = topk_indices[t, k], with W1 + s1 A1 B1 and W2 + s2 A2 B2 in place of W1 and W2 where there are adapters.
    Deterministic on a GPU but for what cuBLAS does. Differentiable by hidden, topk_weights, and every weight, bias and
    factor that requires a gradient; nothing of a frozen weight's size is made. Experts without tokens get gradients of
    zero.

    Args:
        hidden: [T, H], any strides; its dtype is that of all weights.
        topk_indices: int32 or int64 [T, K]; outside of [0, E) stands for none, and adds nothing.
        topk_weights: [T, K], any floating dtype.
        weights: of all experts.
        gate: what is between the two products.
        adapters: of `gate_up` and `down`.
        impl: "auto", "grouped_mm" (PyTorch's, on sm90 and newer), "triton" (sm80 and newer), "loop" (a product for
            each expert) or "reference" (that, and plain torch for the rest). It says who multiplies; what is between
            the products is made by Triton kernels wherever these run.

    Returns:
        [T, H] in the dtype of hidden.

    Raises:
        KernelInputError: shapes, dtypes or devices that do not fit together.
        UnsupportedOptionError: an implementation that cannot run here.

    Memory: 2 * I * K + H elements a token are saved, less H where the caller keeps `hidden` anyway; r * K with an
    adapter of gate_up; and 16 * K bytes of routing, 12 * K with int32 indices.
    Source: Shazeer et al., Outrageously Large Neural Networks (2017); the gradient of topk_weights from that of the
    activation as in Guo et al., SonicMoE (2025).
    """
    _check(hidden, topk_indices, topk_weights, weights, adapters)
    num_experts = weights.gate_up.shape[0]
    if topk_indices.numel() == 0:
        impl = "reference"
    choice = resolve(hidden.device, hidden.dtype, is_aligned(weights), impl)
    order_impl = choice.impl if choice.impl in ("triton", "reference") else AUTO
    order = sort_by_expert(topk_indices, num_experts, impl=order_impl)
    made = products.IMPLEMENTATIONS.get(choice.impl, products.Loop)(order.offsets)
    thin: products.Products = made
    if choice.impl == "grouped_mm":  # which wants a rank of 8 or 16 at least
        triton = probe(hidden.device).tensor_core_dots
        thin = products.TritonProducts(order.offsets) if triton else products.Loop(order.offsets)
    scaling = tuple(1.0 if adapter is None else adapter.scaling for adapter in adapters)
    pieces = _pieces(hidden.device, hidden.dtype, choice.impl)
    packed = [weight if isinstance(weight, PackedWeight) else None for weight in weights[:2]]
    setup = Setup(gate, pieces, made, thin, (scaling[0], scaling[1]), (packed[0], packed[1]))
    return run_experts(hidden, topk_weights, weights, adapters, Run(order, topk_indices, setup))


@lru_cache(maxsize=64)
def resolve(device: torch.device, dtype: torch.dtype, aligned: bool, impl: str) -> Choice:
    """The implementation of `experts` for a case, with its reason; decided once for each."""
    return select("experts", impl, verdicts(probe(device), dtype, aligned=aligned))


def verdicts(capability: GPUCapability, dtype: torch.dtype, *, aligned: bool) -> dict[str, Verdict]:
    """What each implementation of `experts` says about a case, best first.

    Args:
        capability: of the device that the weights are on.
        dtype: of the weights.
        aligned: rows and columns of all weights are multiples of 16 bytes.
    """
    found = products.verdicts(capability, dtype, aligned=aligned)
    plain = {"reference": Verdict(True, "plain torch and a product for each expert; runs on any device")}
    return {**plain, **found} if capability.device.kind == "cpu" else {**found, **plain}


@lru_cache(maxsize=64)
def _pieces(device: torch.device, dtype: torch.dtype, impl: str) -> Pieces:
    on_cpu = device.type == "cpu" and impl != "triton"  # interpreted: for tests that ask for it
    if impl == "reference" or on_cpu or dtype == torch.float64 or not probe(device).triton_for(dtype):
        return Pieces(reference.gather_rows, reference.combine_rows, reference.gate_forward, reference.gate_backward)
    from . import triton_gate, triton_rows

    return Pieces(
        triton_rows.gather_rows, triton_rows.combine_rows, triton_gate.gate_forward, triton_gate.gate_backward
    )


def is_aligned(weights: ExpertWeights) -> bool:
    """Whether each matrix of both weights is dense one way, with rows that begin at multiples of `ALIGNMENT` bytes."""
    for weight in (weights.gate_up, weights.down):
        if isinstance(weight, PackedWeight):  # made dense, in memory of torch
            if any(size * weight.dtype.itemsize % products.ALIGNMENT for size in weight.shape[1:]):
                return False
            continue
        lines = [stride for stride in weight.stride()[1:] if stride != 1]
        every = products.ALIGNMENT // weight.element_size()
        if len(lines) != 1 or lines[0] % every or weight.stride(0) % every or weight.data_ptr() % products.ALIGNMENT:
            return False
        if weight.shape[1] % every or weight.shape[2] % every:
            return False
    return True


def _check(
    hidden: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    adapters: tuple[ExpertAdapter | None, ExpertAdapter | None],
) -> None:
    E, H, wide = weights.gate_up.shape
    wanted: list[tuple[str, torch.Tensor | PackedWeight | None, tuple[int, ...]]] = [
        ("hidden", hidden, (len(topk_indices), H)),
        ("weights.down", weights.down, (E, wide // 2, H)),
        ("weights.gate_up_bias", weights.gate_up_bias, (E, wide)),
        ("weights.down_bias", weights.down_bias, (E, H)),
    ]
    sizes = ((H, wide), (wide // 2, H))
    for name, adapter, (rows, columns) in zip(("gate_up", "down"), adapters, sizes, strict=True):
        if adapter is not None:
            rank = adapter.A.shape[-1]
            wanted += [(f"{name}.A", adapter.A, (E, rows, rank)), (f"{name}.B", adapter.B, (E, rank, columns))]
    for name, tensor, shape in wanted:
        if tensor is not None and (tensor.shape != shape or tensor.dtype != weights.gate_up.dtype):
            raise KernelInputError(
                f"experts: {name} is {tensor.dtype} {list(tensor.shape)} where {weights.gate_up.dtype} {list(shape)} "
                "goes with weights.gate_up; cast or transpose it"
            )
    if wide % 2 or topk_weights.shape != topk_indices.shape or not topk_weights.is_floating_point():
        raise KernelInputError(
            f"experts: topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}, topk_indices "
            f"{list(topk_indices.shape)} and weights.gate_up {list(weights.gate_up.shape)}; the first two have one "
            "shape and the last an even width"
        )
