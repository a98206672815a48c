"""PackedSequences: builders, what is derived from the boundaries, immutability, copies, synchronisations."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from itertools import pairwise

import pytest
import torch

from fastft.errors import PackingError
from fastft.packing import PackedSequences


def positions(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def unread(*boundaries: int, longest: int | None = None) -> PackedSequences:
    """Boundaries that only the device knows, empty sequences included."""
    if longest is None:
        longest = max((end - start for start, end in pairwise(boundaries)), default=0)
    return PackedSequences._checked(torch.tensor(boundaries, dtype=torch.int32), None, longest, boundaries[-1])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what would wait for a GPU: every way in which a tensor's numbers reach the host."""
    counts: Counter[str] = Counter()
    for name in ("cpu", "item", "tolist", "__bool__", "__int__", "nonzero", "numpy"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            counts[_name] += 1
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return counts


# ------------------------------------------------------------------------------------------------ from_lengths


@pytest.mark.parametrize(
    ("lengths", "host", "longest"),
    [
        ([3, 1, 7], (0, 3, 4, 11), 7),
        ([0, 1, 0, 1], (0, 1, 2), 1),
        ([0, 0, 0, 1], (0, 1), 1),
        ([0], (0,), 0),
        ([], (0,), 0),
        ((5,), (0, 5), 5),
    ],
)
def test_from_lengths(device, lengths, host, longest):
    packed = PackedSequences.from_lengths(lengths, device)
    assert packed.cu_seqlens.tolist() == list(host)
    assert packed.cu_seqlens_host == host
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.ndim == 1
    assert packed.cu_seqlens.device.type == device.type
    assert (packed.total_tokens, packed.num_sequences, packed.max_seqlen) == (host[-1], len(host) - 1, longest)
    assert type(packed.max_seqlen) is type(packed.total_tokens) is int
    assert packed.segments == tuple(pairwise(host))


def test_from_lengths_refuses_negative_lengths():
    with pytest.raises(PackingError, match="must not be negative, got -2"):
        PackedSequences.from_lengths([3, -2], "cpu")


def test_from_lengths_reads_nothing_back(device, reads):
    PackedSequences.from_lengths([3, 4], device)
    assert not reads


# ------------------------------------------------------------------------------------------------ from_cu_seqlens


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_cu_seqlens_on_the_host_drops_empty_sequences(dtype):
    given = torch.tensor([0, 0, 3, 3, 5, 5], dtype=dtype)
    packed = PackedSequences.from_cu_seqlens(given, 8, 5)
    assert packed.cu_seqlens_host == (0, 3, 5)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 3  # the bound of 8 gives way to the truth


def test_from_cu_seqlens_takes_the_longest_as_a_tensor_and_keeps_an_int():
    packed = PackedSequences.from_cu_seqlens(torch.tensor([0, 3]), torch.tensor(3), 3)  # type: ignore[arg-type]
    assert type(packed.max_seqlen) is int


def test_from_cu_seqlens_of_an_empty_batch():
    assert PackedSequences.from_cu_seqlens(torch.tensor([0]), 0, 0).num_sequences == 0
    assert PackedSequences.from_cu_seqlens(torch.tensor([0, 0]), 0, 0).num_sequences == 0


@pytest.mark.parametrize(
    ("boundaries", "longest", "tokens", "words"),
    [
        ([0, 3, 6], 3, 7, "from 0 to 6, but the batch has tokens 0 to 7"),
        ([1, 3, 7], 4, 7, "from 1 to 7"),
        ([0, 5, 3, 7], 7, 7, "must not decrease"),
        ([0, 3, 7], 3, 7, "4 tokens, more than max_seqlen=3"),
        ([0], 3, 7, "from 0 to 0"),
    ],
)
def test_from_cu_seqlens_refuses_boundaries_that_contradict_the_batch(boundaries, longest, tokens, words):
    with pytest.raises(PackingError, match=words):
        PackedSequences.from_cu_seqlens(torch.tensor(boundaries), longest, tokens)


@pytest.mark.parametrize(
    "given", [torch.tensor([[0, 3]]), torch.tensor([0.0, 3.0]), torch.tensor([]), torch.tensor(3), torch.tensor([True])]
)
def test_from_cu_seqlens_refuses_other_shapes_and_dtypes(given):
    with pytest.raises(PackingError, match="1-D int32 or int64"):
        PackedSequences.from_cu_seqlens(given, 3, 3)


# ------------------------------------------------------------------------------------------------ from_position_ids

PACKED_ROWS = {
    "one row": ([[0, 1, 2, 0, 1]], [3, 2]),
    "one-token documents": ([[0, 0, 0, 1, 0]], [1, 1, 2, 1]),
    "two rows": ([[0, 1, 0, 1], [0, 1, 2, 3]], [2, 2, 4]),
    "a document never runs on into the next row": ([[0, 1, 0, 1], [2, 3, 4, 5]], [2, 2, 4]),
    "pad tail of zeros": ([[0, 1, 2, 0, 1, 0, 0, 0]], [3, 2, 1, 1, 1]),
    "positions that start at padding_idx + 1": ([[2, 3, 4, 2, 3]], [3, 2]),
    "a jump inside a packed row": ([[0, 1, 0, 1, 5, 6]], [2, 2, 2]),
    "repeated position": ([[0, 1, 1, 2]], [2, 2]),
}
UNPACKED_ROWS = {
    "plain": [[0, 1, 2, 3]],
    "starts at 2": [[2, 3, 4, 5]],
    "new tokens behind a cache": [[10, 11, 12]],
    "jumps forward only": [[0, 1, 5, 6]],
    "two rows with different starts": [[0, 1, 2], [7, 8, 9]],
    "one-token rows": [[0], [0]],
    "empty rows": [[], []],
}


@pytest.mark.parametrize("name", PACKED_ROWS)
@pytest.mark.parametrize("whole_rows", [False, True])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.int64, torch.float32])
def test_positions_that_restart_are_packed(device, name, whole_rows, mask):
    rows, lengths = PACKED_ROWS[name]
    ids = torch.tensor(rows, device=device)
    ones = None if mask is None else torch.ones(ids.shape, dtype=mask, device=device)
    packed = PackedSequences.from_position_ids(ids, ones, whole_rows=whole_rows)
    assert packed is not None
    assert [end - start for start, end in packed.segments] == lengths
    assert packed.total_tokens == ids.numel()
    assert packed.cu_seqlens.device == ids.device


