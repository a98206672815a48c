"""What convergence.py has found: how far losses are apart, as numbers, as a table in markdown and as a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpointing_results import markdown
from benchmarks.compare import conditions

Line = dict[str, Any]

STACKS = ("eager", "sdpa", "fastft")
ALLOWED_FACTOR = 2
# A single step's |eager - sdpa| may be near zero by luck; a mean of so many is not.
WINDOW = 10
# Later, roundings have been fed back through the weights too often for two runs to stay this close.
FIRST_STEPS = 20
FIRST_STEPS_BOUND = 1e-5
# Were the three losses off by independent normal errors of one size, (fastft - sdpa) / (eager - sdpa) would be a Cauchy
# variable around 1/2 of scale sqrt(3)/2, for the error of sdpa is in both: 73% of the steps would be within twice.
SHARE_IF_ALIKE = (math.atan(math.sqrt(3)) + math.atan(5 / math.sqrt(3))) / math.pi


# -------------------------------------------------------------------------------------------------------- differences


def compare_losses(losses: dict[str, list[float]]) -> Line:
    """Distances of both others from stock SDPA: of every step, in short, beside each other, relative in the beginning.

    NaN in a loss is NaN in what is made of it, and outside of every bound.
    """
    sdpa = losses["sdpa"]
    apart = {stack: [abs(a - b) for a, b in zip(losses[stack], sdpa, strict=True)] for stack in ("fastft", "eager")}
    windows = {stack: windowed(values) for stack, values in apart.items()}
    return {
        "differences": apart,
        "difference_max": {stack: largest(values) for stack, values in apart.items()},
        "difference_median": {stack: statistics.median(values) for stack, values in apart.items()},
        "difference_mean": {stack: statistics.fmean(values) for stack, values in apart.items()},
        "within_twice": {
            "steps": share_within(apart["fastft"], apart["eager"]),
            "steps_if_alike": SHARE_IF_ALIKE,
            "window": WINDOW,
            "windows": share_within(windows["fastft"], windows["eager"]),
            "windows_largest_ratio": largest(list(map(ratio, windows["fastft"], windows["eager"]))),
        },
        "relative": {
            "steps": min(FIRST_STEPS, len(sdpa)),
            "fastft to sdpa": largest_relative(losses["fastft"], sdpa),
            "fastft to eager": largest_relative(losses["fastft"], losses["eager"]),
            "eager to sdpa": largest_relative(losses["eager"], sdpa),
        },
    }


def windowed(values: Sequence[float]) -> list[float]:
    """Means over each `WINDOW` steps in a row; none of fewer steps."""
    return [statistics.fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]


def share_within(ours: Sequence[float], yardstick: Sequence[float]) -> float | None:
    """Where ours is at most twice the yardstick, as a share."""
    if not ours:
        return None
    return statistics.fmean(a <= ALLOWED_FACTOR * b for a, b in zip(ours, yardstick, strict=True))


def ratio(ours: float, yardstick: float) -> float:
    if yardstick:
        return ours / yardstick
    return 0.0 if ours == 0 else math.inf


def largest(values: Sequence[float]) -> float | None:
    """NaN if one is."""
    if any(map(math.isnan, values)):
        return math.nan
    return max(values, default=None)


def relative(losses: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True)]


def largest_relative(losses: Sequence[float], others: Sequence[float]) -> float | None:
    return largest(relative(losses[:FIRST_STEPS], others[:FIRST_STEPS]))


# -------------------------------------------------------------------------------------------------------------- table


def table(lines: list[Line]) -> str:
    """One row a line in markdown, what the columns mean and the conditions below."""
    rows = [["run", "fastft to sdpa: mean, median, largest", "eager to sdpa", "steps within twice",
             f"means of {WINDOW} steps within twice, largest ratio", f"fastft to stock, relative, {FIRST_STEPS} steps",
             "eager to sdpa, relative", f"first and last {WINDOW} losses: {', '.join(STACKS)}"]]  # fmt: skip
    for line in lines:
        within = line["within_twice"]
        distances = [distance(line, stack) for stack in ("fastft", "eager")]
        apart = line["relative"]
        ours = largest([apart["fastft to sdpa"], apart["fastft to eager"]])
        rows.append([
            describe(line), *distances, percent(within["steps"]),
            f"{percent(within['windows'])}, {number(within['windows_largest_ratio'], '.2f')}", number(ours, ".1e"),
            number(apart["eager to sdpa"], ".1e"), ", ".join(ends(line["losses"][stack]) for stack in STACKS),
        ])  # fmt: skip
    below = [
        f"within twice: |fastft - sdpa| <= {ALLOWED_FACTOR} |eager - sdpa|; were all three losses off by independent "
        f"errors of one size, {SHARE_IF_ALIKE:.0%} of the steps would be",
        f"relative: the largest of the first {FIRST_STEPS} steps, fastft's over both stock attentions; fp32 should "
        f"stay under {FIRST_STEPS_BOUND:.0e}",
        *dict.fromkeys(circumstances(line) for line in lines),
    ]
    return markdown(rows, below)


def describe(line: Line) -> str:
    asked = line["arguments"]
    return (
        f"{asked['model']}, {asked['weights']} weights, {asked['method']}, {asked['dtype']}, {asked['steps']} steps of "
        f"{line['tokens_per_step']:,} tokens"
    )


def circumstances(line: Line) -> str:
    """A line's own, since runs on several machines may be in one table: each is compared with itself only."""
    return conditions([{**line, "step_ms": []}]).rpartition("; ")[0]  # its end is about times


