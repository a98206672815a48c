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
from typing import Any, Literal

import torch

from .machine import Machine
from .plan import RECOMPUTE, Measured, MemoryPlan, Mode, make_plan
from .tape import LEAN

logger = logging.getLogger("fastft")

# Of the memory that is free: what fragments and what the planner cannot see takes the rest.
_FREE_SHARE = 0.92
_TIGHTER = 0.9
_GROWN = 0.01  # of the budget: by how much other things may grow before all plans are made anew


class Planner:
    """Decides for the layers of one stack.

    Args:
        machine: what is asked for memory and time.
        budget: bytes on the device at the highest; "auto" for what is free; None for what the same step takes when
            every layer is checkpointed.
    """

    def __init__(self, machine: Machine, budget: int | Literal["auto"] | None) -> None:
        self._machine, self._budget = machine, budget
        self.plan: MemoryPlan | None = None
        self._plans: dict[int, MemoryPlan] = {}
        self._forwards = 0
        self._device = torch.device("cpu")
        self._tokens = 0
        self._static = 0  # bytes before this forward
        self._planned_static = 0
        self._share = 1.0  # of the budget, less after an out-of-memory
        # What the first two forwards tell.
        self._first: tuple[int, int, int] = (0, 0, 0)  # tokens, static, peak when backward began
        self._backward_began = 0  # the peak by then
        self._peak_before = 0  # the peak of the first step
        self._backward_mark: Any = None
        self._forward_marks: list[tuple[Any, Any]] = []
        self._again_marks: list[tuple[str, Any, Any]] = []
        self._kinds: Counter[str] = Counter()
        self._input_bytes = 0
        self._measured: Measured | None = None

    @property
    def is_measuring(self) -> bool:
        """Whether layers run as plain checkpointing has them, and are timed."""
        return self._measured is None and self._forwards > 0

    def begin(self, x: torch.Tensor, layers: int) -> None:
        """A forward with gradients begins with x, [B, L, H], the input of the first of `layers` layers."""
        before = self._tokens
        self._device, self._tokens = x.device, x.shape[:-1].numel()
        memory = self._machine.memory(x.device)
        self._forwards += 1
        if self._measured is None and self._forwards == 2 and self._backward_began:
            self._first = (before, self._static, self._backward_began)
            self._peak_before, self._backward_began = memory.peak, 0
        elif self._measured is None and self._forwards > 2:
            self._finish_measuring(before, layers)
        self._static, self._input_bytes = memory.allocated, x.nbytes
        if self._measured is None:
            if not self._first[0]:
                self._forwards = 1  # a forward without its backward tells nothing
            self._forward_marks.clear()
            self._again_marks.clear()
            self._kinds.clear()
        elif self._tokens:
            self.plan = self._plan_for(self._tokens)

    def mode_of(self, index: int, count: int) -> Mode:
        """What becomes of layer `index` of `count` in this forward."""
        if self.plan is not None and len(self.plan.modes) == count:
            return self.plan.modes[index]
        return LEAN if self._measured is None and self._forwards == 2 and index == count - 1 else RECOMPUTE

    def backward_begins(self) -> None:
        """The last layer's output has its gradient."""
        self._backward_began = self._machine.memory(self._device).peak
        self._backward_mark = self._machine.mark(self._device)

    @contextmanager
    def forward_of_a_layer(self) -> Iterator[None]:
        """Around the forward of a checkpointed layer while measuring."""
        first = self._machine.mark(self._device)
        yield
        self._forward_marks.append((first, self._machine.mark(self._device)))

    @contextmanager
    def making_again(self, kind: str) -> Iterator[None]:
        """Around what makes tensors of a kind again while measuring."""
        first = self._machine.mark(self._device)
        yield
        self._again_marks.append((kind, first, self._machine.mark(self._device)))

    def saved(self, kinds: Counter[str]) -> None:
        """What the told layer saves, bytes by kind."""
        if self.is_measuring:
            self._kinds = Counter(kinds)

    def tighten(self) -> str:
        """Memory has run out. Plans are made for less from now on; what to tell the user."""
        self._share *= _TIGHTER
        self._plans.clear()
        if self.plan is not None:
            size = len(self.plan.modes)
            # This forward goes on as plain checkpointing.
            self.plan = replace(self.plan, modes=(RECOMPUTE,) * size, reason="out of memory")
        message = (
            f"out of GPU memory with the planned checkpointing; planning for {self._share:.0%} of the budget from now "
            "on. Results are not affected"
        )
        logger.warning(message)
        return message

    def _finish_measuring(self, tokens: int, layers: int) -> None:
        if not (self._forward_marks and self._kinds and self._backward_began):
            self._forwards = 2  # no backward, or no layer that tells anything: once more
            return
        machine, kinds = self._machine, self._kinds
        again: Counter[str] = Counter()
        for kind, first, last in self._again_marks:
            again[kind] += machine.seconds(first, last)  # type: ignore[assignment]
        can_offload = machine.can_offload(self._device)
        first_tokens, static, began = self._first
        scale = tokens / first_tokens
        self._measured = Measured(
            tokens=tokens,
            layers=layers,
            input_bytes=self._input_bytes,
            kinds=dict(kinds),
            again_seconds=dict(again),
            forward_seconds=statistics.median(machine.seconds(first, last) for first, last in self._forward_marks),
            loss_bytes=scale * (began - static),
            backward_bytes=scale * (self._peak_before - static),
            loss_seconds=machine.seconds(self._forward_marks[-1][1], self._backward_mark),
            bandwidth=machine.bandwidth(self._device) if can_offload else 0.0,
            can_tell=bool(again),
        )
        self._forward_marks.clear()
        self._again_marks.clear()

    def _plan_for(self, tokens: int) -> MemoryPlan:
        assert self._measured is not None
        grain = max(1, 1 << (tokens.bit_length() - 4))
        rounded = -(-tokens // grain) * grain
        measured = self._measured
        plain = max(measured.loss_bytes, measured.backward_bytes) * rounded / measured.tokens
        if self._budget is None:
            budget = self._static + plain
        elif self._budget == "auto":
            budget = self._static + self._machine.free(self._device) * _FREE_SHARE
        else:
            budget = float(self._budget)
        if self._static > self._planned_static + _GROWN * budget:
            self._plans.clear()
            self._planned_static = self._static
        if rounded not in self._plans:
            self._plans[rounded] = make_plan(measured, self._static, rounded, budget * self._share)
            logger.info("memory plan: %s", self._plans[rounded].reason)
        return self._plans[rounded]