@pytest.mark.parametrize("name", UNPACKED_ROWS)
def test_positions_that_only_grow_are_not_packed(name):
    assert PackedSequences.from_position_ids(torch.tensor(UNPACKED_ROWS[name]).long()) is None


@pytest.mark.parametrize("name", UNPACKED_ROWS)
def test_whole_rows_accepts_rows_that_count_up_in_ones(name):
    ids = torch.tensor(UNPACKED_ROWS[name]).long()
    packed = PackedSequences.from_position_ids(ids, whole_rows=True)
    if name == "jumps forward only":
        assert packed is None
    else:
        assert packed is not None
        rows = [tuple(range(i * ids.shape[1], (i + 1) * ids.shape[1])) for i in range(ids.shape[0])]
        assert [tuple(range(*segment)) for segment in packed.segments] == [row for row in rows if row]


@pytest.mark.parametrize("whole_rows", [False, True])
@pytest.mark.parametrize(
    ("rows", "mask"),
    [
        ([[1, 1, 1, 0, 1, 2]], [[0, 0, 0, 1, 1, 1]]),  # left padding as transformers writes it
        ([[0, 1, 2, 0, 0, 0]], [[1, 1, 1, 0, 0, 0]]),
        ([[0, 1, 2, 3], [0, 1, 2, 3]], [[1, 1, 1, 1], [1, 1, 1, 0]]),
        ([[0, 1, 2, 3]], [[0, 0, 0, 0]]),
        ([[0, 1, 0, 1]], [[1, 1, 1, 0]]),
    ],
)
def test_a_mask_that_hides_a_token_means_padding(rows, mask, whole_rows):
    assert PackedSequences.from_position_ids(positions(*rows), torch.tensor(mask), whole_rows=whole_rows) is None


def test_a_fractional_mask_hides_nothing():
    ids = positions([0, 1, 0, 1])
    assert PackedSequences.from_position_ids(ids, torch.full((1, 4), 0.5)) is not None


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_integers_of_any_width_are_positions(dtype):
    packed = PackedSequences.from_position_ids(positions([0, 1, 2, 0, 1]).to(dtype))
    assert packed is not None
    assert packed.cu_seqlens_host == (0, 3, 5)


@pytest.mark.parametrize("ids", [torch.tensor([0, 1, 0]), torch.zeros(3, 1, 4).long(), torch.zeros(1, 4)])
def test_positions_of_another_shape_or_dtype_are_refused(ids):
    with pytest.raises(PackingError, match="integers of shape"):
        PackedSequences.from_position_ids(ids)


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(PackingError, match=r"mask \(2, 3\) and position_ids \(1, 3\)"):
        PackedSequences.from_position_ids(positions([0, 1, 0]), torch.ones(2, 3))


@pytest.mark.parametrize("mask", [None, torch.ones(1, 5)])
def test_positions_are_copied_to_the_host_once(reads, mask):
    PackedSequences.from_position_ids(positions([0, 1, 2, 0, 1]), mask)
    assert reads["cpu"] == 1


# ------------------------------------------------------------------------------------------------ derived tensors

LAYOUTS = [(0,), (0, 1), (0, 0, 3, 3, 3, 7, 8, 8), (0, 5, 12), (0, 1, 2, 3)]


