"""What the demo's three runs measured, and how they compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

LABELS = {"padded": "stock padded", "packed": "stock packed", "fastft": "fastft packed"}


@dataclass(slots=True)
class RunRecord:
    """One training run, filled in event by event as its process reports."""

    stack: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None

    @property
    def label(self) -> str:
        return LABELS[self.stack]

    @property
    def real_tokens_per_second(self) -> float | None:
        """Tokens that are not padding, a second of wall time: the median step, without the first (warm-up)."""
        # The median, since one step in which the machine was busy with something else would decide a sum.
        timed = list(zip(self._batches(), self.seconds, strict=False))[1:]
        return median(batch["real_tokens"] / seconds for batch, seconds in timed) if timed else None

    @property
    def padding_share(self) -> float | None:
        """The part of all tokens computed that is padding, between 0 and 1."""
        batches = self._batches()
        tokens = sum(batch["tokens"] for batch in batches)
        return 1 - sum(batch["real_tokens"] for batch in batches) / tokens if tokens else None

    @property
    def peak_memory_bytes(self) -> int | None:
        return self.result.get("peak_memory_bytes")

    def summary(self) -> dict[str, Any]:
        """Everything measured, for JSON."""
        return {
            "stack": self.stack,
            "failure": self.failure,
            "losses": self.losses,
            "step_seconds": self.seconds,
            "real_tokens_per_second": self.real_tokens_per_second,
            "padding_share": self.padding_share,
            **{key: value for key, value in self.result.items() if key != "stack"},
        }

    def _batches(self) -> list[dict[str, Any]]:
        return self.result.get("batches", [])


def comparable(run: RunRecord, baseline: RunRecord | None) -> bool:
    """Whether both runs started from the same adapters and saw the same batches, so that their losses must agree."""
    if baseline is None or not (run.result and baseline.result):
        return False
    return run.result["adapter_digest"] == baseline.result["adapter_digest"] and [
        batch["digest"] for batch in run.result["batches"]
    ] == [batch["digest"] for batch in baseline.result["batches"]]


def largest_loss_difference(run: RunRecord, baseline: RunRecord | None) -> float | None:
    """max over steps of |loss - baseline's loss|, or None where the batches differ and it would mean nothing."""
    if baseline is None or not comparable(run, baseline):
        return None
    return max(abs(a - b) for a, b in zip(run.losses, baseline.losses, strict=True))


def replaced_lines(report: Mapping[str, Any]) -> list[str]:
    """`61 x rms_norm: triton (reason)`, one line for each op and implementation."""
    counts = Counter((entry["op"], entry["impl"], entry["reason"]) for entry in report["replaced"])
    return [f"{count} x {op}: {impl} ({reason})" for (op, impl, reason), count in counts.most_common()]


def skipped_lines(report: Mapping[str, Any]) -> list[str]:
    """`30 x gated_mlp: reason`, one line for each op and reason."""
    counts = Counter((entry["op"], entry["reason"]) for entry in report["skipped"])
    return [f"{count} x {op}: {reason}" for (op, reason), count in counts.most_common()]


def find(runs: Sequence[RunRecord], stack: str) -> RunRecord | None:
    """The successful run of a stack, if there is one."""
    return next((run for run in runs if run.stack == stack and run.failure is None), None)
