"""Where one sequence ends and the next begins, worked out once per batch.

`PackedSequences` travels through the keyword arguments of every layer, so that a checkpoint's recompute and
interleaved forwards each see their own. It is an immutable `__slots__` class and not a dataclass or tuple on purpose:
FSDP2's mixed precision rebuilds those in every module, which would lose what is cached on the object.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from .errors import PackingError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class PackedSequences:
    """The boundaries of the sequences that lie one after another in a batch's tokens.

    Attributes:
        cu_seqlens: int32 `[num_sequences + 1]` on the tokens' device: sequence i is tokens
            `cu_seqlens[i]` to `cu_seqlens[i + 1] - 1`; the first is 0, the last `total_tokens`.
        cu_seqlens_host: the same as a tuple of ints, or None when only the device knows them.
        max_seqlen: length of the longest sequence, a Python int (it may be an upper bound when the
            device alone knows the lengths).
        total_tokens: number of tokens, T.
        num_sequences: number of sequences, N.
    """

    __slots__ = ("__weakref__", "_lazy", "cu_seqlens", "cu_seqlens_host", "max_seqlen", "num_sequences", "total_tokens")

    cu_seqlens: torch.Tensor
    cu_seqlens_host: tuple[int, ...] | None
    max_seqlen: int
    total_tokens: int
    num_sequences: int
    _lazy: dict[Any, Any]

    def __init__(
        self, cu_seqlens: torch.Tensor, cu_seqlens_host: tuple[int, ...] | None, max_seqlen: int, total_tokens: int
    ) -> None:
        """Takes boundaries that are ready to use; the builders below make them.

        Raises:
            PackingError: they contradict each other. Boundaries that only a device knows are checked there, and stop at
                a device assertion.
        """
        _check_boundaries(cu_seqlens, cu_seqlens_host, max_seqlen, total_tokens)
        self._set(cu_seqlens, cu_seqlens_host, max_seqlen, total_tokens)

    @classmethod
    def _checked(
        cls, cu_seqlens: torch.Tensor, cu_seqlens_host: tuple[int, ...] | None, max_seqlen: int, total_tokens: int
    ) -> PackedSequences:
        """Without looking at the boundaries again."""
        made = object.__new__(cls)
        made._set(cu_seqlens, cu_seqlens_host, max_seqlen, total_tokens)
        return made

    def _set(
        self, cu_seqlens: torch.Tensor, cu_seqlens_host: tuple[int, ...] | None, max_seqlen: int, total_tokens: int
    ) -> None:
        for name, value in (
            ("cu_seqlens", cu_seqlens),
            ("cu_seqlens_host", cu_seqlens_host),
            ("max_seqlen", max_seqlen),
            ("total_tokens", total_tokens),
            ("num_sequences", cu_seqlens.shape[0] - 1),
            ("_lazy", {}),
        ):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"PackedSequences is immutable; build a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"PackedSequences is immutable; {name!r} cannot be deleted")

    def __reduce__(self) -> tuple[Callable[..., PackedSequences], tuple[Any, ...]]:
        return PackedSequences._checked, (self.cu_seqlens, self.cu_seqlens_host, self.max_seqlen, self.total_tokens)

    def __repr__(self) -> str:
        return (
            f"PackedSequences(num_sequences={self.num_sequences}, total_tokens={self.total_tokens}, "
            f"max_seqlen={self.max_seqlen}, device={self.cu_seqlens.device})"
        )

    # --- builders -------------------------------------------------------------------------------------------------

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str) -> PackedSequences:
        """Builds it from lengths that the host knows; costs no synchronisation. Empty sequences are dropped.

        Args:
            lengths: tokens of each sequence, in order.
            device: where the tokens live.

        Raises:
            PackingError: a length is negative.
        """
        if any(length < 0 for length in lengths):
            raise PackingError(f"sequence lengths must not be negative, got {min(lengths)}; check the collator")
        kept = [int(length) for length in lengths if length]
        host = (0, *accumulate(kept))
        return cls._checked(_upload(host, torch.device(device)), host, max(kept, default=0), host[-1])

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor, max_seqlen: int, total_tokens: int) -> PackedSequences:
        """Takes boundaries that a collator computed. Boundaries on the host are read and empty sequences dropped;
        boundaries on a device are checked there without waiting: a bad batch then stops at a device assertion,
        before any kernel reads past its end.

        Args:
            cu_seqlens: integer `[N + 1]`, from 0 to `total_tokens`, not decreasing.
            max_seqlen: length of the longest sequence, or an upper bound.
            total_tokens: number of tokens in the batch.

        Raises:
            PackingError: the shape or dtype is wrong, or (host boundaries) they contradict the batch.
        """
        host = tuple(cu_seqlens.tolist()) if cu_seqlens.device.type == "cpu" and cu_seqlens.ndim == 1 else None
        _check_boundaries(cu_seqlens, host, int(max_seqlen), total_tokens)
        if host is not None:
            return cls.from_lengths([end - start for start, end in pairwise(host)], cu_seqlens.device)
        with torch.inference_mode(False):  # a copy of our own: the collator may reuse its buffer
            return cls._checked(cu_seqlens.to(torch.int32, copy=True), None, int(max_seqlen), total_tokens)

    @classmethod
    def from_position_ids(
        cls, position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, whole_rows: bool = False
    ) -> PackedSequences | None:
        """Finds the boundaries in positions that restart. Costs exactly one synchronisation on a device.

        A batch is packed only if a position somewhere fails to grow; positions that merely jump ahead (a row that
        starts at 2, position skipping) are ambiguous and left alone. In a packed batch every step other than +1 is
        a boundary, and so is every row.

        Args:
            position_ids: integer `[B, L]`.
            attention_mask: optional `[B, L]`; a mask that hides any token means padding, not packing.
            whole_rows: accept an unpacked batch too, whose rows count up in steps of one: each is a sequence.

        Returns:
            The boundaries of all B x L tokens in row order, or None when the batch is not packed.

        Raises:
            PackingError: positions that are no integer `[B, L]`, or a mask of another shape.
        """
        if position_ids.ndim != 2 or position_ids.dtype not in _INTEGERS:
            raise PackingError(
                f"position_ids must be integers of shape [B, L], got {position_ids.dtype} {tuple(position_ids.shape)}"
            )
        if attention_mask is not None and attention_mask.shape != position_ids.shape:
            raise PackingError(
                f"attention_mask {tuple(attention_mask.shape)} and position_ids {tuple(position_ids.shape)} must cover "
                "the same tokens; expand the position_ids to every row"
            )
        batch_size, length = position_ids.shape
        wanted = [position_ids] if attention_mask is None else [position_ids, (attention_mask != 0).to(position_ids)]
        on_host, *mask = torch.stack(wanted).cpu().long()  # the one synchronisation: a few kilobytes
        if mask and not bool(mask[0].all()):
            return None
        steps = on_host.diff(dim=1)
        if not bool((steps <= 0).any()) and not (whole_rows and bool((steps == 1).all())):
            return None
        starts = torch.ones(batch_size, length, dtype=torch.bool)
        starts[:, 1:] = steps != 1
        first = starts.flatten().nonzero().flatten().tolist()
        return cls.from_lengths([e - s for s, e in pairwise([*first, batch_size * length])], position_ids.device)

    # --- what engines need, made at most once per batch ----------------------------------------------------------

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of every sequence on the host; costs one synchronisation if only the device knows them."""
        return self._once("segments", lambda: tuple(pairwise(self._boundaries())))

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 `[T]` on the device: each token's place within its own sequence, starting at 0."""
        return self._once("position_ids", self._make_position_ids)

    @property
    def doc_ids(self) -> torch.Tensor:
        """int64 `[T]` on the device: the index of each token's sequence."""
        return self._once("doc_ids", self._make_doc_ids)

    def chunks(self, size: int) -> PackedSequences:
        """Every sequence cut into pieces of `size` tokens and a rest. Costs one synchronisation if a sequence may be
        longer and only the device knows the boundaries."""
        return self if self.max_seqlen <= size else self._once(("chunks", size), lambda: self._make_chunks(size))

    def attention_mask(self, *, causal: bool, window_size: tuple[int | None, int | None]) -> torch.Tensor:
        """bool `[1, 1, T, T]`, True where a query may see a key. For implementations that know no boundaries; it
        costs T x T bytes.

        Args:
            causal: a query sees no later key.
            window_size: how many keys to the left and right of itself a query sees; None means all.
        """
        return self._once(("mask", causal, window_size), lambda: self._make_attention_mask(causal, window_size))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedSequences:
        """The same boundaries on another device; asked twice, it returns the same object."""
        device = torch.device(device)
        if str(device) == "cuda":  # the current one; tensors always carry an index
            device = torch.device("cuda", torch.cuda.current_device())
        if device == self.cu_seqlens.device:
            return self
        return self._once(("to", device), lambda: self._make_copy(device, non_blocking))

    def _make_copy(self, device: torch.device, non_blocking: bool) -> PackedSequences:
        if self.cu_seqlens_host is not None:
            moved = _upload(self.cu_seqlens_host, device)
        else:  # the host reads what arrives there, so it has to have arrived
            moved = self.cu_seqlens.to(device, non_blocking=non_blocking and device.type != "cpu")
        return PackedSequences._checked(moved, self.cu_seqlens_host, self.max_seqlen, self.total_tokens)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._lazy:
            with torch.inference_mode(False):  # a training step may use what an evaluation of the same batch made
                self._lazy[key] = make()
        return self._lazy[key]

    def _boundaries(self) -> tuple[int, ...]:
        return self.cu_seqlens_host if self.cu_seqlens_host is not None else tuple(self.cu_seqlens.tolist())

    def _make_chunks(self, size: int) -> PackedSequences:
        pieces = (range(start, end, size) for start, end in self.segments)
        starts = [*(start for piece in pieces for start in piece), self.total_tokens]
        return PackedSequences.from_lengths([end - start for start, end in pairwise(starts)], self.cu_seqlens.device)

    def _make_doc_ids(self) -> torch.Tensor:
        tokens = torch.arange(self.total_tokens, device=self.cu_seqlens.device, dtype=torch.int32)
        return torch.bucketize(tokens, self.cu_seqlens[1:], right=True)

    def _make_position_ids(self) -> torch.Tensor:
        tokens = torch.arange(self.total_tokens, device=self.cu_seqlens.device)
        return tokens - self.cu_seqlens[self.doc_ids]

    def _make_attention_mask(self, causal: bool, window_size: tuple[int | None, int | None]) -> torch.Tensor:
        query = torch.arange(self.total_tokens, device=self.cu_seqlens.device)[:, None]
        key = query.T
        visible = self.doc_ids[:, None] == self.doc_ids[None, :]
        left, right = window_size
        if causal:
            visible = visible & (key <= query)
        if left is not None:
            visible = visible & (key >= query - left)
        if right is not None:
            visible = visible & (key <= query + right)
        return visible[None, None]


