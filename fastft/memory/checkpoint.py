"""What a layer calls in place of `torch.utils.checkpoint`: the same, with its input kept where the memory plan says.

The recomputation stays torch's: early stop, random numbers, selective policies, nesting and `retain_graph` are its own.
torch saves the input of a checkpointed function as any saved tensor, so that hooks around the call get the input and
nothing else: what the layer saves inside belongs to the checkpoint.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks

from ..capability import GPUCapability, Verdict, probe
from .host import HostPool, Pin, cuda_pin, host_memory_available
from .lanes import CudaLane, Lane
from .offload import Offloader, Parked

# Below this a copy is not worth its launches: see "Where offloading begins to pay" in docs/experiments.md.
SMALLEST_BYTES = 4 << 20
# Layers at the end that keep their input: backward asks for them before a copy could have come back.
LAST_KEPT = 1
# Of the host memory that is free when the first tensor leaves.
HOST_SHARE = 0.6


def offload_verdict(capability: GPUCapability) -> Verdict:
    """Whether layer inputs of a device can wait in host memory."""
    if capability.unified_memory:
        return Verdict(False, capability.unified_memory.reason)
    if capability.device.kind != "cuda":
        return Verdict(False, f"{capability.device.kind}: offloading runs on CUDA devices only")
    return Verdict(True, "a copy engine and page-locked host memory")


class Machine(NamedTuple):
    """What offloading needs of the machine. Tests give one that runs without a GPU."""

    lane_of: Callable[[torch.device], Lane] = CudaLane
    pin: Pin = cuda_pin
    verdict: Callable[[torch.device], Verdict] = lambda device: offload_verdict(probe(device))


class ActivationMemory:
    """Where the layer inputs of one model wait for backward.

    It follows `deepcopy` as a fresh one, with nothing of the other's tensors, and a pickle forgets it.

    Args:
        offload: whether layer inputs leave the device.
        machine: what they leave it by.
        smallest: bytes below which a tensor stays.
    """

    def __init__(self, offload: bool, machine: Machine | None = None, smallest: int = SMALLEST_BYTES) -> None:
        self.offload = offload
        self.smallest = smallest
        self.counters: Counter[str] = Counter()
        self.machine = machine or Machine()
        self._offloader: Offloader | None = None
        self._latest: tuple[int, weakref.ref[Parked]] | None = None  # the layer that last ran, and its input

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationMemory:
        return ActivationMemory(self.offload, self.machine, self.smallest)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _forgotten, ()

    @property
    def host_bytes(self) -> int:
        """Host memory held."""
        return self._offloader.pool.capacity if self._offloader is not None else 0

    @property
    def host_bytes_in_use(self) -> int:
        """Host memory with tensors in it that a graph refers to."""
        return self._offloader.pool.in_use if self._offloader is not None else 0

    def why_kept(self, tensor: torch.Tensor) -> str:
        """Why a layer input stays on the device whatever layer it is of, or "" if it may leave."""
        if not self.offload:
            return "no offloading"
        if not tensor.is_floating_point() or tensor.numel() * tensor.element_size() < self.smallest:
            return "small"
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return "not dense"  # a copy would be larger than what it frees
        verdict = self.machine.verdict(tensor.device)
        return "" if verdict else verdict.reason

    def pack(self, tensor: torch.Tensor, index: int, count: int) -> Parked:
        """What autograd saves in place of the input of layer `index` of `count`."""
        offloader = self._own_offloader()
        size = tensor.numel() * tensor.element_size()
        last = index >= count - LAST_KEPT
        if last:
            parked = offloader.keep(tensor, self._previous(index))
            offloader.settle(tensor.device)
        else:
            parked = offloader.send(tensor, self._previous(index), to_come=size * (count - LAST_KEPT - 1 - index))
        self._latest = (index, weakref.ref(parked))
        if parked.block is not None:
            self.counters["input offloaded"] += 1
            self.counters["bytes offloaded"] += size
        else:
            self.counters[f"input kept: {'last layer' if last else 'host memory limit'}"] += 1
        return parked

    def keep(self, tensor: torch.Tensor) -> Parked:
        """What autograd saves in place of anything else."""
        return self._own_offloader().keep(tensor)

    def unpack(self, saved: Parked) -> torch.Tensor:
        """The tensor again, on its device."""
        return self._own_offloader().fetch(saved)

    def _previous(self, index: int) -> Parked | None:
        """The input sent before this one in the same forward."""
        if self._latest is None or self._latest[0] >= index:
            return None
        return self._latest[1]()

    def _own_offloader(self) -> Offloader:
        if self._offloader is None:
            # The pool drains through the offloader, which holds the pool.
            pool = HostPool(self.machine.pin, int(host_memory_available() * HOST_SHARE), lambda: offloader.drain())
            offloader = self._offloader = Offloader(pool, self.machine.lane_of)
        return self._offloader


def _forgotten() -> None:
    """What a pickled memory loads as: the model is unpatched."""


class LayerCheckpoint:
    """The checkpoint function of one layer.

    Args:
        inner: the function it takes the place of, as Hugging Face sets it: `torch.utils.checkpoint.checkpoint` with its
            options.
        memory: of the model.
        index: of the layer among those of its stack that are checkpointed.
        count: how many these are.
    """

    def __init__(self, inner: Callable[..., Any], memory: ActivationMemory, index: int, count: int) -> None:
        self.inner = inner
        self.memory = memory
        self.index, self.count = index, count

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCheckpoint:
        return LayerCheckpoint(deepcopy(self.inner, memo), deepcopy(self.memory, memo), self.index, self.count)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _same, (self.inner,)  # a pickle holds the unpatched model

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not args or not isinstance(args[0], torch.Tensor):
            return self.inner(function, *args, **kwargs)
        if not torch.is_grad_enabled():
            return self.inner(function, *args, **kwargs)
        problem = self._why_aside() or self.memory.why_kept(args[0])
        if problem:
            self.memory.counters[f"input kept: {problem}"] += 1
            return self.inner(function, *args, **kwargs)
        with saved_tensors_hooks(functools.partial(self._pack, args[0].data_ptr()), self.memory.unpack):
            return self.inner(function, *args, **kwargs)

    def _why_aside(self) -> str:
        # Someone else moves or recomputes saved tensors. Of two hooks only the inner one runs, so theirs would not.
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return "inside other saved-tensor hooks"
        return "" if is_torch_checkpoint(self.inner) else "a checkpoint function that is not torch's own"

    def _pack(self, input_address: int, tensor: torch.Tensor) -> Parked:
        if tensor.data_ptr() == input_address:
            return self.memory.pack(tensor, self.index, self.count)
        return self.memory.keep(tensor)


def _same(inner: Any) -> Any:
    return inner


def is_torch_checkpoint(function: Any) -> bool:
    """Whether a checkpoint function is torch's own, with options or without."""
    while isinstance(function, functools.partial):
        function = function.func
    return function is torch.utils.checkpoint.checkpoint
