"""Packed batches whose shapes never change: always N tokens, always as many boundaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from ..errors import PackingError

IGNORE_INDEX = -100


class FixedTokensCollator:
    """Fills the batches of a collator that does not pad up to N tokens.

    The tail is a sequence of its own, of pad tokens that are no targets. The boundaries are filled up with N, which
    makes empty sequences. What a batch costs and looks like is then the same in every step, for compiled graphs and
    for buffers that are reused.

    Args:
        collator: makes packed batches of one row, with boundaries as TRL's collators hand them over.
        fixed_tokens: N.
        max_sequences: most sequences a batch may hold, without the tail.
        pad_token_id: of the tail.
    """

    def __init__(
        self, collator: Callable[[Any], dict[str, Any]], fixed_tokens: int, max_sequences: int, pad_token_id: int
    ) -> None:
        self.collator = collator
        self.fixed_tokens = fixed_tokens
        self.max_sequences = max_sequences
        self.pad_token_id = pad_token_id

    def __call__(self, features: Any) -> dict[str, Any]:
        """The collator's batch with input_ids, labels and position_ids `[1, N]` and cu_seq_lens `[max_sequences + 2]`.

        Raises:
            PackingError: the samples have more tokens or sequences than the batch has room for.
        """
        batch = dict(self.collator(features))
        tokens, boundaries = batch["input_ids"].shape[1], batch["cu_seq_lens_q"]
        if tokens > self.fixed_tokens or len(boundaries) > self.max_sequences + 1:
            raise PackingError(
                f"a batch of {tokens} tokens in {len(boundaries) - 1} sequences does not fit fixed_tokens="
                f"{self.fixed_tokens} and max_sequences={self.max_sequences}; raise them, or pack shorter rows"
            )
        tail = self.fixed_tokens - tokens
        batch["input_ids"] = pad(batch["input_ids"], (0, tail), value=self.pad_token_id)
        batch["labels"] = pad(batch["labels"], (0, tail), value=IGNORE_INDEX)
        batch["position_ids"] = torch.cat([batch["position_ids"], torch.arange(tail)[None]], 1)
        filled = pad(boundaries, (0, self.max_sequences + 2 - len(boundaries)), value=self.fixed_tokens)
        batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = filled
        batch["max_length_q"] = batch["max_length_k"] = max(int(batch["max_length_q"]), tail)
        if "seq_idx" in batch:
            batch["seq_idx"] = pad(batch["seq_idx"], (0, tail), value=len(boundaries) - 1)
        return batch
