"""The copies of A and B in the dtype computed in: one stacked A for a group of projections, made once a forward.

A copy is used again by the recomputation of a checkpointed forward, during backward, and by nothing else: every other
forward makes new ones. `_version` would not tell when they are out of date. Fused optimizers (the default of Hugging
Face's Trainer), CUDA graphs and writes through `.data` change a parameter without counting its version up. What is
sure is that nothing may change between a forward and its recomputation; so the copies of the last forward serve, unless
two forwards with gradients saw different values of one adapter before the backward of the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

Casts = tuple[torch.Tensor, tuple[torch.Tensor, ...]]


class _Entry(NamedTuple):
    """The copies, and what they are copies of. Parameters are not kept alive by it: their death removes the entry."""

    sources: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[int, ...]
    dtype: torch.dtype
    casts: Casts


class AdapterCasts:
    """Holds the copies of adapters between a forward and its recomputation. Copied or unpickled, it starts empty."""

    __slots__ = ("__weakref__", "_entries")

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def __reduce__(self) -> tuple[Callable[[], AdapterCasts], tuple[()]]:
        return type(self), ()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, lora_As: Sequence[torch.Tensor], lora_Bs: Sequence[torch.Tensor], dtype: torch.dtype) -> Casts:
        """The stacked A and the Bs in dtype: the last forward's if this is its recomputation, or else new ones.

        To be called with gradients off, as they are inside of an autograd Function.

        Args:
            lora_As: A_i, [r_i, K].
            lora_Bs: B_i, [N_i, r_i].
            dtype: the one to compute in.

        Returns:
            [sum of r_i, K], and the B_i. What needs no copy is returned as it is.
        """
        key = id(lora_As[0])
        if torch._C._current_graph_task_id() != -1:  # in a backward
            entry = self._entries.get(key)
            if entry is not None and _is_of(entry, lora_As, lora_Bs, dtype):
                return entry.casts
        casts = cast(lora_As, lora_Bs, dtype)
        self._remember(key, lora_As, lora_Bs, dtype, casts)
        return casts

    def _remember(
        self,
        key: int,
        lora_As: Sequence[torch.Tensor],
        lora_Bs: Sequence[torch.Tensor],
        dtype: torch.dtype,
        casts: Casts,
    ) -> None:
        # A dispatch mode expects each op again that it has seen, and what inference makes no backward can save.
        if casts[0] is lora_As[0] or torch._C._len_torch_dispatch_stack() or casts[0].is_inference():
            self._entries.pop(key, None)
            return
        sources = (*lora_As, *lora_Bs)
        if any(source.is_inference() for source in sources):
            self._entries.pop(key, None)
            return
        entry = self._entries.get(key)
        if entry is not None and len(entry.sources) == len(sources) and _all_are(entry.sources, sources):
            references = entry.sources  # as in every forward but the first
        else:
            remove = partial(_remove, weakref.ref(self), key)
            references = tuple(weakref.ref(source, remove) for source in sources)
        self._entries[key] = _Entry(references, tuple([source._version for source in sources]), dtype, casts)


def cast(lora_As: Sequence[torch.Tensor], lora_Bs: Sequence[torch.Tensor], dtype: torch.dtype) -> Casts:
    """Copies as `AdapterCasts.get` makes them, in one launch if the sources share a dtype. Call it with grad off."""
    if torch._C._len_torch_dispatch_stack():
        As = [A.to(dtype) for A in lora_As]
        return As[0] if len(As) == 1 else torch.cat(As), tuple(B.to(dtype) for B in lora_Bs)
    if all(B.dtype is dtype for B in lora_Bs) and all(A.dtype is dtype for A in lora_As):
        return lora_As[0] if len(lora_As) == 1 else torch.cat(tuple(lora_As)), tuple(lora_Bs)
    # Contiguous copies of contiguous sources: equal strides are what makes one launch of it.
    ranks = [A.shape[0] for A in lora_As]
    stacked = lora_As[0].new_empty((sum(ranks), lora_As[0].shape[1]), dtype=dtype)
    Bs = [B.new_empty(B.shape, dtype=dtype) for B in lora_Bs]
    parts = (stacked,) if len(ranks) == 1 else torch.split_with_sizes(stacked, ranks)
    torch._foreach_copy_((*parts, *Bs), (*lora_As, *lora_Bs))
    return stacked, tuple(Bs)


def _all_are(references: Sequence[weakref.ref[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> bool:
    return all([reference() is tensor for reference, tensor in zip(references, tensors, strict=True)])


def _is_of(entry: _Entry, lora_As: Sequence[torch.Tensor], lora_Bs: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    sources = (*lora_As, *lora_Bs)
    if entry.dtype is not dtype or len(entry.sources) != len(sources) or torch._C._len_torch_dispatch_stack():
        return False
    if entry.casts[0].device != sources[0].device:
        return False
    if any([source.is_inference() for source in sources]) or not _all_are(entry.sources, sources):
        return False
    return entry.versions == tuple([source._version for source in sources])


def _remove(owner: weakref.ref[AdapterCasts], key: int, dead: Any) -> None:
    casts = owner()
    entry = None if casts is None else casts._entries.get(key)
    # An id is given out again: the entry may be of others by now.
    if casts is not None and entry is not None and any(ref is dead for ref in entry.sources):
        del casts._entries[key]