@pytest.mark.parametrize("boundaries", LAYOUTS, ids=str)
def test_positions_and_document_ids(device, boundaries):
    packed = unread(*boundaries).to(device)
    expected_positions, expected_documents = [], []
    for document, (start, end) in enumerate(pairwise(boundaries)):
        expected_positions += range(end - start)
        expected_documents += [document] * (end - start)
    assert packed.position_ids.tolist() == expected_positions
    assert packed.doc_ids.tolist() == expected_documents
    assert packed.position_ids.dtype == packed.doc_ids.dtype == torch.int64
    assert packed.position_ids.device.type == device.type
    assert packed.position_ids is packed.position_ids
    assert packed.doc_ids is packed.doc_ids


@pytest.mark.parametrize("boundaries", LAYOUTS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (2, None), (None, 1), (2, 1), (0, 0), (99, 99)])
def test_attention_mask_against_brute_force(boundaries, causal, window):
    packed = unread(*boundaries)
    left, right = (10**6 if side is None else side for side in window)
    expected = torch.zeros(packed.total_tokens, packed.total_tokens, dtype=torch.bool)
    for start, end in pairwise(boundaries):
        for i in range(start, end):
            for j in range(start, end):
                expected[i, j] = i - left <= j <= i + (0 if causal else right)
    mask = packed.attention_mask(causal=causal, window_size=window)
    assert mask.shape == (1, 1, packed.total_tokens, packed.total_tokens)
    assert torch.equal(mask[0, 0], expected)
    assert packed.attention_mask(causal=causal, window_size=window) is mask


def test_segments_of_unread_boundaries_are_read_once(reads):
    packed = unread(0, 0, 3, 5)
    assert packed.segments == packed.segments == ((0, 0), (0, 3), (3, 5))
    assert reads == {"tolist": 1}


# ------------------------------------------------------------------------------------------------ the object


def test_it_is_immutable():
    packed = PackedSequences.from_lengths([2, 3], "cpu")
    for name in ("cu_seqlens", "max_seqlen", "anything"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(packed, name, 1)
        with pytest.raises(AttributeError, match="immutable"):
            delattr(packed, name)
    assert not hasattr(packed, "__dict__")


def test_pytree_and_dataclass_rebuilding_leave_it_alone():
    packed = PackedSequences.from_lengths([2, 3], "cpu")
    assert torch.utils._pytree.tree_map(lambda leaf: leaf, {"packed": packed})["packed"] is packed


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda packed: pickle.loads(pickle.dumps(packed))],
    ids=["deep", "copy", "pickle"],
)
def test_copies_are_equal_and_independent(copied):
    for packed in (PackedSequences.from_lengths([2, 3], "cpu"), unread(0, 0, 4)):
        _ = packed.position_ids
        other = copied(packed)
        assert other is not packed
        assert torch.equal(other.cu_seqlens, packed.cu_seqlens)
        assert repr(other) == repr(packed)
        assert other.cu_seqlens_host == packed.cu_seqlens_host
        assert other.position_ids is not packed.position_ids


def test_moving_is_remembered():
    packed = PackedSequences.from_lengths([2, 3], "cpu")
    assert packed.to("cpu") is packed
    moved = packed.to("meta", non_blocking=True)
    assert moved is packed.to(torch.device("meta")) is packed.to("meta")
    assert moved.cu_seqlens.device.type == "meta"
    assert (moved.cu_seqlens_host, moved.max_seqlen, moved.total_tokens) == ((0, 2, 5), 3, 5)


@pytest.mark.parametrize("build", ["lengths", "positions", "derived"])
def test_what_an_evaluation_made_can_be_trained_with(build):
    outside = PackedSequences.from_lengths([2, 3], "cpu")
    with torch.inference_mode():
        packed = {
            "lengths": lambda: PackedSequences.from_lengths([2, 3], "cpu"),
            "positions": lambda: PackedSequences.from_position_ids(positions([0, 1, 0, 1, 2])),
            "derived": lambda: outside,
        }[build]()
        tensors = [packed.cu_seqlens, packed.position_ids, packed.doc_ids]
    assert not any(tensor.is_inference() for tensor in tensors)


# -------------------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("told", ["host", "device"])
def test_chunks_cut_every_sequence_from_its_start(device, told):
    packed = PackedSequences.from_lengths([5, 1, 8, 4], device)
    if told == "device":  # the boundaries are known there only
        packed = PackedSequences._checked(packed.cu_seqlens, None, packed.max_seqlen, packed.total_tokens)
    assert packed.chunks(8) is packed
    cut = packed.chunks(4)
    assert cut.cu_seqlens.tolist() == [0, 4, 5, 6, 10, 14, 18]
    assert (cut.max_seqlen, cut.total_tokens) == (4, 18)
    assert packed.chunks(4) is cut
    assert packed.chunks(1).cu_seqlens.tolist() == list(range(19))
    assert PackedSequences.from_lengths([], device).chunks(1).total_tokens == 0