def distance(line: Line, stack: str) -> str:
    return ", ".join(f"{line[f'difference_{kind}'][stack]:.1e}" for kind in ("mean", "median", "max"))


def ends(losses: Sequence[float]) -> str:
    return f"{statistics.fmean(losses[:WINDOW]):.4f} to {statistics.fmean(losses[-WINDOW:]):.4f}"


def percent(share: float | None) -> str:
    return "too few steps" if share is None else f"{share:.0%}"


def number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


# --------------------------------------------------------------------------------------------------------------- plot


def plot(lines: list[Line], path: Path) -> None:
    """A row for each line: the losses, and their distances beside what is allowed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(lines), 2, figsize=(12, 4 * len(lines)), squeeze=False)
    for (curves, distances), line in zip(panels, lines, strict=True):
        draw_losses(curves, line)
        (draw_relative if line["arguments"]["dtype"] == "fp32" else draw_distances)(distances, line)
        for axes in (curves, distances):
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_losses(axes: Any, line: Line) -> None:
    """Curves that lie on one another: the widest is drawn first."""
    for stack, width in zip(STACKS, (4.5, 2.5, 1), strict=True):
        losses = line["losses"][stack]
        axes.plot(range(1, len(losses) + 1), losses, linewidth=width, label=stack)
    axes.set_ylabel("loss")
    axes.set_title(describe(line), fontsize=9)


def draw_distances(axes: Any, line: Line) -> None:
    """Each step as a dot and means over windows as curves."""
    apart = line["differences"]
    steps = range(1, len(apart["fastft"]) + 1)
    for stack, color in (("eager", "C0"), ("fastft", "C2")):
        axes.plot(steps, visible(apart[stack]), ".", color=color, markersize=4, alpha=0.4, label=f"|{stack} - sdpa|")
        means = visible(windowed(apart[stack]))
        axes.plot(steps[WINDOW - 1 :], means, color=color, label=f"{stack}: mean of {WINDOW} steps")
    allowed = [ALLOWED_FACTOR * value for value in windowed(apart["eager"])]
    axes.plot(steps[WINDOW - 1 :], visible(allowed), "k--", linewidth=1, label="twice that of eager")
    axes.set_yscale("log")
    axes.set_ylabel("difference of the losses")


def draw_relative(axes: Any, line: Line) -> None:
    losses = line["losses"]
    for ours, stock in (("eager", "sdpa"), ("fastft", "sdpa"), ("fastft", "eager")):
        values = visible(relative(losses[ours], losses[stock]))
        axes.plot(range(1, len(values) + 1), values, ".-", label=f"{ours} to {stock}")
    axes.axhline(FIRST_STEPS_BOUND, color="k", linestyle="--", linewidth=1, label=f"{FIRST_STEPS_BOUND:.0e}")
    axes.set_yscale("log")
    axes.set_ylabel("relative difference of the losses")


def visible(values: Sequence[float]) -> list[float]:
    """Zero has no place on an axis of logarithms: a gap."""
    return [value if value > 0 else math.nan for value in values]
