"""Which layers keep, make again, or send what: the fastest step that fits a budget.

    time     what is run again in backward, and what the computing stream waits for copies
    memory   in the forward of each layer, beside what those before it hold and what is still leaving; beside the loss;
             and in the backward of each layer, when those after it have given theirs up and its own is all there

Layers are taken to be alike. Early ones hold less than late ones: the late ones' share is free again by the time an
early one is run again. Where two kinds of layers send, they take turns, so that the bus is busy all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .tape import ALL_SENT, LEAN, LEAN_SENT, THIN, THIN_SENT, Level

RECOMPUTE, OFFLOAD, KEEP = "recompute", "offload", "keep"
# What becomes of a layer: one of these names, or what becomes of each kind.
Mode = Level | str

# A layer's backward takes at least so many of its forwards: the two products for each one, less what is frozen.
_BACKWARD = 1.5
_WINDOWS = (2, 3, 4, 6)


class Measured(NamedTuple):
    """One model's step, measured. Bytes and seconds are of `tokens` tokens."""

    tokens: int
    layers: int
    input_bytes: float  # of one layer's input
    kinds: Mapping[str, float]  # bytes that one layer saves for backward, by kind
    again_seconds: Mapping[str, float]  # to make a layer's tensors of a kind again
    forward_seconds: float  # of one layer
    loss_bytes: float  # above what was there before the forward, at the highest until backward begins
    backward_bytes: float  # the same in backward; both with checkpointing of every layer
    loss_seconds: float  # between the forward of the last layer and its backward
    bandwidth: float  # bytes a second to the host; 0: nothing can leave
    can_tell: bool = True  # whether layers tell what they make
    first_input_stays: bool = False  # held by autograd itself


