"""What a memory plan needs of the machine. Tests give one that runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed

from ..capability import GPUCapability, Verdict, probe
from .host import Pin, cuda_pin
from .lanes import CudaLane, Lane

_COPIED_TO_MEASURE = 64 << 20


class MemoryState(NamedTuple):
    """Bytes of one device's memory, as this process sees it."""

    allocated: int
    peak: int  # the most that was ever allocated
    ooms: int = 0  # times it ran out


def offload_verdict(capability: GPUCapability) -> Verdict:
    """Whether activations of a device can wait in host memory."""
    if capability.unified_memory:
        return Verdict(False, capability.unified_memory.reason)
    if capability.device.kind != "cuda":
        return Verdict(False, f"{capability.device.kind}: offloading runs on CUDA devices only")
    return Verdict(True, "a copy engine and page-locked host memory")


def _plan_verdict(device: torch.device) -> Verdict:
    if device.type != "cuda":
        return Verdict(False, f"{device.type}: memory is planned on CUDA devices only")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        # A layer that one rank runs again and another keeps would wait for ever where layers communicate.
        return Verdict(False, "several processes, whose plans could differ")
    return Verdict(True, "the allocator counts its bytes")


def _cuda_memory(device: torch.device) -> MemoryState:
    stats = torch.cuda.memory_stats(device)  # once for both: torch makes a dict of all its counts
    return MemoryState(
        stats.get("allocated_bytes.all.current", 0), stats.get("allocated_bytes.all.peak", 0), stats.get("num_ooms", 0)
    )


def _cuda_free(device: torch.device) -> int:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _cuda_mark(device: torch.device) -> torch.cuda.Event:
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))


def _cuda_seconds(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def _cuda_bandwidth(device: torch.device) -> float:
    """Bytes a second from the device to page-locked memory. The host waits some milliseconds, once."""
    source = torch.empty(_COPIED_TO_MEASURE, dtype=torch.uint8, device=device)
    target = torch.empty(_COPIED_TO_MEASURE, dtype=torch.uint8, device="cpu", pin_memory=True)
    target.copy_(source, non_blocking=True)
    first = _cuda_mark(device)
    target.copy_(source, non_blocking=True)
    return _COPIED_TO_MEASURE / _cuda_seconds(first, _cuda_mark(device))


class Machine(NamedTuple):
    """What offloading and planning need of the machine."""

    lane_of: Callable[[torch.device], Lane] = CudaLane
    pin: Pin = cuda_pin
    can_offload: Callable[[torch.device], Verdict] = lambda device: offload_verdict(probe(device))
    can_plan: Callable[[torch.device], Verdict] = _plan_verdict
    memory: Callable[[torch.device], MemoryState] = _cuda_memory
    free: Callable[[torch.device], int] = _cuda_free  # bytes that can be allocated still
    mark: Callable[[torch.device], Any] = _cuda_mark  # a point in the computing stream
    seconds: Callable[[Any, Any], float] = _cuda_seconds  # between two; the host may wait
    bandwidth: Callable[[torch.device], float] = _cuda_bandwidth
