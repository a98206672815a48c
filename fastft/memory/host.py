"""Host memory for tensors that leave the device: page-locked blocks of exactly the size asked for.

torch's own pinned allocator rounds to powers of two and never gives back. Here whole segments are page-locked, one for
all that the first step needs, and cut into blocks. Segments are replaced only while no block is in use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger("fastft")

_ALIGNMENT = 512  # bytes between blocks, as torch's device allocator has it
_PAGE = 4096
_GROWTH = 1.125  # of a segment that takes the place of one that was too small, so that rows of many lengths settle

# Page-locks a tensor of bytes: an undo function, or why it was refused.
Pin = Callable[[torch.Tensor], "Callable[[], None] | str"]


class HostBlock:
    """Bytes of a segment, given back when nothing refers to the block any more."""

    __slots__ = ("__weakref__", "_returned", "_segment", "_span", "bytes")

    def __init__(self, segment: _Segment, span: tuple[int, int], returned: deque[tuple[_Segment, tuple[int, int]]]):
        self.bytes = segment.memory[span[0] : span[1]]
        self._segment, self._span, self._returned = segment, span, returned

    def __del__(self) -> None:
        # Any thread, at any time, also inside the pool's own methods: a deque's append is safe there, a lock is not.
        self._returned.append((self._segment, self._span))


class _Segment:
    """One page-locked range and the spans of it that are free, in order."""

    __slots__ = ("__weakref__", "free", "memory", "refused")

    def __init__(self, size: int, pin: Pin) -> None:
        raw = torch.empty(size + _PAGE, dtype=torch.uint8, device="cpu")  # whatever the default device is
        start = -raw.data_ptr() % _PAGE
        self.memory = raw[start : start + size]
        self.free = [(0, size)]
        undo = pin(self.memory)
        self.refused = undo if isinstance(undo, str) else ""
        if callable(undo):
            # The callback keeps the memory until it is unlocked. At exit the process gives everything back itself.
            weakref.finalize(self, _unpin, undo, self.memory).atexit = False

    @property
    def size(self) -> int:
        return self.memory.numel()

    @property
    def is_unused(self) -> bool:
        return self.free == [(0, self.size)]

    def take(self, size: int) -> tuple[int, int] | None:
        for place, (start, end) in enumerate(self.free):
            if end - start >= size:
                rest = [(start + size, end)] if end - start > size else []
                self.free[place : place + 1] = rest
                return start, start + size
        return None

    def give_back(self, span: tuple[int, int]) -> None:
        insort(self.free, span)
        merged = [self.free[0]]
        for start, end in self.free[1:]:
            if start == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self.free = merged


class HostPool:
    """Blocks of page-locked memory, for one model.

    Args:
        pin: page-locks a range.
        limit: the most bytes to hold.
        drain: waits until no copy touches the pool's memory.
    """

    def __init__(self, pin: Pin, limit: int, drain: Callable[[], None]) -> None:
        self.limit = limit
        self._pin, self._drain = pin, drain
        self._segments: list[_Segment] = []
        self._returned: deque[tuple[_Segment, tuple[int, int]]] = deque()
        self._refused = ""

    @property
    def capacity(self) -> int:
        """Bytes held from the host, used or not."""
        return sum(segment.size for segment in self._segments)

    @property
    def in_use(self) -> int:
        """Bytes of blocks that somebody refers to."""
        self._collect()
        return self.capacity - sum(end - start for segment in self._segments for start, end in segment.free)

    @property
    def refused(self) -> str:
        """Why memory could not be page-locked, so that copies make the host wait; "" if it could."""
        return self._refused

    def take(self, size: int, to_come: int = 0) -> HostBlock | None:
        """A block.

        Args:
            size: bytes of it.
            to_come: bytes that will be asked for before the first of these blocks is free again, this one aside. A
                pool that has to grow grows once for all of them.

        Returns:
            The block, or None where the limit forbids it.
        """
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._collect()
        if self._is_idle and not self._fits(size, to_come):
            self._replace(size, size + to_come)
        for segment in self._segments:
            span = segment.take(size)
            if span is not None:
                return HostBlock(segment, span, self._returned)
        if not self._grow(size, size + to_come):
            return None
        segment = self._segments[-1]
        span = segment.take(size)
        assert span is not None
        return HostBlock(segment, span, self._returned)

    @property
    def _is_idle(self) -> bool:
        return all(segment.is_unused for segment in self._segments)

    def _fits(self, size: int, to_come: int) -> bool:
        return sum(segment.size // size for segment in self._segments) * size >= size + to_come

    def _replace(self, needed: int, wanted: int) -> None:
        """One segment for everything, in the place of all there are."""
        before = self.capacity
        if min(int(wanted * _GROWTH), self.limit) <= before:
            return  # there is no more to be had
        if before:
            self._drain()
            self._segments.clear()
            wanted = int(wanted * _GROWTH)
        self._grow(needed, wanted, before)

    def _grow(self, needed: int, wanted: int, before: int | None = None) -> bool:
        before = self.capacity if before is None else before
        room = self.limit - self.capacity
        if needed > room:
            return False
        segment = _Segment(min(wanted, room), self._pin)
        self._segments.append(segment)
        self._refused = segment.refused
        action = f"grows from {before / 2**20:,.0f} to" if before else "takes"
        how = f"pageable, so that every copy makes the host wait: {segment.refused}" if segment.refused else "pinned"
        level = logging.WARNING if segment.refused else logging.INFO
        logger.log(level, "offloading %s %s MiB of host memory (%s)", action, f"{self.capacity / 2**20:,.0f}", how)
        return True

    def _collect(self) -> None:
        while self._returned:
            segment, span = self._returned.popleft()
            segment.give_back(span)


def cuda_pin(memory: torch.Tensor) -> Callable[[], None] | str:
    """Page-locks memory for every CUDA device: a function that unlocks it, or why the driver refused."""
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 1))  # 1: portable, for all devices
    if status:
        _clear_error()
        return f"cudaHostRegister of {memory.numel() / 2**20:,.0f} MiB failed with error {status}; see ulimit -l"
    address = memory.data_ptr()

    def undo() -> None:
        torch.cuda.synchronize()  # copies may be under way still, from a model that is gone
        cudart.cudaHostUnregister(address)

    return undo


def _clear_error() -> None:
    """Takes the error of a refused call away, which CUDA would report at the next kernel launch."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unpin(undo: Callable[[], None], memory: torch.Tensor) -> None:
    undo()


def host_memory_available() -> int:
    """Bytes of host memory that this process may still take, by the system's and the container's account."""
    limits = [_from_meminfo(), *_from_cgroup()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _from_meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    value = fields.get("MemAvailable")
    return int(value.split()[0]) * 1024 if value else None


def _from_cgroup() -> list[int | None]:
    folder = Path("/sys/fs/cgroup")
    names = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    rooms: list[int | None] = []
    for limit_name, usage_name in names:
        try:
            limit, usage = ((folder / name).read_text(encoding="ascii").strip() for name in (limit_name, usage_name))
        except OSError:
            continue
        if limit.isdigit():
            rooms.append(max(int(limit) - int(usage), 0))
    return rooms
