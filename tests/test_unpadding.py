"""The real tokens of a padded batch: where they are, the way there and back, and what is no padded batch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from fastft import PackedSequences
from fastft.errors import PackingError
from fastft.unpadding import GAPS, NO_PADDING, NO_TOKENS, POSITIONS, USED_PADDING, UnpaddedSequences

MASK = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
TOKENS = [1, 2, 3, 8, 9, 12, 13, 14, 15]


def assert_is_of_mask(found: object) -> None:
    assert isinstance(found, UnpaddedSequences)
    assert found.cu_seqlens_host == (0, 3, 5, 9) and found.cu_seqlens.dtype == torch.int32  # no empty sequence
    assert found.token_indices.tolist() == TOKENS and (found.batch_size, found.length) == (4, 4)
    assert found.starts_padded and found.padding == 7 and found.max_seqlen == 4


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_the_tokens_of_a_mask(dtype: torch.dtype) -> None:
    assert_is_of_mask(UnpaddedSequences.from_mask(MASK.to(dtype)))
    right = UnpaddedSequences.from_mask(MASK[2:])
    assert isinstance(right, UnpaddedSequences) and not right.starts_padded


def test_there_and_back_with_gradients() -> None:
    found = UnpaddedSequences.from_mask(MASK)
    assert isinstance(found, UnpaddedSequences)
    x = torch.randn(4, 4, 3, dtype=torch.float64, requires_grad=True)
    packed = found.unpad(x)
    assert torch.equal(packed, x.flatten(0, 1)[TOKENS][None])
    back = found.repad(packed)
    real = (MASK != 0)[..., None]
    assert torch.equal(back, x * real) and torch.equal(found.repad_rows(packed[0]), back.flatten(0, 1))
    upstream = torch.randn_like(back)
    back.backward(upstream)
    assert torch.equal(x.grad, upstream * real)
    assert torch.equal(found.unpad(torch.arange(4)[None])[0], torch.tensor([1, 2, 3, 0, 1, 0, 1, 2, 3]))


@pytest.mark.parametrize(
    "remade", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.to("cpu")]
)
def test_copies_know_the_way_back(remade) -> None:
    assert_is_of_mask(remade(UnpaddedSequences.from_mask(MASK)))


def test_moved_to_another_device() -> None:
    moved = UnpaddedSequences.from_mask(MASK).to("meta")
    assert isinstance(moved, UnpaddedSequences) and moved.token_indices.device.type == "meta"
    assert moved.token_indices.shape == (9,) and moved.starts_padded


@pytest.mark.parametrize(
    ("mask", "positions", "used", "reason"),
    [
        ([[1, 1, 1]], None, None, NO_PADDING),
        ([[0, 0, 0]], None, None, NO_TOKENS),
        ([[1, 0, 1]], None, None, GAPS),
        ([[0, 1, 0, 1]], None, None, GAPS),
        ([[1, 1, 1, 0]], [[0, 1, 0, 1]], None, POSITIONS),
        ([[1, 1, 1, 0]], [[0, 2, 3, 4]], None, POSITIONS),
        ([[1, 1, 1, 0]], None, [[0, 0, 0, 1]], USED_PADDING),
    ],
)
def test_what_is_left_as_it_is(mask, positions, used, reason: str) -> None:
    tensors = [None if x is None else torch.tensor(x) for x in (mask, positions, used)]
    assert UnpaddedSequences.from_mask(*tensors) == reason


def test_positions_at_padding_may_be_anything() -> None:
    for positions in ([[7, 5, 6, 7], [0] * 4, [3, 4, 9, 9], [0, 1, 2, 3]], [[0, 1, 2, 3]] * 4):
        assert_is_of_mask(UnpaddedSequences.from_mask(MASK, torch.tensor(positions)))


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(PackingError, match=r"must be \[B, L\], got \(4,\)"):
        UnpaddedSequences.from_mask(MASK[0])
    for name in ("position_ids", "used_padding"):
        with pytest.raises(PackingError, match=rf"{name} \(1, 4\) and attention_mask \(4, 4\)"):
            UnpaddedSequences.from_mask(MASK, **{name: torch.zeros(1, 4)})


def test_it_is_a_packed_sequences_that_nobody_changes() -> None:
    found = UnpaddedSequences.from_mask(MASK)
    assert isinstance(found, PackedSequences)
    with pytest.raises(AttributeError, match="immutable"):
        found.length = 5
