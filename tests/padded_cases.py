"""Padded batches, what stock and the rows one by one make of them, and a mutant that loses the boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import VOCAB
from torch import nn

from fastft.packing import PackedSequences
from fastft.unpadding import UnpaddedSequences

LENGTHS = (12, 7, 1, 9)
DROPPED = "batches: packed, padding dropped"
USED = "batches: stock, an output at padding is used"
UNKNOWN = "which outputs are used is not known"


def padded(
    side: str, lengths: tuple[int, ...] = LENGTHS, *, first_tokens: bool = False, pad_id: int = 5
) -> dict[str, torch.Tensor]:
    """A batch padded to the longest; labels everywhere but on padding, and on a row's first token if asked for.

    The pad id is one whose embedding is not zero, so that what stock computes there is not zero either.
    """
    generator = torch.Generator().manual_seed(4)
    longest = max(lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), longest), generator=generator)
    places = torch.arange(longest)
    count = torch.tensor(lengths)[:, None]
    mask = (places < count if side == "right" else places >= longest - count).long()
    labels = ids.masked_fill(mask == 0, -100)
    if not first_tokens:
        labels[torch.arange(len(lengths)), mask.argmax(1)] = -100
    return {"input_ids": ids.masked_fill(mask == 0, pad_id), "attention_mask": mask, "labels": labels}


def train_once(model: nn.Module, batch: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
    """Loss, logits at the tokens, gradients."""
    model.zero_grad()
    output = model(**batch, **kwargs)
    output.loss.backward()
    found = {"loss": output.loss, "logits": output.logits[batch["attention_mask"] != 0]}
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().clone() for name, value in found.items()}


def alone(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss over all targets of the rows fed one by one without padding, and its gradients."""
    model.zero_grad()
    total, targets = 0.0, 0
    for row, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        real = mask != 0
        count = int((labels[real][1:] != -100).sum())
        if count:
            loss = model(input_ids=row[real][None], labels=labels[real][None], use_cache=False).loss
            total, targets = total + loss * count, targets + count
    (total / targets).backward()
    found = {"loss": (total / targets).detach()}
    return found | {f"grad {name}": p.grad.clone() for name, p in model.named_parameters()}


@contextmanager
def one_sequence() -> Iterator[None]:
    """The mutant: the rows of a batch, without their padding, are told to be one sequence."""
    original = UnpaddedSequences.from_mask

    def merged(*args: Any) -> Any:
        found = original(*args)
        assert isinstance(found, UnpaddedSequences)
        whole = PackedSequences.from_lengths([found.total_tokens], found.cu_seqlens.device)
        rows = found.token_indices, found.batch_size, found.length, found.starts_padded
        return UnpaddedSequences._with_rows(whole, *rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnpaddedSequences, "from_mask", merged)
        yield
