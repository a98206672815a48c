"""Machines for the memory plan that run on a CPU: copies that happen as late, or as early, as their order allows."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from fastft.capability import Verdict
from fastft.memory.machine import Machine, MemoryState


class LateLane:
    """Copies run when somebody waits for them, and not before. Until then a destination holds NaN, and a source that
    was freed meanwhile is copied as NaN: what was read or given up too early cannot stay unseen."""

    def __init__(self) -> None:
        self.queue: deque[tuple[weakref.ref[torch.Tensor], torch.Tensor, object]] = deque()
        self.log: list[str] = []

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Any:
        self.log.append("copy")
        ticket = object()
        destination.fill_(float("nan"))
        self.queue.append((weakref.ref(source), destination, ticket))
        return ticket

    def wait(self, ticket: Any) -> None:
        self.log.append("wait")
        if any(entry is ticket for _, _, entry in self.queue):
            while True:
                done = self._run_first()
                if done is ticket:
                    return

    def drain(self) -> None:
        while self.queue:
            self._run_first()

    def _run_first(self) -> Any:
        reference, destination, ticket = self.queue.popleft()
        source = reference()
        with torch.no_grad():
            if source is None:
                destination.fill_(float("nan"))
            else:
                destination.copy_(source)
        return ticket


class EarlyLane:
    """Copies run at once."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Any:
        destination.copy_(source)
        return None

    def wait(self, ticket: Any) -> None:
        pass

    def drain(self) -> None:
        pass


class Pins:
    """Counts what is page-locked."""

    def __init__(self, refuse: str = "") -> None:
        self.bytes = 0
        self.calls = 0
        self.refuse = refuse

    def __call__(self, memory: torch.Tensor) -> Callable[[], None] | str:
        self.calls += 1
        if self.refuse:
            return self.refuse
        size = memory.numel()
        self.bytes += size

        def undo() -> None:
            self.bytes -= size

        return undo


def machine(lane: Callable[[], Any] = LateLane, pins: Pins | None = None) -> Machine:
    """A machine on which CPU tensors may leave for (other) host memory."""
    return Machine(lambda _: lane(), pins or Pins(), lambda _: Verdict(True, "a test"))


class Clockwork:
    """A machine whose memory and time are told by the test: every mark is a second after the one before."""

    def __init__(self, free: int = 1 << 40) -> None:
        self.now = 0.0
        self.free = free
        self.state = MemoryState(0, 0)

    def machine(self, lane: Callable[[], Any] = LateLane) -> Machine:
        def mark(_: torch.device) -> float:
            self.now += 1.0
            return self.now

        able = Verdict(True, "a test")
        return Machine(
            lambda _: lane(), Pins(), lambda _: able, lambda _: able, lambda _: self.state, lambda _: self.free, mark,
            lambda first, last: last - first, lambda _: 1e9,
        )  # fmt: skip
