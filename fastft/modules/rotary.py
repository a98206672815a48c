"""q and k between their projections and attention: norms where a family has them, and rotation by position."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch

from ..capability import probe
from ..ops.qk_norm_rope import qk_norm_rope
from ..ops.qk_norm_rope import verdicts as qk_norm_rope_verdicts
from ..ops.rope import in_place_verdict, rope_qk, rope_qk_
from .norm import options_of, why_not_within
from .state import ModelState, ModuleState

# Rotating in place moves as many bytes as rotating into new memory, and is no faster (H200, 4096 tokens of 32 + 8 heads
# x 128: 25.0 us against 24.2 forward). It pays in memory, for long batches.
_IN_PLACE_BYTES = 256 * 2**20


def normalise_and_rotate(
    module: Any,
    state: ModuleState,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of [B, L, H * D], normalised where the family does, and rotated: [B, L, H, D] or as they came."""
    family = state.family
    assert family is not None
    if family.qk_norm and _in_one_kernel(module, state.shared, q, k, position_embeddings):
        return _normalise_and_rotate_at_once(module, state.shared, family.rope_layout, q, k, position_embeddings)
    if family.qk_norm:
        q, k = (
            module.q_norm(split_heads(q, module.head_dim)),
            module.k_norm(split_heads(k, module.head_dim)),
        )
    return _rotate(module, state.shared, family.rope_layout, q, k, position_embeddings)


def _in_one_kernel(
    module: Any,
    shared: ModelState,
    q: torch.Tensor,
    k: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> bool:
    """Whether norms and rotation are ours, with kernels that can run here, and nobody looks at what is between."""
    config, norms = shared.config, (module.q_norm, module.k_norm)
    asked_for = {config.rope, config.rms_norm} - {"auto"}
    if not asked_for <= {"triton"} or config.rope_in_place is True or any(map(why_not_within, norms)):
        return False
    first, second = map(options_of, norms)
    if (first["eps"], first["rounding"]) != (second["eps"], second["rounding"]):
        return False
    dtypes = (q.dtype, k.dtype, first["weight"].dtype, second["weight"].dtype)
    return _has_kernel(q.device, dtypes, module.head_dim, position_embeddings[0].shape[-1], bool(asked_for))


@lru_cache(maxsize=64)
def _has_kernel(
    device: torch.device, dtypes: tuple[torch.dtype, ...], head_dim: int, rotary_dim: int, by_name: bool
) -> bool:
    found = qk_norm_rope_verdicts(probe(device), *dtypes, head_dim=head_dim, rotary_dim=rotary_dim)
    return bool(found["triton"]) and (by_name or next(iter(found)) == "triton")


def _normalise_and_rotate_at_once(
    module: Any,
    shared: ModelState,
    layout: str,
    q: torch.Tensor,
    k: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    shared.counters["rms_norm"] += 2
    shared.counters["rope"] += 1
    shared.counters["q and k normalised and rotated in one kernel"] += 1
    cos, sin = _half(position_embeddings)
    options = options_of(module.q_norm)
    return qk_norm_rope(
        q,
        k,
        options["weight"],
        module.k_norm.weight,
        cos,
        sin,
        eps=options["eps"],
        rounding=options["rounding"],
        head_dim=module.head_dim if q.ndim == 3 else None,
        layout=layout,
        impl="triton",
    )


def _half(position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The angles without their repetition for the second half of a head."""
    cos, sin = position_embeddings
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., :half]


def split_heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[B, L, H * D] or [B, L, H, D] to [B, L, H, D]; no size is left to infer, so that L may be zero."""
    return x if x.ndim == 4 else x.view(*x.shape[:2], x.shape[2] // head_dim, head_dim)


def _in_place(module: Any, shared: ModelState, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether to rotate q and k where they lie: if it is wanted and provably safe."""
    wanted = shared.config.rope_in_place
    if wanted is False or (wanted == "auto" and q.nbytes + k.nbytes < _IN_PLACE_BYTES):
        return False
    verdict = in_place_verdict(q, module.q_proj) and in_place_verdict(k, module.k_proj)
    if not verdict and wanted is True:
        shared.counters[f"rope in place refused: {verdict.reason}"] += 1
    return bool(verdict)


def _rotate(
    module: Any,
    shared: ModelState,
    layout: str,
    q: torch.Tensor,
    k: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = position_embeddings
    head_dim = module.head_dim
    if shared.config.rope is False:
        apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
        q, k = (split_heads(x, head_dim).transpose(1, 2) for x in (q, k))
        return tuple(x.transpose(1, 2) for x in apply(q, k, cos, sin))
    shared.counters["rope"] += 1
    cos, sin = _half(position_embeddings)
    flat = head_dim if q.ndim == 3 else None
    if _in_place(module, shared, q, k):
        shared.counters["rope in place"] += 1
        return rope_qk_(q, k, cos, sin, head_dim=flat, layout=layout, impl=shared.config.rope)
    return rope_qk(q, k, cos, sin, head_dim=flat, layout=layout, impl=shared.config.rope)