def _check_boundaries(
    cu_seqlens: torch.Tensor, host: tuple[int, ...] | None, max_seqlen: int, total_tokens: int
) -> None:
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise PackingError(
            f"cu_seqlens must be a non-empty 1-D int32 or int64 tensor, got shape {tuple(cu_seqlens.shape)} and "
            f"{cu_seqlens.dtype}; it holds N + 1 boundaries from 0 to the number of tokens"
        )
    if host is None and cu_seqlens.device.type == "cpu":
        host = tuple(cu_seqlens.tolist())
    if host is None:
        lengths = cu_seqlens.diff()
        valid = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total_tokens)
        valid &= ((lengths >= 0) & (lengths <= max_seqlen)).all()
        torch._assert_async(
            valid, "fastft: cu_seqlens must rise from 0 to the number of tokens in steps of at most max_seqlen"
        )
        return
    if len(host) != cu_seqlens.numel() or host[0] != 0 or host[-1] != total_tokens:
        raise PackingError(
            f"{cu_seqlens.numel()} cu_seqlens run from {host[0]} to {host[-1]}, but the batch has tokens 0 to "
            f"{total_tokens}; every token must belong to one sequence"
        )
    lengths_on_host = [end - start for start, end in pairwise(host)]
    if min(lengths_on_host, default=0) < 0:
        raise PackingError("cu_seqlens must not decrease; check the order of the boundaries")
    if max(lengths_on_host, default=0) > max_seqlen:
        raise PackingError(
            f"a sequence has {max(lengths_on_host)} tokens, more than max_seqlen={max_seqlen}; attention would drop "
            "the rest, so pass the length of the longest sequence"
        )


