"""Memory timelines as a table: moments of the step downwards, ways across."""

from __future__ import annotations

from collections.abc import Sequence

from .memory import Point, Timeline

MOST_LAYERS = 4  # rows of the forward, and of backward


def scale_of(timelines: Sequence[Timeline]) -> tuple[float, str]:
    """Bytes of the unit that fits, and its name."""
    most = max((timeline.peak or 0 for timeline in timelines), default=0)
    return (1e9, "GB") if most >= 2e9 else (1e6, "MB")


def rows_of(timelines: Sequence[Timeline]) -> list[list[str]]:
    """The table, its head first."""
    scale, unit = scale_of(timelines)

    def text(value: int | None) -> str:
        return "-" if value is None else f"{value / scale:,.{2 if unit == 'GB' else 1}f} {unit}"

    rows = [["bytes held", *(timeline.way for timeline in timelines)]]
    for label, point, layer in _moments(timelines[0].layers):
        found = [timeline.find(point, layer) for timeline in timelines]
        rows.append([label, *(text(None if sample is None else sample.held) for sample in found)])
    rows.append(["peak", *(text(timeline.peak) for timeline in timelines)])
    rows.append(["  it lies in", *(where(timeline) for timeline in timelines)])
    if any(timeline.sent for timeline in timelines):
        rows.append(["sent to the host", *(text(timeline.sent) for timeline in timelines)])
    rows.append(["time of the step", *(_duration(timeline) for timeline in timelines)])
    return rows


def where(timeline: Timeline) -> str:
    """The part of the step that the peak lies in."""
    if timeline.peak_at is None:
        return "-"
    sample = timeline.peak_at[1]
    number = None if sample.layer is None else sample.layer + 1
    if sample.point == "forward begins" and number != 1:
        return f"forward, before layer {number}"
    if sample.point == "backward begins" and number != timeline.layers:
        return f"backward, before layer {number}"
    return {
        "start": "before the step",
        "forward begins": "embedding",
        "forward ends": f"forward of layer {number}",
        "loss": "head and loss",
        "backward begins": "backward of head and loss",
        "backward ends": f"backward of layer {number}",
        "end": "backward of the embedding",
    }[sample.point]


def notes_of(timelines: Sequence[Timeline]) -> list[str]:
    """What is to be said of single ways."""
    found = []
    for timeline in timelines:
        failure = [f"{timeline.failure}; the samples end there"] if timeline.failure else []
        found += [f"{timeline.way}: {note}" for note in [*failure, *timeline.notes]]
    return found


def _moments(layers: int) -> list[tuple[str, Point, int | None]]:
    """(row, point, layer) in the order of the step, with a few layers, the first and the last among them."""
    count = min(layers, MOST_LAYERS)
    shown = sorted({round(place * (layers - 1) / max(count - 1, 1)) for place in range(count)})
    found: list[tuple[str, Point, int | None]] = [("before the step", "start", None)]
    found += [(f"forward, layer {layer + 1} done", "forward ends", layer) for layer in shown]
    found += [("loss computed", "loss", None)]
    found += [(f"backward, layer {layer + 1} done", "backward ends", layer) for layer in reversed(shown)]
    return [*found, ("after the step, with gradients", "end", None)]


def _duration(timeline: Timeline) -> str:
    last = timeline.find("end")
    return timeline.failure or (f"{last.milliseconds:,.1f} ms" if last is not None else "-")
