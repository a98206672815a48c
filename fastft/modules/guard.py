"""The hook on a backbone that is left to its own code, and on its head: packed batches do not go through unnoticed.

transformers' masks stop at a document's end only where positions are given, no mask and no cache; code that makes them
without the positions, and layers that carry a state, never do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..errors import PackingError
from ..packing import PackedSequences
from .dynamo import is_exporting
from .sequences import (
    boundaries_of_collator,
    check_no_padding,
    check_not_only_seq_idx,
    has_values,
    text_positions,
    tokens_of,
)
from .state import ModelState, ModuleState, arguments_by_name, state_of

_TELLING = ("position_ids", "cu_seq_lens_q", "packed_sequences", "seq_idx")


def guard_packing(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook: refuses a packed batch whose documents would see each other. Where the model's own code can
    keep them apart, it gets what that takes: positions, no mask, no cache. Every other batch passes unchanged.

    Raises:
        PackingError: a packed batch that the model's own code would mix up, or boundaries that contradict the batch.
    """
    state = state_of(module)
    if state is None or is_exporting():
        return None
    given = arguments_by_name(state, args, kwargs)
    if given is None or all(given.get(name) is None for name in _TELLING):
        return None  # so that a compiled forward stays in one piece
    if given.get("past_key_values") is None:
        return _guard(state, module, given)
    if given.get("cu_seq_lens_q") is not None and "flash" not in state.rules.implementation:
        raise PackingError(
            f"cu_seq_lens_q cannot be honoured beside a cache: {state.rules.implementation!r} attention ignores "
            "boundaries; leave one of the two out"
        )
    return None


@torch.compiler.disable
def _guard(
    state: ModuleState, module: nn.Module, given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if given.get("packed_sequences") is not None:
        raise PackingError("packed_sequences cannot be honoured: fastft does not serve this model; leave it out")
    packed = _find_documents(state.shared, given)
    if packed is None:
        return None
    tokens = tokens_of(given)
    refused = state.rules.refuses_packing or _why_not_now(state, module, tokens)
    if refused:
        state.shared.counters["batches: packed, refused"] += 1
        raise PackingError(
            f"this batch packs several documents into a row, which would see each other: {refused}. Train on separate "
            "rows (TRL: packing=False and padding_free=False), or accept it with "
            "fastft.patch_model(model, packing=False)"
        )
    if given.get("attention_mask") is not None and not _covers(given["attention_mask"], tokens):
        return None  # a prepared mask, which says who sees whom
    if state.kind == "guard":
        state.shared.counters["batches: packed, kept apart by the model's own code"] += 1
    if given.get("position_ids") is None:
        given["position_ids"] = packed.position_ids.view(tokens.shape[:2])
    return (), {**given, "attention_mask": None, "use_cache": False}


def _why_not_now(state: ModuleState, module: Any, tokens: torch.Tensor) -> str:
    """What the plan could not know."""
    if state.kind != "guard":  # a head hands on to a backbone that has a guard of its own
        return ""
    implementation = module.config._attn_implementation
    if implementation != state.rules.implementation:
        return f"attention was set to {implementation!r} after patching; call fastft.patch_model(model) again"
    if "flash" in implementation and len(tokens) > 1:
        return f"{implementation!r} keeps documents apart in a batch of one row, this one has {len(tokens)}"
    return ""


def _find_documents(shared: ModelState, given: dict[str, Any]) -> PackedSequences | None:
    """The documents of a batch that packs several into a row, or None. On a device, boundaries, positions and mask cost
    a synchronisation each, once a batch.

    Raises:
        PackingError: boundaries that contradict the batch or its positions.
    """
    tokens, mask = tokens_of(given), given.get("attention_mask")
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2 or not has_values(tokens):
        return None
    batch_size, length = tokens.shape[:2]
    told = given.get("cu_seq_lens_q") is not None
    if not told:
        check_not_only_seq_idx(given)
    lengths = boundaries_of_collator(shared, given, batch_size * length) if told else None
    positions = text_positions(given.get("position_ids"))
    mask = mask if _covers(mask, tokens) else None
    by_positions = None
    if positions is not None:
        by_positions = _by_positions(shared, given["position_ids"], positions, mask, batch_size, length)
    if lengths is None or not _starts_within_rows(lengths, batch_size, length):
        return by_positions
    check_no_padding(shared, mask)
    if positions is not None and (by_positions is None or by_positions.segments != _segments(lengths)):
        raise PackingError(
            "cu_seq_lens_q and position_ids tell of different documents; positions have to start again where a "
            "document does, and this model's own code goes by them"
        )
    return lengths


def _by_positions(
    shared: ModelState, source: torch.Tensor, positions: torch.Tensor, mask: Any, batch_size: int, length: int
) -> PackedSequences | None:
    if positions.shape not in ((batch_size, length), (1, length)) or not has_values(positions):
        return None
    question = ("documents", batch_size, length)
    found, packed = shared.packed_cache.lookup(question, source, mask)
    if not found:
        packed = PackedSequences.from_position_ids(positions.expand(batch_size, length), mask)
        if packed is not None and not _starts_within_rows(packed, batch_size, length):
            packed = None
        shared.packed_cache.remember(packed, question, source, mask)
    found_documents: PackedSequences | None = packed
    return found_documents


def _covers(mask: Any, tokens: torch.Tensor) -> bool:
    return isinstance(mask, torch.Tensor) and mask.shape == tokens.shape[:2]


def _segments(packed: PackedSequences) -> tuple[tuple[int, int], ...]:
    return tuple((start, end) for start, end in packed.segments if end > start)


def _starts_within_rows(packed: PackedSequences, batch_size: int, length: int) -> bool:
    return _segments(packed) != tuple(pairwise(range(0, batch_size * length + 1, max(length, 1))))