def _upload(boundaries: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        on_host = torch.tensor(boundaries, dtype=torch.int32)
        if device.type == "cuda":
            on_host = on_host.pin_memory()  # a copy from pageable memory would wait for the stream
        return on_host.to(device, non_blocking=True)


class PackedSequenceCache:
    """The boundaries found for the last few batches, so that a batch seen twice (a reference and a policy model)
    is synchronised for once. It belongs to one patched model.

    An entry counts only while its source tensors are alive and unchanged: the key is their identity and version.
    Inference tensors carry no version and are never remembered. Neither are tensors on the CPU: reading them again
    costs no synchronisation, and their memory may be refilled from outside (numpy, a loader's shared buffer).
    On a device, a write that leaves the version alone (through `x.data`, or by a kernel of one's own) is not seen:
    write in place through torch, or give a new tensor.
    """

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._entries: list[tuple[Hashable, tuple[Any, ...], Any]] = []

    def lookup(self, question: Hashable, *sources: torch.Tensor | None) -> tuple[bool, Any]:
        """(found, answer) to this question about these very tensors in their present state."""
        for asked, key, answer in self._entries:
            if asked == question and len(key) == len(sources) and all(map(_is_same, key, sources)):
                return True, answer
        return False, None

    def remember(self, answer: Any, question: Hashable, *sources: torch.Tensor | None) -> None:
        """Keeps the answer for as long as the tensors live and stay unchanged."""
        if any(source is not None and (source.is_inference() or source.device.type == "cpu") for source in sources):
            return
        key = tuple(None if source is None else (weakref.ref(source), source._version) for source in sources)
        current = [entry for entry in self._entries if all(map(_is_current, entry[1]))]
        self._entries = [(question, key, answer), *current][: self._capacity]

    def __reduce__(self) -> tuple[Callable[..., PackedSequenceCache], tuple[int]]:
        return PackedSequenceCache, (self._capacity,)  # a copy starts empty: its batches are other tensors


def _is_current(entry: tuple[weakref.ref[torch.Tensor], int] | None) -> bool:
    if entry is None:
        return True
    reference, version = entry
    source = reference()
    return source is not None and source._version == version


def _is_same(entry: tuple[weakref.ref[torch.Tensor], int] | None, source: torch.Tensor | None) -> bool:
    if entry is None or source is None:
        return entry is None and source is None
    reference, version = entry
    return reference() is source and not source.is_inference() and source._version == version
