"""Which layers keep, make again, or send what: the fastest step that fits a budget.

Layers are taken to be alike. Simple assignments are tried first; the best of them is then bettered layer by layer, as
long as that makes the step faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .schedule import KEEP, OFFLOAD, RECOMPUTE, Measured, Mode, Option, Schedule, schedule
from .tape import ALL_SENT, LEAN, LEAN_SENT, THIN, THIN_SENT, Level

# By how much a change must better a step: less is not worth a less regular plan.
_WORTH_SECONDS = 1e-4
_ROUNDS = 24  # of bettering, at most


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What becomes of each layer, and what that is expected to take.

    Attributes:
        modes: of the layers, in order.
        peak: bytes expected at the highest.
        budget: bytes allowed.
        seconds: of a step, that are spent on running things again and on waiting for copies.
        leaving: bytes that may be on their way out when each layer begins, and when the loss does.
        arriving: bytes that earlier layers sent which may be on their way back while each layer is in backward.
        options: the costs that the plan was made from, by the name of the mode.
        reason: in words.
        measured: what it was made from.
    """

    modes: tuple[Mode, ...]
    peak: float
    budget: float
    seconds: float
    leaving: tuple[float, ...]
    arriving: tuple[float, ...]
    options: Mapping[str, Option]
    reason: str
    measured: Measured

    def rows(self) -> Iterator[tuple[str, str, Option]]:
        """(layers, mode, cost of one), those of one mode together."""
        names = [name_of(mode) for mode in self.modes]
        for name in dict.fromkeys(names):
            runs: list[list[int]] = []  # first and last
            for place in (place for place, other in enumerate(names) if other == name):
                if runs and runs[-1][1] == place - 1:
                    runs[-1][1] = place
                else:
                    runs.append([place, place])
            ranges = (f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
            yield ", ".join(ranges), name, self.options[name]

    def __str__(self) -> str:
        lines = [f"memory plan: {self.reason}; {self.seconds * 1e3:.0f} ms of a step run again or waited for"]
        for layers, mode, cost in self.rows():
            held, sent = cost.held / 2**20, cost.sent / 2**20
            lines.append(
                f"  layers {layers}: {mode}; each holds {held:,.0f} MiB, sends {sent:,.0f} MiB, runs "
                f"{cost.seconds * 1e3:.1f} ms again"
            )
        return "\n".join(lines)


def name_of(mode: Mode) -> str:
    return mode.name if isinstance(mode, Level) else mode


def options_of(measured: Measured) -> list[Option]:
    """What a layer can do, with its costs."""
    kinds, again = measured.kinds, measured.again_seconds
    everything, size, passing = measured.saved_bytes, measured.input_bytes, measured.passing_bytes
    # A checkpointed layer saves nothing while it runs.
    forgetful = min(everything + passing, max(measured.beside_inputs, 0.0) + size)
    options = [
        # With all that is saved, what passes is there, or what the last product makes and its sum with the residual.
        Option(KEEP, everything, 0.0, 0.0, everything + max(2 * size, passing), everything),
        Option(RECOMPUTE, size, 0.0, measured.forward_seconds, forgetful, everything),
    ]
    levels = [THIN, LEAN] if measured.can_tell else []
    if measured.bandwidth:
        options.append(Option(OFFLOAD, 0.0, size, measured.forward_seconds, forgetful, everything))
        levels += [THIN_SENT, LEAN_SENT, ALL_SENT] if levels else []
    # When the gradients of the largest products are there, attention has made nothing again yet.
    alive = everything - kinds.get("rotated", 0.0) - kinds.get("norm", 0.0) / 2
    for level in levels:
        of = {"again": 0.0, "offload": 0.0, "keep": 0.0}
        for kind, count in kinds.items():
            of[level.actions.get(kind, "keep")] += count
        seconds = sum(again.get(kind, 0.0) for kind, action in level.actions.items() if action == "again")
        options.append(Option(level, of["keep"], of["offload"], seconds, everything + passing, alive))
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
    best = _search(measured, room)
    peak, seconds = static + scale * best.schedule.peak, scale * best.seconds
    reason = f"{tokens:,} tokens, {peak / 2**30:.2f} of {budget / 2**30:.2f} GiB expected" + (
        "" if best.schedule.least <= room else "; the least that can be had"
    )
    options = options_of(measured)
    scaled = {name_of(mode): Option(mode, *(scale * cost for cost in costs)) for mode, *costs in options}
    return MemoryPlan(
        modes=tuple(option.mode for option in best.assignment),
        peak=peak,
        budget=budget,
        seconds=seconds,
        leaving=tuple(scale * most for most in best.schedule.leaving),
        arriving=tuple(scale * most for most in best.schedule.arriving),
        options=scaled,
        reason=reason,
        measured=measured,
    )


class _Candidate(NamedTuple):
    assignment: tuple[Option, ...]
    schedule: Schedule
    seconds: float  # run again and waited for

    def rank(self, room: float) -> tuple[float, float, float]:
        """The fastest that fits, of equals the smallest; where nothing fits, the smallest, then the fastest."""
        if self.schedule.least <= room:
            return 0.0, round(self.seconds, 7), self.schedule.peak
        return 1.0, self.schedule.least, self.seconds


def _search(measured: Measured, room: float) -> _Candidate:
    options = options_of(measured)
    best: _Candidate | None = None
    for assignment in _assignments(options, measured.layers):
        again = sum(option.seconds for option in assignment)
        if best is None or best.schedule.least > room or again <= best.seconds:  # before anything is waited for
            best = _better(best, assignment, measured, room)
    assert best is not None
    for _ in range(_ROUNDS):
        before = best
        for assignment in _neighbours(before.assignment, options):
            best = _better(best, assignment, measured, room)
        if best is before:
            return best
        if before.schedule.least <= room and before.seconds - best.seconds < _WORTH_SECONDS:
            return before
    return best


def _better(best: _Candidate | None, assignment: tuple[Option, ...], measured: Measured, room: float) -> _Candidate:
    found = schedule(assignment, measured, room)
    seconds = sum(option.seconds for option in assignment) + found.waited
    candidate = _Candidate(assignment, found, seconds)
    return candidate if best is None or candidate.rank(room) < best.rank(room) else best


def _assignments(options: list[Option], layers: int) -> Iterator[tuple[Option, ...]]:
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
                    yield (*body, last)


def _mixed(first: Option, count: int, second: Option, rest: int) -> list[Option]:
    """So many of each, evenly spread: the bus is busy all the time."""
    total = count + rest
    return [second if (place + 1) * rest // total > place * rest // total else first for place in range(total)]


def _neighbours(assignment: tuple[Option, ...], options: list[Option]) -> Iterator[tuple[Option, ...]]:
    """One layer in another mode, or two that change places; the last layer sends nothing."""
    last = len(assignment) - 1
    for place, present in enumerate(assignment):
        for option in options:
            if option is not present and not (place == last and option.sent):
                yield (*assignment[:place], option, *assignment[place + 1 :])
    for place in range(last - 1):
        first, second = assignment[place : place + 2]
        if first is not second:
            yield (*assignment[:place], second, first, *assignment[place + 2 :])
