"""Which layers keep, make again, or send what: the fastest step that fits a budget.

    time     sum over layers of what is run again in backward, and what copies take beyond the forward they run beside
    memory   at the end of forward, when every layer's share is held beside the loss; and in the backward of each
             layer, when those after it have given theirs up and its own activations are all there

Layers are taken to be alike. The early ones hold less than the late ones: the late ones' share is free again by the
time an early one is run again, and copies of early layers have the whole forward to leave by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .tape import LEAN, THIN, Level, offloaded

RECOMPUTE, OFFLOAD, KEEP = "recompute", "offload", "keep"
# What becomes of a layer: one of these names, or what becomes of each kind.
Mode = Level | str

# Of the forward's time, what copies may fill before they are taken to delay it.
_COPY_SHARE = 0.9


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
    bandwidth: float  # bytes a second to the host; 0: nothing can leave
    can_tell: bool = True  # whether layers tell what they make


class Option(NamedTuple):
    """What one layer costs in one mode."""

    mode: Mode
    held: float  # bytes on the device between forward and backward
    sent: float  # bytes that leave
    seconds: float  # run again in backward


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What becomes of each layer, and what that is expected to take.

    Attributes:
        modes: of the layers, in order.
        peak: bytes expected at the highest.
        budget: bytes allowed.
        seconds: of a step, that are spent on running things again and on waiting for copies.
        options: the costs that the plan was made from, by the name of the mode.
        reason: in words.
    """

    modes: tuple[Mode, ...]
    peak: float
    budget: float
    seconds: float
    options: Mapping[str, Option]
    reason: str

    def rows(self) -> Iterator[tuple[str, str, Option]]:
        """(layers, mode, cost of one), neighbours of one mode together."""
        first = 0
        for place in range(1, len(self.modes) + 1):
            if place == len(self.modes) or self.modes[place] != self.modes[first]:
                name = name_of(self.modes[first])
                yield (f"{first}" if place - first == 1 else f"{first}-{place - 1}"), name, self.options[name]
                first = place


def name_of(mode: Mode) -> str:
    return mode.name if isinstance(mode, Level) else mode


def options_of(measured: Measured) -> list[Option]:
    """What a layer can do, with its costs."""
    kinds, again = measured.kinds, measured.again_seconds
    everything, size = sum(kinds.values()), measured.input_bytes
    options = [
        Option(KEEP, everything, 0.0, 0.0),
        Option(RECOMPUTE, size, 0.0, measured.forward_seconds),
    ]
    levels = [THIN, LEAN] if measured.can_tell else []
    if measured.bandwidth:
        options.append(Option(OFFLOAD, 0.0, size, measured.forward_seconds))
        levels += [offloaded(level) for level in levels]
    for level in levels:
        of = {"again": 0.0, "offload": 0.0, "keep": 0.0}
        for kind, count in kinds.items():
            of[level.actions.get(kind, "keep")] += count
        seconds = sum(again.get(kind, 0.0) for kind, action in level.actions.items() if action == "again")
        options.append(Option(level, of["keep"], of["offload"], seconds))
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
    best: tuple[tuple[float, float], list[Option], float, float] | None = None
    for assignment in _assignments(options_of(measured), measured.layers):
        peak = static + scale * _peak(assignment, measured)
        seconds = scale * _seconds(assignment, measured)
        # Of equals the smallest; where nothing fits, the smallest of all.
        rank = (seconds, peak) if peak <= budget else (float("inf"), peak)
        if best is None or rank < best[0]:
            best = (rank, assignment, peak, seconds)
    assert best is not None
    _, assignment, peak, seconds = best
    fits = peak <= budget
    reason = f"{tokens:,} tokens, {peak / 2**30:.2f} of {budget / 2**30:.2f} GiB expected" + (
        "" if fits else "; the least that can be had"
    )
    scaled = {
        name_of(option.mode): Option(
            option.mode, option.held * scale, option.sent * scale, option.seconds * scale
        )
        for option in options_of(measured)
    }  # fmt: skip
    return MemoryPlan(tuple(option.mode for option in assignment), peak, budget, seconds, scaled, reason)


def _assignments(options: list[Option], layers: int) -> Iterator[list[Option]]:
    """Two modes, the first for the early layers. The last layer sends nothing: it would be asked for at once."""
    staying = [option for option in options if not option.sent]
    for late in options:
        last = late if not late.sent else _twin(late, staying)
        for early in options:
            for count in range(layers) if early is not late else (0,):
                yield [early] * count + [late] * (layers - 1 - count) + [last]


def _twin(option: Option, staying: list[Option]) -> Option:
    """The mode that runs the same again and sends nothing."""
    return min(staying, key=lambda other: (abs(other.seconds - option.seconds), other.held))


def _peak(assignment: list[Option], measured: Measured) -> float:
    size, layers = measured.input_bytes, len(assignment)
    total = sum(option.held for option in assignment)
    peak = measured.loss_bytes - layers * size + total
    before = 0.0  # held by the layers before this one
    arriving = 0.0  # of the layer before
    for option in assignment:
        # Run again, or kept: in the backward of a layer its own activations are all there, as they were measured.
        peak = max(peak, measured.backward_bytes - (layers - 1) * size + before + arriving)
        before, arriving = before + option.held, option.sent
    return peak


def _seconds(assignment: list[Option], measured: Measured) -> float:
    seconds = sum(option.seconds for option in assignment)
    sent = sum(option.sent for option in assignment)
    if sent:
        forward = _COPY_SHARE * measured.forward_seconds * len(assignment)
        seconds += 2 * max(sent / measured.bandwidth - forward, 0.0)
    return seconds
