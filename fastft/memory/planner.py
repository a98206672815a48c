"""When a plan is made: two steps are measured, the third is planned, and again whenever it would no longer hold.

first forward    every layer checkpointed: how much memory such a step takes
second           the same, with the last layer told: what a layer saves, and how long each part takes to make again
from the third   by plan; one is made for each size of batch, and all anew when other things take more memory
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from .machine import Machine
from .offload import is_held_by_autograd
from .plan import MemoryPlan, make_plan
from .schedule import RECOMPUTE, Measured, Mode
from .tape import LEAN

logger = logging.getLogger("fastft")

# Of the memory that is free: what fragments and what the planner cannot see takes the rest.
_FREE_SHARE = 0.92
_TIGHTER = 0.9
_CHANGED = 0.01  # of the budget: by how much what other things take may change before plans are made anew
_REMEASURE = 2  # times the tokens that were measured: a larger batch is measured itself


class _Step(NamedTuple):
    """The memory of one step with every layer checkpointed."""

    tokens: int
    static: int  # bytes before the forward
    at_loss: int  # the peak until backward began
    at_end: int  # and until it ended


class Planner:
    """Decides for the layers of one stack.

    Args:
        machine: what is asked for memory and time.
        budget: bytes on the device at the highest; "auto" for what is free; None for what the same step takes when
            every layer is checkpointed.
        smallest: bytes of a layer's input below which nothing is sent.
    """

    def __init__(self, machine: Machine, budget: int | Literal["auto"] | None, smallest: int = 0) -> None:
        self._machine, self._budget, self._smallest = machine, budget, smallest
        self.plan: MemoryPlan | None = None
        self.is_off = False  # for good
        self._plans: dict[int, MemoryPlan] = {}
        self._planned_static = 0
        self._share = 1.0  # of the budget beyond what other things take, less after an out-of-memory
        self._ooms = 0
        self._device: torch.device | None = None
        self._tokens = 0  # of this forward
        self._static = 0  # bytes before it
        self._input_bytes = 0
        self._input_stays = False
        self._measured: Measured | None = None
        self._first: _Step | None = None
        self._phase = 0  # 1 and 2: the forwards that are measured
        self._loss_peak = self._end_peak = 0  # of this step, once backward began and ended
        self._backward_marks: tuple[Any, Any] = (None, None)
        self._forward_marks: list[tuple[Any, Any]] = []
        self._again_marks: list[tuple[str, Any, Any]] = []
        self._kinds: Counter[str] = Counter()
        self._passing = 0

    @property
    def is_measuring(self) -> bool:
        """Whether layers run as plain checkpointing has them, and are timed."""
        return self._measured is None and self._phase > 0 and not self.is_off

    def is_of(self, device: torch.device) -> bool:
        """Whether the plan is for the layers on a device."""
        return self._device in (None, device)

    def begin(self, x: torch.Tensor, layers: int) -> None:
        """A forward with gradients begins with x, [B, L, H], the input of the first of `layers` layers."""
        tokens, memory = x.shape[:-1].numel(), self._machine.memory(x.device)
        if self.is_off:
            return
        if memory.ooms > self._ooms and self.plan is not None:
            self.tighten()
        self._ooms = memory.ooms
        if self._measured is None and self._phase:
            self._learn(layers)
        if self._measured is not None and tokens > _REMEASURE * self._measured.tokens:
            self._restart()
        self._device, self._tokens, self._input_bytes = x.device, tokens, x.nbytes
        self._static = memory.allocated - x.nbytes  # it is there already, and counted with the other layers'
        self._input_stays = is_held_by_autograd(x)
        if self._measured is None:
            self._phase = max(self._phase, 1)
            self._loss_peak = self._end_peak = 0
            self._forward_marks, self._again_marks, self._kinds = [], [], Counter()
        else:
            self.plan = self._plan_for(tokens) if tokens else None

    def mode_of(self, index: int, count: int) -> Mode:
        """What becomes of layer `index` of `count` in this forward."""
        if self.plan is not None and len(self.plan.modes) == count:
            return self.plan.modes[index]
        return LEAN if self.is_measuring and self._phase == 2 and index == count - 1 else RECOMPUTE

    def backward_begins(self) -> None:
        """The last layer's output has its gradient."""
        assert self._device is not None
        self._loss_peak = self._machine.memory(self._device).peak
        self._backward_marks = (self._machine.mark(self._device), None)
        # Before the optimizer: what it allocates is none of the step's activations.
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        assert self._device is not None
        self._end_peak = self._machine.memory(self._device).peak
        self._backward_marks = (self._backward_marks[0], self._machine.mark(self._device))

    @contextmanager
    def forward_of_a_layer(self) -> Iterator[None]:
        """Around the forward of a checkpointed layer while measuring."""
        assert self._device is not None
        first = self._machine.mark(self._device)
        yield
        self._forward_marks.append((first, self._machine.mark(self._device)))

    @contextmanager
    def making_again(self, kind: str) -> Iterator[None]:
        """Around what makes tensors of a kind again while measuring."""
        assert self._device is not None
        first = self._machine.mark(self._device)
        yield
        self._again_marks.append((kind, first, self._machine.mark(self._device)))

    def saved(self, kinds: Counter[str], passing: int = 0) -> None:
        """What the told layer saves, bytes by kind, and the largest tensor that it makes beside them."""
        if self.is_measuring:
            self._kinds, self._passing = Counter(kinds), passing

    def tighten(self) -> None:
        """Memory has run out: plans are made for less from now on, and this forward goes on as plain checkpointing."""
        if self._measured is None:
            self.is_off = True
            logger.warning("out of GPU memory while a step was measured; layers are checkpointed as stock has them")
            return
        self._share *= _TIGHTER
        self._plans.clear()
        if self._device is not None:
            self._ooms = self._machine.memory(self._device).ooms
        if self.plan is not None:
            self.plan = replace(self.plan, modes=(RECOMPUTE,) * len(self.plan.modes), reason="out of memory")
        logger.warning(
            "out of GPU memory with the planned checkpointing; planning for %.0f%% of the budget from now on. Results "
            "are not affected", 100 * self._share,
        )  # fmt: skip

    def _restart(self) -> None:
        """Forgets what was measured."""
        self.plan, self._measured, self._first = None, None, None
        self._plans.clear()
        self._phase = 0

    def _learn(self, layers: int) -> None:
        """What the forward before this one tells; one without a whole backward, or without tokens, tells nothing."""
        if not self._end_peak or not self._tokens:
            return
        if self._phase == 1:
            found = _Step(self._tokens, self._static, self._loss_peak, self._end_peak)
            # Somebody may have reset the count of the peak.
            if found.at_loss > found.static and found.at_end - found.static >= layers * self._input_bytes:
                self._first, self._phase = found, 2
        elif self._kinds and self._forward_marks:
            self._measured = self._measurement(layers)

    def _measurement(self, layers: int) -> Measured:
        first, machine, device = self._first, self._machine, self._device
        assert first is not None and device is not None
        again: dict[str, float] = {}
        for kind, start, end in self._again_marks:
            again[kind] = again.get(kind, 0.0) + machine.seconds(start, end)
        scale = self._tokens / first.tokens
        forward = statistics.median(machine.seconds(start, end) for start, end in self._forward_marks)
        # All layers but the last, which was told, ran again.
        backward = (machine.seconds(*self._backward_marks) - (layers - 1) * forward - sum(again.values())) / layers
        return Measured(
            tokens=self._tokens,
            layers=layers,
            input_bytes=self._input_bytes,
            kinds=dict(self._kinds),
            again_seconds=again,
            forward_seconds=forward,
            backward_seconds=max(backward, forward),  # a product of two matrices for each in forward, at the least
            loss_bytes=scale * (first.at_loss - first.static),
            backward_bytes=scale * (first.at_end - first.static),
            loss_seconds=max(machine.seconds(self._forward_marks[-1][1], self._backward_marks[0]) - forward, 0.0),
            bandwidth=machine.bandwidth(device) if machine.can_offload(device) else 0.0,
            can_tell=bool(again),
            first_input_stays=self._input_stays,
            passing_bytes=self._passing,
        )

    def _budget_for(self, tokens: int, static: float) -> float:
        assert self._measured is not None and self._device is not None
        free = self._static + self._input_bytes + self._machine.free(self._device) * _FREE_SHARE
        if self._budget == "auto":
            return free
        if self._budget is not None:
            return min(float(self._budget), free)
        plain = max(self._measured.loss_bytes, self._measured.backward_bytes) * tokens / self._measured.tokens
        return min(static + plain, free)

    def _plan_for(self, tokens: int) -> MemoryPlan:
        assert self._measured is not None
        grain = 1 << max(tokens.bit_length() - 4, 0)
        rounded = -(-tokens // grain) * grain
        known = self._plans.get(rounded)
        if known is not None:
            grown = self._static - self._planned_static > _CHANGED * known.budget
            shrunk = self._budget == "auto" and self._budget_for(rounded, self._static) < (1 - _CHANGED) * known.budget
            if not grown and not shrunk:
                return known
            self._plans.clear()
        # Gradients come and go between two forwards: a plan has to hold with them.
        self._planned_static = static = max(self._static, self._planned_static)
        budget = self._budget_for(rounded, static)
        measured = self._measured
        if measured.input_bytes * rounded < self._smallest * measured.tokens:
            measured = measured._replace(bandwidth=0.0)
        plan = make_plan(measured, static, rounded, static + (budget - static) * self._share)
        logger.info("%s", plan)
        self._plans[rounded] = plan
        return plan
