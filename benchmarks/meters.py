"""What a run is measured with: tokens counted from the batches, step times from the trainer's callbacks."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.timing import recorded_waits


class CountingCollator:
    """Passes a collator's batches through and counts their real tokens, rows and places on the host."""

    def __init__(self, collator: Any, pad_token_id: int) -> None:
        self.collator = collator
        self.pad_token_id = pad_token_id
        self.real_tokens: list[int] = []
        self.places: list[int] = []
        self.documents: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name == "collator":
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __call__(self, features: list[Any], *args: Any, **kwargs: Any) -> Any:
        batch = self.collator(features, *args, **kwargs)
        ids = batch["input_ids"]
        self.real_tokens.append(int((ids != self.pad_token_id).sum()))
        self.places.append(ids.numel())
        self.documents.append(count_documents(batch))
        return batch


def count_documents(batch: Any) -> int:
    """Documents of a batch: position ids that start again at 0, else one for each row."""
    positions = batch.get("position_ids")
    return int((positions == 0).sum()) if positions is not None else len(batch["input_ids"])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepMeter(TrainerCallback):
    """Wall times of the steps, with the device drained at both ends of each.

    `periods[i]` runs from the end of step i-1 (for i = 0: from `train_called`) to the end of step i, so the data loader
    and the logging are in it; `computes[i]` only from the begin of step i to its end.
    """

    def __init__(self, device: torch.device, profiler: Any = None, profile_from: int | None = None) -> None:
        self.device = device
        self.profiler = profiler
        self.profile_from = profile_from
        self.periods: list[float] = []
        self.computes: list[float] = []
        self.losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.train_called = 0.0
        self.first_step_end = 0.0
        self._previous = 0.0
        self._begin = 0.0

    def start(self) -> None:
        """To be called right before `trainer.train()`."""
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.train_called = self._previous = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        self.periods.append(now - self._previous)
        self.computes.append(now - self._begin)
        if not self.first_step_end:
            self.first_step_end = now
        if self.profiler is not None and self.profile_from is not None:
            if len(self.periods) == self.profile_from:
                self.profiler.start()
            elif len(self.periods) == self.profile_from + self.profiler.steps:
                self.profiler.stop()
        self._previous = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            if "grad_norm" in logs:
                self.gradient_norms.append(float(logs["grad_norm"]))


class SynchronizationCounter(TrainerCallback):
    """Counts, in all steps from one on, what waits for the device, by the line of Python that did.

    Recording slows the steps down: count, do not time.
    """

    def __init__(self, count_from: int) -> None:
        self.count_from = count_from
        self.steps = 0
        self.found: Counter[str] = Counter()
        self._recording = ExitStack()
        self._waits: list[str] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.count_from:
            self._waits = self._recording.enter_context(recorded_waits())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the count: forward and backward are what a patched model has a part in."""
        if self._waits is None:
            return
        self._recording.close()
        self.steps += 1
        self.found.update(self._waits)
        self._waits = None

    def per_step(self) -> dict[str, float]:
        """Waits a step, the most frequent first."""
        return {line: count / self.steps for line, count in self.found.most_common()}
