"""A padded batch as one row of its real tokens, and the way back.

    unpad: [B, L, ...] -> [1, T, ...]      repad: [1, T, ...] -> [B, L, ...], zeros where the padding was

T is the number of tokens that the attention mask shows. A row of the batch is a sequence of its own; a row without any
token is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import PackingError
from .packing import PackedSequences

# Why a padded batch stays as it is. A reason is a result like any other: it is counted and reported.
NO_PADDING = "no padding"
NO_TOKENS = "no tokens"
GAPS = "a mask with gaps inside of a row"
POSITIONS = "padded rows whose positions do not rise by one"
USED_PADDING = "an output at padding is used"


class UnpaddedSequences(PackedSequences):
    """The sequences of a padded batch, one after another without the padding.

    Attributes, besides those of PackedSequences:
        token_indices: int64 `[T]` on the device: each token's place in the flattened `[B * L]` batch.
        batch_size: B, rows of the padded batch.
        length: L, places of a row.
        starts_padded: whether padding stands before the tokens of some row.
    """

    __slots__ = ("batch_size", "length", "starts_padded", "token_indices")

    token_indices: torch.Tensor
    batch_size: int
    length: int
    starts_padded: bool

    @classmethod
    def from_mask(
        cls,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        used_padding: torch.Tensor | None = None,
    ) -> UnpaddedSequences | str:
        """Finds the tokens of a padded batch. Costs exactly one synchronisation on a device.

        Args:
            attention_mask: `[B, L]`, not 0 where a token is.
            position_ids: integer `[B, L]`, if the batch came with them. Positions that restart or jump inside a row say
                something else than the mask does.
            used_padding: bool `[B, L]`, True where somebody will use the output at a place of padding.

        Returns:
            The sequences, or why the batch is to be left as it is.

        Raises:
            PackingError: a mask that is not `[B, L]`, or tensors of another shape than it.
        """
        if attention_mask.ndim != 2:
            raise PackingError(f"attention_mask must be [B, L], got {tuple(attention_mask.shape)}")
        given = [attention_mask != 0, position_ids, used_padding]
        for name, tensor in (("position_ids", position_ids), ("used_padding", used_padding)):
            if tensor is not None and tensor.shape != attention_mask.shape:
                raise PackingError(
                    f"{name} {tuple(tensor.shape)} and attention_mask {tuple(attention_mask.shape)} must cover the "
                    "same tokens"
                )
        # The one synchronisation: a few kilobytes.
        on_host = iter(torch.stack([x.to(torch.int64) for x in given if x is not None]).cpu())
        real = next(on_host).bool()
        positions = None if position_ids is None else next(on_host)
        used = None if used_padding is None else next(on_host)
        problem = _why_left(real, positions, used)
        if problem:
            return problem
        batch_size, length = real.shape
        lengths = [count for count in real.sum(1).tolist() if count]
        made = cls.from_lengths(lengths, attention_mask.device)
        return cls._with_rows(
            made,
            _upload_indices(real, attention_mask.device),
            batch_size,
            length,
            bool((~real[:, 0] & real.any(1)).any()),
        )

    @classmethod
    def _with_rows(
        cls, packed: PackedSequences, token_indices: torch.Tensor, batch_size: int, length: int, starts_padded: bool
    ) -> UnpaddedSequences:
        made = object.__new__(cls)
        made._set(packed.cu_seqlens, packed.cu_seqlens_host, packed.max_seqlen, packed.total_tokens)
        for name, value in (
            ("token_indices", token_indices),
            ("batch_size", batch_size),
            ("length", length),
            ("starts_padded", starts_padded),
        ):
            object.__setattr__(made, name, value)
        return made

    def __reduce__(self) -> tuple[Callable[..., PackedSequences], tuple[Any, ...]]:
        rebuild, boundaries = super().__reduce__()
        return _rebuilt, (rebuild(*boundaries), self.token_indices, self.batch_size, self.length, self.starts_padded)

    def _make_copy(self, device: torch.device, non_blocking: bool) -> UnpaddedSequences:
        moved = super()._make_copy(device, non_blocking)
        indices = self.token_indices.to(device, non_blocking=non_blocking and device.type != "cpu")
        return UnpaddedSequences._with_rows(moved, indices, self.batch_size, self.length, self.starts_padded)

    @property
    def padding(self) -> int:
        """Places of the batch that hold no token."""
        return self.batch_size * self.length - self.total_tokens

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, L, ...]` (or `[1, L, ...]`, alike for all rows) as `[1, T, ...]`. Differentiable."""
        x = x.expand(self.batch_size, *x.shape[1:])
        return x.flatten(0, 1).index_select(0, self.token_indices)[None]

    def repad(self, x: torch.Tensor) -> torch.Tensor:
        """x `[1, T, ...]` as `[B, L, ...]`, with zeros at the padding. Differentiable."""
        return self.repad_rows(x[0]).unflatten(0, (self.batch_size, self.length))

    def repad_rows(self, x: torch.Tensor) -> torch.Tensor:
        """x `[T, ...]` as `[B * L, ...]`, with zeros at the padding. Differentiable."""
        padded = x.new_zeros((self.batch_size * self.length, *x.shape[1:]))
        return padded.index_copy(0, self.token_indices, x)


def _why_left(real: torch.Tensor, positions: torch.Tensor | None, used: torch.Tensor | None) -> str:
    """All on the host."""
    counts = real.sum(1)
    if bool(real.all()):
        return NO_PADDING
    if not bool(counts.any()):
        return NO_TOKENS
    begins = real.int().diff(dim=1, prepend=torch.zeros(len(real), 1, dtype=torch.int32)) == 1
    if bool((begins.sum(1) > 1).any()):
        return GAPS
    if positions is not None and bool((((positions.diff(dim=1) != 1) & real[:, 1:]) & real[:, :-1]).any()):
        return POSITIONS
    return USED_PADDING if used is not None and bool(used.any()) else ""


def _upload_indices(real: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        indices = real.flatten().nonzero().flatten()
        if device.type == "cuda":
            indices = indices.pin_memory()  # a copy from pageable memory would wait for the stream
        return indices.to(device, non_blocking=True)


def _rebuilt(packed: PackedSequences, *rows: Any) -> UnpaddedSequences:
    return UnpaddedSequences._with_rows(packed, *rows)
