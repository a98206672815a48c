"""Copies that run beside the computation: one queue a device, ordered against the computing stream by events alone.

Nothing here frees memory or calls `record_stream`: whoever starts a copy keeps its source and destination until it has
made the computing stream wait for the copy's ticket. From then on the allocator's own order, which is that of the
computing stream, is enough.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Lane(Protocol):
    """A queue of copies between a device and the host."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Any:
        """Starts a copy once all work that the computing stream has been given is done; returns its ticket."""

    def wait(self, ticket: Any) -> None:
        """Makes the computing stream wait for a copy. The host does not wait."""

    def drain(self) -> None:
        """The host waits for every copy."""


class CudaLane:
    """A side stream of one CUDA device. Both directions share it, so that a host block that is used again is written
    after it was read, without an event of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)

    def drain(self) -> None:
        self._stream.synchronize()
