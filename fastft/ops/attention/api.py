"""Packed (varlen) attention: the public function, its checks and the choice of engine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...capability import GPUCapability, Verdict, probe
from ...errors import KernelInputError
from ...packing import PackedSequences
from ..selection import AUTO, Choice, select
from .fa2 import MAX_HEAD_DIM, varlen_attention_fa2
from .reference import varlen_attention_reference
from .sdpa import varlen_attention_sdpa

_ENGINES = {
    "fa2": varlen_attention_fa2,
    "sdpa": varlen_attention_sdpa,
    "reference": varlen_attention_reference,
}
IMPLEMENTATIONS = tuple(_ENGINES)
# Elsewhere a block of FlashAttention-2's backward for head dimensions above 192 does not always fit.
_LARGE_SHARED_MEMORY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: PackedSequences,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int | None, int | None] = (None, None),
    dropout: float = 0.0,
    impl: str = AUTO,
) -> torch.Tensor:
    """Attention within each of the sequences that lie one after another in the tokens.

        o[i] = sum_j softmax_j(softmax_scale * q[i] . k[j]) v[j]
        over the j of i's own sequence with j <= i (causal) and i - left <= j <= i + right

    Args:
        q: [T, Hq, D], any strides.
        k: [T, Hk, D]; Hq is a multiple of Hk (grouped queries), nothing is repeated in memory by "fa2".
        v: [T, Hk, D].
        packed: where the sequences begin and end; `packed.total_tokens` is T.
        softmax_scale: defaults to D ** -0.5.
        causal: a query sees no later key.
        window_size: (left, right), how many keys before and after itself a query sees; None is unbounded. A causal
            query sees none after itself, whatever `right` says.
        dropout: probability of dropping an attention weight.
        impl: "auto", "fa2" (PyTorch's own FlashAttention-2), "sdpa" (one call per sequence) or "reference".

    Returns:
        [T, Hq, D] in the dtype of q.

    Raises:
        KernelInputError: shapes, dtypes or devices that do not fit together, a negative window, a dropout that is
            no probability.
        UnsupportedOptionError: an implementation that cannot run here.

    Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, section 3.
    """
    _check(q, k, v, packed)
    _check_options(window_size, dropout)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    impl = resolve(impl, q.device, q.dtype, q.shape[-1], dropout > 0).impl
    engine = _ENGINES[impl]
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "dropout": dropout,
    }  # fmt: skip
    # Autocast would change the dtype behind the choice just made. It knows no meta device, and casts nothing in "fa2".
    if impl == "fa2" or q.device.type == "meta" or not torch.is_autocast_enabled(q.device.type):
        return engine(q, k, v, packed, **options)
    with torch.autocast(q.device.type, enabled=False):
        return engine(q, k, v, packed, **options)


def verdicts(capability: GPUCapability, dtype: torch.dtype, head_dim: int, dropout: bool = False) -> dict[str, Verdict]:
    """What each engine says about tensors of this dtype and head dimension on this device, best first."""
    engines = dict(capability.attention_engines)
    fa2 = engines["fa2"]
    if fa2 and dtype not in (torch.float16, torch.bfloat16):
        fa2 = Verdict(False, f"FlashAttention-2 computes in fp16 and bf16 only, the tensors are {dtype}")
    elif fa2 and head_dim > MAX_HEAD_DIM:
        fa2 = Verdict(False, f"FlashAttention-2 takes head dimensions up to {MAX_HEAD_DIM}, this one is {head_dim}")
    elif fa2 and not capability.supports_dtype(dtype):
        fa2 = capability.supports_dtype(dtype)
    elif fa2 and capability.device.arch not in _LARGE_SHARED_MEMORY and _too_large_to_train(head_dim, dropout):
        architecture = capability.device.architecture
        fa2 = Verdict(False, f"FlashAttention-2 has no backward for head dimension {head_dim} on {architecture}")
    return {"fa2": fa2, "sdpa": engines["sdpa"], "reference": engines["reference"]}


def _too_large_to_train(head_dim: int, dropout: bool) -> bool:
    return 192 < head_dim <= 224 or (head_dim > 192 and dropout)


@lru_cache(maxsize=256)
def resolve(impl: str, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: bool = False) -> Choice:
    """The engine that runs for tensors like these, and why. Remembered, because every layer asks."""
    return select("attention", impl, verdicts(probe(device), dtype, head_dim, dropout))


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: PackedSequences) -> None:
    fits = q.ndim == k.ndim == 3 and k.shape == v.shape and k.shape[::2] == q.shape[::2]
    if not fits or not q.is_floating_point():
        raise KernelInputError(
            f"attention takes floating-point q [T, Hq, D] and k, v [T, Hk, D], got {q.dtype} {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}; drop a batch dimension with .flatten(0, 1) first"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise KernelInputError(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads; Hq must be a multiple of Hk"
        )
    if packed.total_tokens != q.shape[0]:
        raise KernelInputError(
            f"the sequences cover {packed.total_tokens} tokens, q has {q.shape[0]}; build them from this batch"
        )
    if not (q.device == k.device == v.device == packed.cu_seqlens.device):
        raise KernelInputError(
            f"q, k, v and cu_seqlens must be on one device, got {q.device}, {k.device}, {v.device} and "
            f"{packed.cu_seqlens.device}; move the sequences with packed.to(q.device)"
        )
    if not (q.dtype == k.dtype == v.dtype):
        raise KernelInputError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")


def _check_options(window_size: tuple[int | None, int | None], dropout: float) -> None:
    left, right = window_size
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise KernelInputError(
            f"window_size counts keys to the left and right of a query, got {window_size}; None is unbounded"
        )
    if not 0.0 <= dropout < 1.0:
        raise KernelInputError(f"dropout is a probability in [0, 1), got {dropout}")
