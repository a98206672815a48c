"""Tensors that leave the device between forward and backward, and come back just before they are needed.

    forward    a copy to the host starts when a tensor is sent; the device's memory is free a few sendings later, when
               the computing stream has been made to wait for the copy
    backward   tensors are fetched in reverse order; fetching one starts the copy of the one before it, into the second
               of two buffers, so that it runs beside the recomputation and the backward in between

Fetching does not use a tensor up: its host block lives as long as the graph does, for `retain_graph`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from .host import HostBlock, HostPool
from .lanes import Lane

# A buffer that is being filled, and the ticket of the copy.
Arrival = tuple[torch.Tensor, Any]

# Sendings after which a tensor's memory is given up. Copies may take this many layers before anything waits for them.
WINDOW = 2


class Parked:
    """A tensor on its way out, out, or on its way back. What an autograd graph saves in the tensor's place."""

    __slots__ = ("__weakref__", "arriving", "block", "held", "host", "layout", "orphans", "previous", "version")

    def __init__(self, tensor: torch.Tensor, previous: Parked | None, orphans: deque[Arrival] | None) -> None:
        self.held: torch.Tensor | None = tensor.detach()  # shares the version counter
        self.version = tensor._version
        self.layout = (tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
        self.block: HostBlock | None = None
        self.host: torch.Tensor | None = None  # the block as a tensor of this size and stride
        self.arriving: Arrival | None = None
        self.orphans = orphans
        self.previous = weakref.ref(previous) if previous is not None else None

    def __del__(self) -> None:
        if self.arriving is not None and self.orphans is not None:  # its buffer is being written still
            self.orphans.append(self.arriving)

    def check(self) -> None:
        """Raises what autograd raises if the tensor was written while it was still needed here."""
        if self.held is not None and self.held._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input of a checkpointed layer, {self.held.dtype} of shape {tuple(self.held.shape)}, is at version "
                f"{self.held._version}, expected {self.version}"
            )

    def take(self, block: HostBlock) -> torch.Tensor:
        """The host's side of the copies to and from a block."""
        size, stride, dtype, _ = self.layout
        self.block = block
        self.host = block.bytes[: size.numel() * dtype.itemsize].view(dtype).as_strided(size, stride)
        return self.host


class _Port:
    """One device's lane, and what is leaving by it."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        # The tensor is kept here, because a graph that dies early would free it while it is being read.
        self.leaving: deque[tuple[weakref.ref[Parked], torch.Tensor, Any]] = deque()
        # Buffers of graphs that were freed before they used them: an interrupted backward leaves some.
        self.orphans: deque[Arrival] = deque()

    def settle(self, remaining: int) -> None:
        """Gives up the device memory of all but the last few that are leaving."""
        while self.orphans:
            self.lane.wait(self.orphans.popleft()[1])
        while len(self.leaving) > remaining:
            reference, _, ticket = self.leaving.popleft()
            self.lane.wait(ticket)
            parked = reference()
            # One that was written meanwhile is kept, for `check` to refuse when it is fetched.
            if parked is not None and parked.held is not None and parked.held._version == parked.version:
                parked.held = None


class Offloader:
    """Sends tensors of one model to the host and back. Safe in the threads of autograd.

    Args:
        pool: host memory.
        lane_of: makes the lane of a device, at its first use.
    """

    def __init__(self, pool: HostPool, lane_of: Callable[[torch.device], Lane]) -> None:
        self.pool = pool
        self._lane_of = lane_of
        self._ports: dict[torch.device, _Port] = {}
        self._lock = threading.RLock()

    @staticmethod
    def keep(tensor: torch.Tensor, previous: Parked | None = None) -> Parked:
        """A tensor that stays, on any device, in the order of those that leave: fetching it starts the copy of the one
        before."""
        return Parked(tensor, previous, None)

    def send(self, tensor: torch.Tensor, previous: Parked | None = None, to_come: int = 0) -> Parked:
        """Starts a tensor's way out.

        Args:
            tensor: dense, without overlap, on a device.
            previous: the one sent before it in the same forward, which backward needs after it.
            to_come: bytes that will be sent after it in the same forward.

        Returns:
            What `fetch` takes. The tensor has stayed where it is if there is no host memory for it.
        """
        with self._lock, torch.inference_mode(False):
            port = self._port(tensor.device)
            parked = Parked(tensor, previous, port.orphans)
            block = self.pool.take(tensor.numel() * tensor.element_size(), to_come)
            if block is not None:
                assert parked.held is not None
                ticket = port.lane.copy(parked.take(block), parked.held)
                port.leaving.append((weakref.ref(parked), parked.held, ticket))
            port.settle(WINDOW)
        return parked

    def settle(self, device: torch.device) -> None:
        """Gives up the device memory of everything that is leaving."""
        with self._lock:
            self._port(device).settle(0)

    def fetch(self, parked: Parked) -> torch.Tensor:
        """The tensor, on its device, with its size and stride; the copy of the one before it has been started.

        Raises:
            RuntimeError: it was written in place between forward and backward.
        """
        parked.check()
        with self._lock, torch.inference_mode(False):
            self._bring(parked)
            previous = parked.previous() if parked.previous is not None else None
            if previous is not None:
                self._bring(previous)
            if parked.held is not None:
                return parked.held
            assert parked.arriving is not None
            tensor, ticket = parked.arriving
            parked.arriving = None
            self._port(tensor.device).lane.wait(ticket)
        return tensor

    def drain(self) -> None:
        """The host waits for every copy."""
        for port in self._ports.values():
            port.lane.drain()

    def _bring(self, parked: Parked) -> None:
        if parked.held is not None or parked.arriving is not None:
            return
        assert parked.host is not None
        size, stride, dtype, device = parked.layout
        buffer = torch.empty_strided(size, stride, dtype=dtype, device=device)
        parked.arriving = (buffer, self._port(device).lane.copy(buffer, parked.host))

    def _port(self, device: torch.device) -> _Port:
        if device not in self._ports:
            self._ports[device] = _Port(self._lane_of(device))
        return self._ports[device]
