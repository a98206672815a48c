"""Host memory for offloaded tensors: exact sizes, blocks that are used again, growth only when more is live."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from memory_machines import Pins

from fastft.memory.host import HostPool, cuda_pin, host_memory_available

MIB = 1 << 20


def pool_of(limit: int = 1 << 40, pins: Pins | None = None) -> tuple[HostPool, Pins]:
    pins = pins or Pins()
    return HostPool(pins, limit, lambda: None), pins


def test_the_first_block_takes_memory_for_all_that_will_come_and_no_more():
    pool, pins = pool_of()
    blocks = [pool.take(3 * MIB, to_come=3 * MIB * left) for left in (4, 3, 2, 1, 0)]
    assert pins.calls == 1
    assert pins.bytes == pool.capacity == pool.in_use == 5 * 3 * MIB  # not 16 MiB
    assert all(block is not None and block.bytes.numel() == 3 * MIB for block in blocks)


def test_blocks_do_not_overlap_whatever_their_sizes():
    pool, _ = pool_of()
    sizes = [700, 512, 1, 4096, 513, 99_999]
    blocks = [pool.take(size, to_come=200_000) for size in sizes]
    for number, block in enumerate(blocks):
        block.bytes.fill_(number)
    for number, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        assert block.bytes.numel() >= size and bool((block.bytes == number).all())


def test_a_block_is_free_again_when_nothing_refers_to_it():
    pool, pins = pool_of()
    first = pool.take(MIB, to_come=MIB)
    second = pool.take(MIB)
    address = first.bytes.data_ptr()
    del first
    assert pool.in_use == MIB
    third = pool.take(MIB)
    assert third.bytes.data_ptr() == address and pins.calls == 1
    del second, third
    assert pool.in_use == 0 and pool.capacity == 2 * MIB


def test_neighbours_that_were_given_back_join():
    pool, pins = pool_of()
    blocks = [pool.take(MIB, to_come=3 * MIB) for _ in range(4)]
    keep = blocks.pop()
    del blocks[1], blocks[0], blocks[0]  # in no order
    assert pool.take(3 * MIB) is not None and pins.calls == 1
    del keep


def test_more_live_blocks_than_planned_for_grow_the_pool_and_say_so(caplog):
    pool, pins = pool_of()
    with caplog.at_level(logging.INFO, "fastft"):
        first = [pool.take(MIB, to_come=MIB * left) for left in (1, 0)]
        second = [pool.take(MIB, to_come=MIB * left) for left in (1, 0)]
    assert pins.calls == 2 and len({block.bytes.data_ptr() for block in first + second}) == 4
    assert pool.capacity < 4.3 * MIB
    assert [record.getMessage().split(" of host")[0] for record in caplog.records] == [
        "offloading takes 2 MiB", "offloading grows from 2 to 4 MiB",
    ]  # fmt: skip


def test_an_idle_pool_that_is_too_small_is_replaced_not_added_to():
    pool, pins = pool_of()
    for size in range(MIB, 2 * MIB, 64 * 1024):
        blocks = [pool.take(size, to_come=size * left) for left in (3, 2, 1, 0)]
        assert all(blocks)
        del blocks
    gc.collect()
    assert pins.bytes == pool.capacity <= 2 * MIB * 4 * 1.125
    assert pins.calls < 10  # it grows by more than it has to, so that lengths a little larger fit


def test_the_limit_holds():
    pool, pins = pool_of(limit=3 * MIB)
    blocks = [pool.take(MIB, to_come=MIB * left) for left in (4, 3, 2, 1, 0)]
    assert [block is not None for block in blocks] == [True] * 3 + [False] * 2
    assert pins.bytes == 3 * MIB
    assert pool.take(4 * MIB) is None
    del blocks
    assert pool.take(4 * MIB) is None and pool.take(3 * MIB) is not None


def test_memory_that_cannot_be_locked_is_used_all_the_same_with_a_warning(caplog):
    pool, _ = pool_of(pins=Pins(refuse="the driver says no"))
    with caplog.at_level(logging.WARNING, "fastft"):
        assert pool.take(MIB) is not None
    assert pool.refused == "the driver says no"
    assert "the driver says no" in caplog.text and "pageable" in caplog.text


def test_memory_is_unlocked_when_the_pool_and_its_blocks_are_gone():
    pool, pins = pool_of()
    block = pool.take(MIB)
    del pool
    gc.collect()
    assert pins.bytes == MIB  # a graph may still hold the block
    del block
    gc.collect()
    assert pins.bytes == 0


def test_available_host_memory_is_less_than_the_machine_has():
    import os

    assert 0 < host_memory_available() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.gpu
def test_cuda_locks_and_refuses_without_leaving_an_error_behind():
    memory = torch.empty(3 * MIB, dtype=torch.uint8)
    undo = cuda_pin(memory)
    assert callable(undo) and memory.is_pinned()
    again = cuda_pin(memory)
    assert isinstance(again, str) and "cudaHostRegister" in again
    assert torch.ones(3, device="cuda").sum().item() == 3
    undo()
    assert not memory.is_pinned()
