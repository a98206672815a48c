"""Memory timelines as a plot: one line a way over the time of the step, and below what each way is doing when."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastft.errors import FastftError

from .memory import Timeline
from .table import scale_of, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe-Ito: distinguishable with the common forms of colour blindness.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
STYLES = ("-", "--", ":", "-.")  # lines that lie on one another can all be seen
PHASES = (("forward", 0.3), ("loss", 1.0), ("backward", 0.6))  # with the opacity of their bars

LETTERING = {"forward": "black", "loss": "white", "backward": "white"}


def require_matplotlib() -> None:
    """Asked before anything is measured.

    Raises:
        FastftError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise FastftError(
            "the plot needs matplotlib, which is not installed: run `pip install matplotlib`, or pass --no-plot for "
            "the table alone"
        )


def save_plot(path: Path, timelines: Sequence[Timeline], title: str, counted: str) -> None:
    """Draws what was measured into a PNG.

    Args:
        path: the file.
        timelines: one or more; of those that ran out of memory what there is.
        title: what was trained.
        counted: what the bytes are of.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [timeline for timeline in timelines if timeline.samples]
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(10, 6), sharex=True, layout="constrained",
        gridspec_kw={"height_ratios": [6, 0.35 + 0.35 * max(len(drawn), 1)]},
    )  # fmt: skip
    _draw_lines(upper, drawn)
    _draw_phases(lower, drawn)
    figure.suptitle("\n".join(textwrap.wrap(title, 110)), fontsize=11)
    explained = (
        f"Counted: {counted}. A dot is where a layer begins or ends; between two dots the line goes over the most that "
        "was held there."
    )
    figure.supxlabel("\n".join(textwrap.wrap(explained, 130)), fontsize=8, color="#555555")
    figure.savefig(path, dpi=140, format="png")
    pyplot.close(figure)


def curve(timeline: Timeline) -> tuple[list[float], list[float]]:
    """Milliseconds and bytes of the line: the samples, and half way between two of them what was more than both."""
    times, values = [], []
    before = None
    for sample in timeline.samples:
        if before is not None and sample.peak > max(before.held, sample.held):
            times.append((before.milliseconds + sample.milliseconds) / 2)
            values.append(float(sample.peak))
        times.append(sample.milliseconds)
        values.append(float(sample.held))
        before = sample
    return times, values


def peak_place(timeline: Timeline) -> tuple[float, float]:
    """Milliseconds and bytes of the highest point of the curve."""
    times, values = curve(timeline)
    number = max(range(len(values)), key=values.__getitem__)
    return times[number], values[number]


def spans(timeline: Timeline) -> list[tuple[str, float, float]]:
    """(phase, begin, end) in milliseconds of forward, loss and backward, as far as the step came."""
    last = timeline.samples[-1].milliseconds
    ends = [timeline.find("forward ends", timeline.layers - 1), timeline.find("loss"), timeline.find("end")]
    found, begin = [], 0.0
    for (phase, _), end in zip(PHASES, ends, strict=True):
        stop = last if end is None else end.milliseconds
        found.append((phase, begin, stop))
        if end is None:
            break
        begin = stop
    return found


def _draw_lines(axes: Axes, timelines: Sequence[Timeline]) -> None:
    scale, unit = scale_of(timelines)
    for number, timeline in enumerate(timelines):
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        times, values = curve(timeline)
        place, peak = peak_place(timeline)
        failure = f"; {timeline.failure}" if timeline.failure else ""
        label = f"{timeline.way}: peak {peak / scale:,.2f} {unit}, in {where(timeline)}{failure}"
        axes.plot(times, [value / scale for value in values], style, color=colour, linewidth=1.6, label=label)
        axes.plot(
            [sample.milliseconds for sample in timeline.samples],
            [sample.held / scale for sample in timeline.samples], ".", color=colour, markersize=5,
        )  # fmt: skip
        axes.plot(place, peak / scale, "v", color=colour, markersize=10, markeredgecolor="white")
    axes.set_ylabel(f"{unit} held")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if timelines:
        start = timelines[0].samples[0].held / scale
        axes.axhline(start, color="#999999", linewidth=1, zorder=0)
        axes.annotate("before the step", (1, start), xycoords=("axes fraction", "data"), ha="right", va="top",
                      xytext=(0, -2), textcoords="offset points", fontsize=8, color="#777777")  # fmt: skip
        # Above the lines, not over them: they are as many as there are entries.
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=9)


def _draw_phases(axes: Axes, timelines: Sequence[Timeline]) -> None:
    """A bar a way, first at the top."""
    shades = dict(PHASES)
    for number, timeline in enumerate(timelines):
        colour = COLOURS[number % len(COLOURS)]
        longest = max(each.samples[-1].milliseconds for each in timelines)
        for phase, begin, end in spans(timeline):
            axes.barh(-number, end - begin, left=begin, height=0.75, color=colour, alpha=shades[phase])
            if end - begin > 0.07 * longest:  # else the word would not fit
                axes.text(
                    (begin + end) / 2, -number, phase, ha="center", va="center", fontsize=8, color=LETTERING[phase]
                )
    axes.set_yticks([-number for number in range(len(timelines))], [timeline.way for timeline in timelines], fontsize=8)
    axes.set_xlabel("ms since the start of the step")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
