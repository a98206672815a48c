"""Tensors that leave the device between forward and backward, and come back just before they are needed.

    forward    a copy to the host starts when a tensor is sent; the device's memory is given up some layers later, when
               the computing stream has been made to wait for the copy
    backward   layers ask for theirs in reverse order; the first tensor fetched of a layer starts the copies of all of
               the layer before it, so that they run beside this layer's recomputation and backward. Two layers'
               tensors are on the device at most, those in use and those arriving, or as many as a plan has room for

Fetching does not use a tensor up: its host block lives as long as the graph does, for `retain_graph`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from .host import HostBlock, HostPool, Pin
from .lanes import Lane

# Layers whose tensors may be on their way out at a time, where no plan says so. Copies may take this long before
# anything waits for them.
WINDOW = 2

# A buffer that is being filled, and the ticket of the copy.
Arrival = tuple[torch.Tensor, Any]


class Group:
    """What one layer sends, and the layer before it in the same forward.

    Args:
        previous: the layer before.
        ahead: bytes of earlier layers that may be back while this one is in backward; None for all of one layer's.
    """

    __slots__ = ("__weakref__", "_previous", "ahead", "back", "members", "sent")

    def __init__(self, previous: Group | None = None, ahead: float | None = None) -> None:
        self.members: list[weakref.ref[Parked]] = []  # that nobody has asked for
        self.ahead = ahead
        self.sent = self.back = 0  # bytes
        self._previous = weakref.ref(previous) if previous is not None else None

    def needed(self) -> list[tuple[Group, float]]:
        """This layer and those before it that may come back meanwhile, each with the bytes that may be back of it; the
        next one to run first."""
        found: list[tuple[Group, float]] = [(self, float("inf"))]
        room = float("inf") if self.ahead is None else self.ahead
        before = self._previous() if self._previous is not None else None
        while before is not None and room > 0:
            found.append((before, room))
            if self.ahead is None:
                break
            room -= before.sent
            before = before._previous() if before._previous is not None else None
        return found


class Parked:
    """A tensor on its way out, out, or on its way back. What an autograd graph saves in the tensor's place."""

    __slots__ = ("__weakref__", "arriving", "block", "group", "held", "host", "layout", "orphans", "version")

    def __init__(self, tensor: torch.Tensor, group: Group, orphans: deque[Arrival] | None) -> None:
        self.held: torch.Tensor | None = tensor.detach()  # shares the version counter
        self.version = tensor._version
        self.layout = (tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
        self.block: HostBlock | None = None
        self.host: torch.Tensor | None = None  # the block as a tensor of this size and stride
        self.arriving: Arrival | None = None
        self.orphans = orphans
        self.group = group
        group.members.append(weakref.ref(self))

    def __del__(self) -> None:
        if self.arriving is not None and self.orphans is not None:  # its buffer is being written still
            self.orphans.append(self.arriving)

    def check(self) -> None:
        """Raises what autograd raises if the tensor was written while it was still needed here."""
        if self.held is not None and self.held._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{self.held.dtype} tensor of shape {tuple(self.held.shape)} that a checkpointed layer needs is at "
                f"version {self.held._version}, expected {self.version}"
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
        self.leaving: deque[tuple[Group, weakref.ref[Parked], torch.Tensor, Any]] = deque()
        self.bytes_leaving = 0
        self.recent: list[Group] = []
        # Buffers of graphs that were freed before they used them: an interrupted backward leaves some.
        self.orphans: deque[Arrival] = deque()

    def send(self, group: Group, parked: Parked, host: torch.Tensor) -> None:
        """Starts a copy."""
        assert parked.held is not None
        ticket = self.lane.copy(host, parked.held)
        self.leaving.append((group, weakref.ref(parked), parked.held, ticket))
        self.bytes_leaving += parked.held.nbytes
        group.sent += parked.held.nbytes

    def begin(self, group: Group, window: int | None) -> None:
        """A layer begins: those before the window have had their time."""
        if not self.recent or self.recent[-1] is not group:
            self.recent = [*self.recent, group][-(window or 1) :]
            if window is not None:
                self.keep(self.recent)

    def keep(self, groups: list[Group]) -> None:
        """Gives up the device memory of all that are leaving, but for that of some layers."""
        self.recent = groups
        self._forget_orphans()
        while self.leaving and not self._is_first_of(groups):
            self._give_up_first()

    def turn(self, needed: list[Group], ahead: float) -> None:
        """Backward comes to the first of some layers. What it sent stays, and as much as `ahead` bytes of the others,
        the latest that were sent; backward takes the memory of all else."""
        while self.leaving and self.leaving[-1][0] is needed[0]:
            _, _, tensor, ticket = self.leaving.pop()
            self.bytes_leaving -= tensor.nbytes
            self.lane.wait(ticket)  # from here on backward may free it
        self.keep(needed)
        while self.bytes_leaving > ahead:
            self._give_up_first()

    def _is_first_of(self, groups: list[Group]) -> bool:
        return any(self.leaving[0][0] is group for group in groups)

    def give_up(self, most: float) -> None:
        """Gives up the device memory of the first, until no more than some bytes are leaving."""
        self._forget_orphans()
        while self.bytes_leaving > most:
            self._give_up_first()

    def forget(self) -> None:
        """Gives up what nothing refers to any more."""
        dead = [entry for entry in self.leaving if entry[1]() is None]
        self.leaving = deque(entry for entry in self.leaving if entry[1]() is not None)
        for _, _, tensor, ticket in dead:
            self.bytes_leaving -= tensor.nbytes
            self.lane.wait(ticket)

    def _give_up_first(self) -> None:
        _, reference, tensor, ticket = self.leaving.popleft()
        self.bytes_leaving -= tensor.nbytes
        self.lane.wait(ticket)
        parked = reference()
        # One that was written meanwhile is kept, for `check` to refuse when it is fetched.
        if parked is not None and parked.held is not None and parked.held._version == parked.version:
            parked.held = None

    def _forget_orphans(self) -> None:
        while self.orphans:
            self.lane.wait(self.orphans.popleft()[1])


class Offloader:
    """Sends tensors of one model to the host and back. Safe in the threads of autograd.

    Args:
        pin: page-locks host memory.
        limit: bytes of it at most.
        lane_of: makes the lane of a device, at its first use.
    """

    def __init__(self, pin: Pin, limit: int, lane_of: Callable[[torch.device], Lane]) -> None:
        self_reference = weakref.ref(self)  # no cycle: memory is given back as soon as the model is gone
        self.pool = HostPool(pin, limit, lambda: _drain(self_reference()))
        self.window: int | None = WINDOW  # None: a plan says how many bytes may be leaving, by `give_up`
        self._lane_of = lane_of
        self._ports: dict[torch.device, _Port] = {}
        self._lock = threading.RLock()

    @staticmethod
    def keep(tensor: torch.Tensor, group: Group) -> Parked:
        """A tensor that stays, on any device, among those that leave: fetching it starts the copies of the layer
        before."""
        return Parked(tensor, group, None)

    def send(self, tensor: torch.Tensor, group: Group, to_come: int = 0) -> Parked:
        """Starts a tensor's way out.

        Args:
            tensor: on a device.
            group: of the layer that sends it.
            to_come: bytes that will be sent after it in the same forward.

        Returns:
            What `fetch` takes. The tensor has stayed where it is if there is no host memory for it, or if it is not
            dense.
        """
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return self.keep(tensor, group)  # its strides reach beyond its own bytes
        with self._lock, torch.inference_mode(False):
            port = self._port(tensor.device)
            port.begin(group, self.window)
            parked = Parked(tensor, group, port.orphans)
            block = self.pool.take(tensor.numel() * tensor.element_size(), to_come)
            if block is not None:
                port.send(group, parked, parked.take(block))
        return parked

    def begin(self, group: Group, device: torch.device) -> None:
        """A layer begins that may send nothing."""
        with self._lock:
            port = self._ports.get(device)
            if port is not None:
                port.begin(group, self.window)

    def settle(self, device: torch.device) -> None:
        """Gives up the device memory of everything that is leaving."""
        with self._lock:
            self._port(device).keep([])

    def give_up(self, device: torch.device, most: float) -> None:
        """Gives up the device memory of what began to leave first, until no more than `most` bytes are leaving."""
        with self._lock:
            port = self._ports.get(device)
            if port is not None:
                port.give_up(most)

    def forget(self, device: torch.device) -> None:
        """Gives up what left for graphs that are gone without a backward."""
        with self._lock:
            port = self._ports.get(device)
            if port is not None:
                port.forget()

    def fetch(self, parked: Parked) -> torch.Tensor:
        """The tensor, on its device, with its size and stride; what its layer and the one before it need is under way.

        Raises:
            RuntimeError: it was written in place between forward and backward.
        """
        parked.check()
        with self._lock, torch.inference_mode(False):
            self.approach(parked.group)
            self._bring(parked)  # if an earlier approach has asked for it, and it was given up since
            if parked.held is not None:
                return parked.held
            assert parked.arriving is not None
            tensor, ticket = parked.arriving
            self._port(tensor.device).lane.wait(ticket)
            parked.arriving = None
        return tensor

    def approach(self, group: Group) -> None:
        """Backward has come to a layer: what it sent has to come back, and what those before it sent as far as there is
        room for it."""
        needed = group.needed()
        ahead = float("inf") if group.ahead is None else group.ahead
        with self._lock, torch.inference_mode(False):
            for port in self._ports.values():
                port.turn([each for each, _ in needed], ahead)
            for each, most in needed:
                self._bring_all(each, most)

    def drain(self) -> None:
        """The host waits for every copy."""
        for port in self._ports.values():
            port.lane.drain()

    def _bring_all(self, group: Group, most: float) -> None:
        """In the order in which backward needs them, until some bytes of the layer are back. A second backward asks for
        each by itself."""
        while group.members:
            parked = group.members[-1]()
            if parked is not None and parked.host is not None:
                if group.back + parked.host.nbytes > most:
                    return
                group.back += parked.host.nbytes
                self._bring(parked)
            group.members.pop()

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


def is_held_by_autograd(tensor: torch.Tensor) -> bool:
    """Whether a tensor stays on its device whatever becomes of other references to it."""
    return tensor.is_leaf and tensor.requires_grad


def _drain(offloader: Offloader | None) -> None:
    if offloader is not None:
        offloader.drain()
