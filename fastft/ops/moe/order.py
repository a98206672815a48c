"""What an order of experts is: data, for kernels and reference alike."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExpertOrder(NamedTuple):
    """Pairs of a token and one of its experts, expert by expert; within an expert in the order of the tokens.

    Pair t * K + k is token t with its k-th choice; there are S = T * K. Pairs without an expert come last.

    Attributes:
        pairs: int32 [S], the pair at each row.
        rows: int32 [S], the row of each pair.
        offsets: int32 [E], where each expert's rows end, as `torch.nn.functional.grouped_mm` takes it.
    """

    pairs: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
