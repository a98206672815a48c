"""PackedSequenceCache: it knows the same tensors in the same state, and keeps nothing alive for long."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from fastft.packing import PackedSequenceCache, PackedSequences

PACKED = PackedSequences.from_lengths([2, 3], "cpu")


def positions():
    """The meta device stands in for a GPU: tensors on the CPU are never remembered."""
    return torch.arange(4, device="meta")


def test_cache_knows_the_same_tensors_in_the_same_state():
    cache, ids, mask = PackedSequenceCache(), positions(), torch.ones(4, device="meta")
    cache.remember(PACKED, "question", ids, mask)
    assert cache.lookup("question", ids, mask) == (True, PACKED)
    assert cache.lookup("another", ids, mask) == (False, None)
    assert cache.lookup("question", ids) == (False, None)
    assert cache.lookup("question", ids, None) == (False, None)
    assert cache.lookup("question", mask, ids) == (False, None)
    assert cache.lookup("question", ids.clone(), mask) == (False, None)
    assert cache.lookup("question", ids.view(4), mask) == (False, None)


def test_cache_remembers_that_a_batch_is_not_packed():
    cache, ids = PackedSequenceCache(), positions()
    cache.remember(None, "question", ids, None)
    assert cache.lookup("question", ids, None) == (True, None)


def test_cache_forgets_a_tensor_that_was_written():
    cache, ids = PackedSequenceCache(), positions()
    cache.remember(PACKED, "question", ids)
    ids.add_(0)
    assert cache.lookup("question", ids) == (False, None)
    cache.remember(None, "question", ids)
    ids.view(2, 2)[0, 0] = 3  # through a view
    assert cache.lookup("question", ids) == (False, None)


def test_cache_holds_its_tensors_weakly():
    cache, ids = PackedSequenceCache(), positions()
    packed = PackedSequences.from_cu_seqlens(torch.tensor([0, 4], dtype=torch.int32), 4, 4)
    cache.remember(packed, "question", ids)
    for reused in range(20):  # another tensor may get the same address
        del ids
        ids = positions()
        assert cache.lookup("question", ids) == (False, None), reused


def test_cache_lets_go_of_answers_about_dead_tensors():
    cache, ids, later = PackedSequenceCache(), positions(), positions()
    packed = PackedSequences.from_lengths([4], "cpu")
    cache.remember(packed, "question", ids)
    alive = weakref.ref(packed)
    del ids, packed
    cache.remember(PACKED, "question", later)
    gc.collect()
    assert alive() is None


def test_cache_never_remembers_inference_tensors():
    cache, normal = PackedSequenceCache(), positions()
    with torch.inference_mode():
        ids = positions()
        cache.remember(PACKED, "question", ids)
        assert cache.lookup("question", ids) == (False, None)
        cache.remember(PACKED, "question", normal)
        assert cache.lookup("question", ids) == (False, None)
        assert cache.lookup("question", normal) == (True, PACKED)


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_cache_keeps_as_many_as_it_may(capacity):
    cache, batches = PackedSequenceCache(capacity), [positions() for _ in range(5)]
    for ids in batches:
        cache.remember(PACKED, "question", ids)
    found = [cache.lookup("question", ids)[0] for ids in batches]
    assert found == [False] * (5 - capacity) + [True] * capacity


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copied_cache_starts_empty_with_the_same_capacity(copied):
    cache, batches = PackedSequenceCache(2), [positions() for _ in range(3)]
    cache.remember(PACKED, "question", batches[0])
    other = copied(cache)
    assert other.lookup("question", batches[0]) == (False, None)
    for ids in batches:
        other.remember(PACKED, "question", ids)
    assert [other.lookup("question", ids)[0] for ids in batches] == [False, True, True]


def test_cache_never_remembers_tensors_on_the_cpu():
    """Their memory may be refilled without a trace, and reading them again waits for nothing."""
    cache, on_host, on_device = PackedSequenceCache(), torch.arange(4), positions()
    for sources in ((on_host,), (on_host, on_device), (on_device, on_host), (None, on_host)):
        cache.remember(PACKED, "question", *sources)
        assert cache.lookup("question", *sources) == (False, None)
