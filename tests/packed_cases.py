"""Packed batches told to a model in every way there is, and the two oracles that say whether documents were kept apart.

The perturbation oracle changes the tokens of one document and looks for any change elsewhere. The sum oracle adds up
what each document gives on its own, in a stock model; a lower loss is a leak as much as a higher one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tiny_models import VOCAB, packed_batch, tiny_model
from torch import nn
from torch.nn.functional import cross_entropy

from fastft import PackedSequences, patch_model

LENGTHS = (5, 9, 1, 12, 7)
# fp32 sums in another order; a leak changes logits of order one by tenths.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}

# Weights large enough for attention to matter: with the usual ones it hardly tells one token from another.
CONFIG = {"initializer_range": 0.2}

Batch = dict[str, Any]
Hand = Callable[[Batch, Sequence[int]], Batch]


def _positions(batch: Batch, lengths: Sequence[int]) -> Batch:
    return {"position_ids": batch["position_ids"]}


def _ones_mask(batch: Batch, lengths: Sequence[int]) -> Batch:
    return {"position_ids": batch["position_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}


def _collator(batch: Batch, lengths: Sequence[int]) -> Batch:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    kwargs = {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return {"position_ids": batch["position_ids"], **kwargs}


def _given(batch: Batch, lengths: Sequence[int]) -> Batch:
    return {"packed_sequences": PackedSequences.from_lengths(lengths, "cpu")}


WAYS: dict[str, Hand] = {
    "position_ids": _positions,
    "position_ids and a mask of ones": _ones_mask,
    "cu_seq_lens": _collator,
    "packed_sequences": _given,
}


def pair(family: str, **options: Any) -> tuple[Any, Any]:
    """(stock, patched): the same tiny model twice."""
    stock = tiny_model(family, **CONFIG, **({"sliding_window": 5} if family == "mistral" else {}))
    return stock, patch_model(copy.deepcopy(stock), **{"lora": False, **options})


def inputs(lengths: Sequence[int], way: str, *, rows: int = 1, told: Sequence[int] | None = None) -> Batch:
    """A packed batch, its boundaries handed over in one way. `rows` repeats the lengths with other tokens.

    `told` are the lengths that the model is told in place of the true ones: the mutant's way of losing boundaries.
    """
    batches = [packed_batch(lengths, seed=row) for row in range(rows)]
    batch = {name: torch.cat([row[name] for row in batches]) for name in batches[0]}
    told = tuple(lengths) if told is None else tuple(told)
    if told != tuple(lengths):
        batch["position_ids"] = packed_batch(told)["position_ids"].expand(rows, -1).contiguous()
    return {"input_ids": batch["input_ids"], **WAYS[way](batch, told * rows)}


def spans(lengths: Sequence[int], rows: int = 1) -> list[tuple[int, slice]]:
    """(row, slice of tokens) of every document."""
    found = []
    for row in range(rows):
        start = 0
        for length in lengths:
            found.append((row, slice(start, start + length)))
            start += length
    return found


def token_losses(logits: torch.Tensor, input_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Next-token loss of each target, [rows, T - 1]; the first token of a document is nobody's target."""
    labels = input_ids.clone()
    for row, span in spans(lengths, input_ids.shape[0]):
        labels[row, span.start] = -100
    flat = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none")
    return flat.view(input_ids.shape[0], -1)


def evaluate(model: nn.Module, batch: Batch, lengths: Sequence[int], **kwargs: Any) -> dict[str, torch.Tensor]:
    """Logits, losses and their sum, the gradient of the embedded tokens and of every weight."""
    model.zero_grad()
    captured: list[torch.Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: captured.append(out))
    output = model(**batch, **kwargs)
    hook.remove()
    captured[0].retain_grad()
    losses = token_losses(output.logits, batch["input_ids"], lengths)
    losses.sum().backward()
    found = {"logits": output.logits, "losses": losses, "loss": losses.sum(), "embeddings": captured[0].grad}
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().clone() for name, value in found.items()}


def separately(model: nn.Module, batch: Batch, lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """What `evaluate` gives for the documents fed one by one, put together again."""
    rows = batch["input_ids"].shape[0]
    total: dict[str, torch.Tensor] = {}
    for row, span in spans(lengths, rows):
        ids = batch["input_ids"][row : row + 1, span]
        alone = evaluate(model, {"input_ids": ids}, (ids.shape[1],), use_cache=False)
        for name in ("logits", "embeddings"):
            shape = (rows, sum(lengths), alone[name].shape[-1])
            total.setdefault(name, torch.zeros(shape))[row, span] = alone[name][0]
        for name, value in alone.items():
            if name == "loss" or name.startswith("grad "):
                total[name] = total.get(name, 0) + value
    return total


def differences(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> list[str]:
    """Names of what differs by more than rounding."""
    tolerance = tolerance or TOLERANCE
    found = []
    for name, value in expected.items():
        scale = max(1.0, value.abs().max().item())
        allowed = {"rtol": tolerance["rtol"], "atol": tolerance["atol"] * scale}
        if not torch.allclose(got[name].float(), value.float(), **allowed):
            found.append(f"{name}: {(got[name] - value).abs().max().item():.2e}")
    return found


def leaks(model: nn.Module, batch: Batch, lengths: Sequence[int], changed: int = 1, rounding: float = 0.0) -> list[str]:
    """What is no longer the same (bitwise, without `rounding`) in the other documents after one of them changed."""
    rows = batch["input_ids"].shape[0]
    before = evaluate(model, batch, lengths)
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    where = spans(lengths, rows)[changed]
    other["input_ids"][where] = (other["input_ids"][where] - 3 + 17) % (VOCAB - 3) + 3
    after = evaluate(model, other, lengths)
    assert not torch.equal(before["logits"][where], after["logits"][where]), "the change did not reach the model"
    found = []
    for number, (row, span) in enumerate(spans(lengths, rows)):
        if number == changed:
            continue
        parts = {"logits": span, "embeddings": span, "losses": slice(span.start, span.stop - 1)}
        for name, part in parts.items():
            change = (before[name][row, part] - after[name][row, part]).abs()
            if change.numel() and not change.max() <= rounding * before[name].abs().max():  # NaN is a leak too
                found.append(f"{name} of document {number}")
    return found


def counters(model: nn.Module) -> dict[str, int]:
    """What ran in a patched model so far."""
    return dict(next(m for m in model.modules() if "_fastft" in m.__dict__).__dict__["_fastft"].shared.counters)


def packed_forwards(model: nn.Module) -> int:
    """How many forwards were served with the boundaries of several sequences in a row."""
    return sum(count for name, count in counters(model).items() if name.startswith("batches: packed"))


def attention_calls(model: nn.Module) -> int:
    """How many attention calls one of fastft's engines computed, whichever it was."""
    return sum(count for name, count in counters(model).items() if name.startswith("attention: "))
