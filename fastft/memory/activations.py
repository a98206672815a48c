"""Where the activations of one model wait for backward: on the device, or in host memory."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from ..capability import Verdict
from .host import host_memory_available
from .machine import Machine
from .offload import Group, Offloader, Parked, is_held_by_autograd
from .plan import MemoryPlan
from .planner import Planner
from .schedule import Mode
from .tape import LayerTape, Level

# Below this a copy is not worth its launches: see "Where offloading begins to pay" in docs/experiments.md.
SMALLEST_BYTES = 4 << 20
# Layers at the end that keep their input: backward asks for them before a copy could have come back.
LAST_KEPT = 1
# Of the host memory that is free when the first tensor leaves.
HOST_SHARE = 0.6


class Budget(NamedTuple):
    """The most bytes on the device: a number, "auto" for what is free, None for what plain checkpointing takes."""

    most: int | Literal["auto"] | None


class ActivationMemory:
    """Where the layer inputs of one model wait for backward.

    It follows `deepcopy` as a fresh one, with nothing of the other's tensors, and a pickle forgets it.

    Args:
        mode: of every layer, where nothing is planned.
        machine: what they leave it by.
        smallest: bytes below which a tensor stays.
        budget: to plan by, if the layers' modes are to be planned.
    """

    def __init__(
        self,
        mode: Mode,
        machine: Machine | None = None,
        smallest: int = SMALLEST_BYTES,
        budget: Budget | None = None,
    ) -> None:
        self.mode = mode
        self.budget = budget
        self.smallest = smallest
        self.switched_on = False  # whether checkpointing is on for the budget's sake, and not by the caller
        self.counters: Counter[str] = Counter()
        self.bytes_of_layer: dict[int, Counter[str]] = {}  # that the last told forward saved, by kind
        self.machine = machine or Machine()
        self.planner = Planner(self.machine, budget.most, smallest) if budget is not None else None
        self._offloader: Offloader | None = None
        self._latest: tuple[int, weakref.ref[Group]] | None = None  # the layer that last ran, and what it sent
        self._running = threading.local()
        self._sent_before = 0  # bytes, by the last layer that was told of

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationMemory:
        copy = ActivationMemory(self.mode, self.machine, self.smallest, self.budget)
        copy.switched_on = self.switched_on
        return copy

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
        if not tensor.is_floating_point() or tensor.numel() * tensor.element_size() < self.smallest:
            return "small"
        if is_held_by_autograd(tensor):
            return "a leaf, which the node for its gradient holds"  # the first input where embeddings are frozen
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return "not dense"  # a copy would be larger than what it frees
        verdict = self.machine.can_offload(tensor.device)
        return "" if verdict else verdict.reason

    @property
    def tape(self) -> LayerTape | None:
        """Of the layer that runs in this thread, if what it makes is to be told."""
        return getattr(self._running, "tape", None)

    @tape.setter
    def tape(self, tape: LayerTape | None) -> None:
        self._running.tape = tape

    @property
    def plan(self) -> MemoryPlan | None:
        """The one that the last forward followed."""
        return self.planner.plan if self.planner is not None else None

    @property
    def is_measuring(self) -> bool:
        """Whether layers are timed, for a plan to be made."""
        return self.planner is not None and self.planner.is_measuring

    def begin(self, x: torch.Tensor, count: int) -> None:
        """A forward with gradients begins with x, the input of the first of `count` layers."""
        if self.planner is not None and self.machine.can_plan(x.device):
            if self._offloader is not None:
                self._offloader.forget(x.device)  # else the planner takes it for memory of other things
            self.planner.begin(x, count)
            if self.planner.plan is not None:
                self.offloader.window = None

    def mode_of(self, x: torch.Tensor, index: int, count: int) -> Mode:
        """What becomes of layer `index` of `count`, with input x."""
        if self.planner is None:
            return self.mode
        verdict = self.machine.can_plan(x.device)
        if verdict and not self.planner.is_of(x.device):
            verdict = Verdict(False, "layers on several devices")
        if verdict:
            return self.planner.mode_of(index, count)
        self.counters[f"not planned: {verdict.reason}"] += 1
        return self.mode

    def give_up(self, device: torch.device, index: int) -> None:
        """Layer `index` begins, or what follows the last one: as much may be leaving as the plan has room for."""
        plan = self.plan
        if self._offloader is not None and plan is not None and index <= len(plan.modes):
            self._offloader.give_up(device, plan.leaving[index])

    def tape_for(self, level: Level, x: torch.Tensor, index: int, count: int) -> LayerTape:
        """For what layer `index` of `count` makes of x."""
        group = self.group_of(index)
        if self._offloader is not None:
            self._offloader.begin(group, x.device)
        return LayerTape(
            level,
            self.offloader,
            group,
            x.device,
            smallest=0 if self.plan is not None else self.smallest,  # a plan counts on what it sends
            layers_to_come=max(count - LAST_KEPT - 1 - index, 0),
            sent_before=self._sent_before,
            timer=self.planner.making_again if self.planner is not None and self.is_measuring else None,
        )

    def finished(self, tape: LayerTape, index: int) -> None:
        """A layer has run."""
        self._sent_before = tape.bytes_sent
        self.counters["layer kept in part"] += 1
        self.counters["bytes offloaded"] += tape.bytes_sent
        self.bytes_of_layer[index] = tape.bytes
        if self.planner is not None:
            self.planner.saved(tape.bytes, tape.bytes_passing)

    def group_of(self, index: int) -> Group:
        """A new group for layer `index`, after that of the layer before it in the same forward."""
        before = self._latest
        ahead = self.plan.arriving[index] if self.plan is not None and index < len(self.plan.modes) else None
        group = Group(before[1]() if before is not None and before[0] < index else None, ahead)
        self._latest = (index, weakref.ref(group))
        return group

    def pack_input(self, tensor: torch.Tensor, group: Group, index: int, count: int) -> Parked:
        """What autograd saves in place of the input of layer `index` of `count`."""
        size = tensor.numel() * tensor.element_size()
        if index >= count - LAST_KEPT:
            self.counters["input kept: last layer"] += 1
            self.offloader.settle(tensor.device)
            return self.offloader.keep(tensor, group)
        parked = self.offloader.send(tensor, group, to_come=size * (count - LAST_KEPT - 1 - index))
        self.count_sent(parked, size, "input")
        return parked

    def count_sent(self, parked: Parked, size: int, what: str) -> None:
        if parked.block is not None:
            self.counters[f"{what} offloaded"] += 1
            self.counters["bytes offloaded"] += size
        else:
            self.counters[f"{what} kept: host memory limit"] += 1

    @property
    def offloader(self) -> Offloader:
        """Made when the first tensor leaves."""
        if self._offloader is None:
            share = HOST_SHARE / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each rank of this host asks for its own
            self._offloader = Offloader(self.machine.pin, int(host_memory_available() * share), self.machine.lane_of)
        return self._offloader


def _forgotten() -> None:
    """What a pickled memory loads as: the model is unpatched."""
