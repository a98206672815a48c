"""What `fastft.report` returns and prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .memory.plan import MemoryPlan
from .plan import Replacement, Skipped


@dataclass(frozen=True, slots=True)
class Report:
    """What fastft replaced in a model, what it left alone and why, and how often each part has run since.

    Attributes:
        model: class name of the model.
        replaced: what fastft computes, on the devices where the modules are now.
        skipped: what stays stock.
        counters: launches by op, and batches by the way they went.
        memory: what becomes of each layer's activations, once it is planned.
    """

    model: str
    replaced: tuple[Replacement, ...]
    skipped: tuple[Skipped, ...]
    counters: Mapping[str, int]
    memory: MemoryPlan | None = None

    def summary(self) -> str:
        """One line: how much of the model was replaced."""
        counts = ", ".join(f"{op} x{count} ({impl})" for (op, impl), count in _count(self.replaced).items())
        left = ", ".join(sorted({item.op for item in self.skipped}))
        return f"fastft: {self.model}: replaced {counts or 'nothing'}" + (f"; not replaced: {left}" if left else "")

    def rows(self) -> Iterator[tuple[str, str, str, int, str]]:
        """(op, "replaced" or "skipped", implementation, modules, reason), equal ones gathered in one row."""
        gathered: dict[tuple[str, str, str, str], int] = {}
        for item in self.replaced:
            key = (item.op, "replaced", item.impl, item.reason)
            gathered[key] = gathered.get(key, 0) + 1
        for left in self.skipped:
            key = (left.op, "skipped", "stock", left.reason)
            gathered[key] = gathered.get(key, 0) + 1
        for (op, what, impl, reason), count in gathered.items():
            yield op, what, impl, count, reason

    def __str__(self) -> str:
        lines = [self.summary()]
        for op, what, impl, count, reason in self.rows():
            lines.append(f"  {op:<12} {what:<8} {impl:<10} x{count:<4} {reason}")
        if self.memory is not None:
            lines += [f"  {line}" for line in str(self.memory).splitlines()]
        lines.append(
            "  since then: " + (", ".join(f"{k} {v}" for k, v in sorted(self.counters.items())) or "not run yet")
        )
        return "\n".join(lines)


def _count(replaced: tuple[Replacement, ...]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for item in replaced:
        counts[item.op, item.impl] = counts.get((item.op, item.impl), 0) + 1
    return counts
