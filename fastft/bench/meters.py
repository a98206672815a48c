"""How many bytes are held, and when: from a GPU's allocator, or, on a CPU, from the storages that torch ops make."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(NamedTuple):
    """Bytes.

    Attributes:
        now: held at this moment.
        peak: the most since the reading before.
    """

    now: int
    peak: int


class Meter(Protocol):
    """Counts inside of its context. It may be read in the threads of autograd."""

    counted: str
    """What the bytes are of, and what the time is of."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> None: ...

    def read(self) -> Held: ...

    def mark(self) -> Any:
        """This moment, for `milliseconds`."""

    def milliseconds(self, first: Any, last: Any) -> float: ...


class AllocatorMeter:
    """What torch's allocator has handed out on a GPU, with times of the GPU's own clock."""

    counted = "bytes that torch's allocator has handed out on the GPU; times are the GPU's"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> AllocatorMeter:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *exception: object) -> None:
        torch.cuda.synchronize(self._device)

    def read(self) -> Held:
        now, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return Held(now, peak)

    def mark(self) -> torch.cuda.Event:
        # Waiting for the GPU instead would undo what runs side by side: computation, and copies to the host.
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def milliseconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last)


class StorageMeter(TorchDispatchMode):
    """The storages of tensors that exist, on any device, from the moment a torch op returns one until it is freed.

    A storage counts once, however many views it has. Buffers that live only inside of one op are not seen, nor is
    memory from before the context unless it is given. Counting slows every op down.

    Args:
        existing: tensors to count from the start.
    """

    counted = "bytes of all storages that torch ops return, with the weights; times contain the counting"

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._alive: dict[int, weakref.finalize[Any, Any]] = {}
        self._now = self._peak = 0
        self._existing = list(existing)

    def __enter__(self) -> StorageMeter:
        self._count(_storages(self._existing))
        self._existing.clear()  # else they would never be freed
        self._peak = self._now
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for finalizer in self._alive.values():
            finalizer.detach()
        self._alive.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        made = _storages([results])
        if made:
            given = _storages([args, kwargs])  # a view of what is not counted is not counted either
            self._count({key: storage for key, storage in made.items() if key not in given})
        return results

    def read(self) -> Held:
        held = Held(self._now, self._peak)
        self._peak = self._now
        return held

    def mark(self) -> float:
        return time.perf_counter()

    def milliseconds(self, first: float, last: float) -> float:
        return 1000 * (last - first)

    def _count(self, storages: dict[int, torch.UntypedStorage]) -> None:
        for key, storage in storages.items():
            if key not in self._alive:
                size = storage.nbytes()
                self._alive[key] = weakref.finalize(storage, self._freed, key, size)
                self._alive[key].atexit = False
                self._now += size
        self._peak = max(self._peak, self._now)

    def _freed(self, key: int, size: int) -> None:
        self._now -= size
        self._alive.pop(key, None)


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """By address of the storage's own record: one, however many tensors share it."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    found = (tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided)
    return {storage._cdata: storage for storage in found}


def meter_for(device: torch.device, existing: Iterable[torch.Tensor]) -> Meter:
    """The meter of a device.

    Args:
        device: a GPU, or the CPU.
        existing: tensors that are held already, which only a CPU's meter has to be told.
    """
    return AllocatorMeter(device) if device.type == "cuda" else StorageMeter(existing)