class Option(NamedTuple):
    """What one layer costs in one mode."""

    mode: Mode
    held: float  # bytes on the device between forward and backward
    sent: float  # bytes that leave
    seconds: float  # run again in backward
    alive: float  # bytes of its activations that are there at a time in its backward


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What becomes of each layer, and what that is expected to take.

    Attributes:
        modes: of the layers, in order.
        peak: bytes expected at the highest.
        budget: bytes allowed.
        seconds: of a step, that are spent on running things again and on waiting for copies.
        window: layers whose tensors may be leaving at a time.
        options: the costs that the plan was made from, by the name of the mode.
        reason: in words.
        measured: what it was made from.
    """

    modes: tuple[Mode, ...]
    peak: float
    budget: float
    seconds: float
    window: int
    options: Mapping[str, Option]
    reason: str
    measured: Measured

    def rows(self) -> Iterator[tuple[str, str, Option]]:
        """(layers, mode, cost of one), neighbours of one mode together."""
        first = 0
        for place in range(1, len(self.modes) + 1):
            if place == len(self.modes) or self.modes[place] != self.modes[first]:
                name = name_of(self.modes[first])
                yield (f"{first}" if place - first == 1 else f"{first}-{place - 1}"), name, self.options[name]
                first = place

    def __str__(self) -> str:
        lines = [f"memory plan: {self.reason}; {self.seconds * 1e3:.0f} ms of a step run again or waited for"]
        for layers, mode, cost in self.rows():
            held, sent = cost.held / 2**20, cost.sent / 2**20
            lines.append(
                f"  layers {layers:<7} {mode:<14} each holds {held:,.0f} MiB, sends {sent:,.0f} MiB, runs "
                f"{cost.seconds * 1e3:.1f} ms again"
            )
        return "\n".join(lines)


def name_of(mode: Mode) -> str:
    return mode.name if isinstance(mode, Level) else mode


def options_of(measured: Measured) -> list[Option]:
    """What a layer can do, with its costs."""
    kinds, again = measured.kinds, measured.again_seconds
    everything, size = sum(kinds.values()), measured.input_bytes
    options = [
        Option(KEEP, everything, 0.0, 0.0, everything),
        Option(RECOMPUTE, size, 0.0, measured.forward_seconds, everything),
    ]
    levels = [THIN, LEAN] if measured.can_tell else []
    if measured.bandwidth:
        options.append(Option(OFFLOAD, 0.0, size, measured.forward_seconds, everything))
        levels += [THIN_SENT, LEAN_SENT, ALL_SENT] if levels else []
    # Of two norms and two activations, one is needed at a time.
    alive = everything - kinds.get("rotated", 0.0) - (kinds.get("norm", 0.0) + kinds.get("activation", 0.0)) / 2
    for level in levels:
        of = {"again": 0.0, "offload": 0.0, "keep": 0.0}
        for kind, count in kinds.items():
            of[level.actions.get(kind, "keep")] += count
        seconds = sum(again.get(kind, 0.0) for kind, action in level.actions.items() if action == "again")
        options.append(Option(level, of["keep"], of["offload"], seconds, alive))
    return options


def make_plan(measured: Measured, static: float, tokens: int, budget: float) -> MemoryPlan:
    """The fastest assignment within a budget, or the smallest where none fits.

    Args:
        measured: a step with checkpointing of every layer.
        static: bytes on the device before a forward.
        tokens: of the step to plan for.
        budget: bytes on the device at the highest.
    """
    scale = tokens / measured.tokens
    room = (budget - static) / scale
    best: _Candidate | None = None
    for assignment in _assignments(options_of(measured), measured.layers):
        again = sum(option.seconds for option in assignment)
        if best is not None and best.peak <= room and again > best.seconds:
            continue  # before anything is waited for
        for window in _WINDOWS if any(option.sent for option in assignment) else (_WINDOWS[0],):
            peak = _peak(assignment, measured, window)
            seconds = again + (_waits(assignment, measured, window) if peak <= room else 0.0)
            found = _Candidate(assignment, window, peak, seconds)
            if best is None or found.rank(room) < best.rank(room):
                best = found
    assert best is not None
    peak, seconds = static + scale * best.peak, scale * best.seconds
    fits = peak <= budget
    reason = f"{tokens:,} tokens, {peak / 2**30:.2f} of {budget / 2**30:.2f} GiB expected" + (
        "" if fits else "; the least that can be had"
    )
    scaled = {
        name_of(mode): Option(mode, held * scale, sent * scale, again * scale, alive * scale)
        for mode, held, sent, again, alive in options_of(measured)
    }
    modes = tuple(option.mode for option in best.assignment)
    return MemoryPlan(modes, peak, budget, seconds, best.window, scaled, reason, measured)


class _Candidate(NamedTuple):
    assignment: list[Option]
    window: int
    peak: float  # bytes above what was there before
    seconds: float

    def rank(self, room: float) -> tuple[float, float, float]:
        """The fastest that fits, of equals the smallest; where nothing fits, the smallest, then the fastest."""
        return (0.0, round(self.seconds, 7), self.peak) if self.peak <= room else (1.0, self.peak, self.seconds)


def _assignments(options: list[Option], layers: int) -> Iterator[list[Option]]:
    """Two modes, and a last layer that sends nothing: it would be asked for at once."""
    staying = [option for option in options if not option.sent]
    for place, small in enumerate(sorted(options, key=lambda option: option.held)):
        for large in sorted(options, key=lambda option: option.held)[place:]:
            for count in range(1, layers) if small is not large else (layers - 1,):
                rest = layers - 1 - count
                body = (
                    _mixed(small, count, large, rest) if small.sent and large.sent else [small] * count + [large] * rest
                )
                for last in staying:
                    yield [*body, last]


def _mixed(first: Option, count: int, second: Option, rest: int) -> list[Option]:
    """So many of each, evenly spread."""
    total = count + rest
    return [second if (place + 1) * rest // total > place * rest // total else first for place in range(total)]


def _peak(assignment: list[Option], measured: Measured, window: int) -> float:
    """Bytes at the highest, above what was there before the forward."""
    size, layers, everything = measured.input_bytes, len(assignment), sum(measured.kinds.values())
    sent = [option.sent for option in assignment]
    held = size if measured.first_input_stays and assignment[0].sent else 0.0
    # The backward of a layer was measured with all its activations and all inputs.
    backward = measured.backward_bytes - (layers - 1) * size - everything
    peak = 0.0
    for place, option in enumerate(assignment):
        leaving = sum(sent[max(place - window + 1, 0) : place])
        arriving = sent[place - 1] if place else 0.0
        peak = max(peak, held + leaving + option.alive, held + arriving + backward + option.alive)
        held += option.held
    return max(peak, measured.loss_bytes - layers * size + held + sum(sent[-window:]))


def _waits(assignment: list[Option], measured: Measured, window: int) -> float:
    """Seconds that the computing stream waits for copies."""
    if not measured.bandwidth:
        return 0.0
    layer, copies = measured.forward_seconds, [option.sent / measured.bandwidth for option in assignment]
    now = bus = 0.0
    done: list[float] = []  # when the copies of each layer are
    for place, copy in enumerate(copies):
        if place >= window:
            now = max(now, done[place - window])
        now += layer
        bus = max(bus, now) + copy
        done.append(bus)
    waited = max(now + measured.loss_seconds, bus) - layer * len(assignment) - measured.loss_seconds
    for place, option in enumerate(assignment[1:]):
        waited += max(copies[place] - _BACKWARD * layer - option.seconds, 0.0)
    return waited
