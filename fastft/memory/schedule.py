"""What an assignment of modes to layers takes: bytes at the highest, and the time that is waited for copies.

    forward    before a layer, the computing stream waits until no more bytes are leaving than there is room for beside
               what is held and what the layer itself makes; before the loss likewise
    backward   while a layer runs, what earlier ones sent comes back, as far as there is room for it

Early layers hold less than late ones: the late ones' share is free again by the time an early one is run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .tape import Level

RECOMPUTE, OFFLOAD, KEEP = "recompute", "offload", "keep"
# What becomes of a layer: one of these names, or what becomes of each kind.
Mode = Level | str

# Of a layer's forward, until half of what it sends is made.
_UNTIL_SENT = 0.4
# Of a layer's backward, until it needs the last of what it sent.
_UNTIL_NEEDED = 0.5


class Measured(NamedTuple):
    """One model's step, measured. Bytes and seconds are of `tokens` tokens."""

    tokens: int
    layers: int
    input_bytes: float  # of one layer's input
    kinds: Mapping[str, float]  # bytes that one layer saves for backward, by kind
    again_seconds: Mapping[str, float]  # to make a layer's tensors of a kind again
    forward_seconds: float  # of one layer
    backward_seconds: float  # of one layer that runs nothing again
    loss_bytes: float  # above what was there before the forward, at the highest until backward begins
    backward_bytes: float  # the same in backward; both with checkpointing of every layer
    loss_seconds: float  # between the forward of the last layer and its backward
    bandwidth: float  # bytes a second to the host; 0: nothing can leave
    can_tell: bool = True  # whether layers tell what they make
    first_input_stays: bool = False  # held by autograd itself
    passing_bytes: float = 0.0  # of the largest tensor in a layer's forward that is made beside what it saves

    @property
    def saved_bytes(self) -> float:
        """That one layer saves if everything is kept."""
        return sum(self.kinds.values())

    @property
    def beside_inputs(self) -> float:
        """Bytes at the highest until backward begins, beside the layers' inputs."""
        return self.loss_bytes - self.layers * self.input_bytes


class Option(NamedTuple):
    """What one layer costs in one mode."""

    mode: Mode
    held: float  # bytes on the device between forward and backward
    sent: float  # bytes that leave
    seconds: float  # run again in backward
    running: float  # bytes of its activations that are there at a time in its forward
    alive: float  # and in its backward


class Schedule(NamedTuple):
    """When tensors leave and come back, and what that takes. Bytes are above what was there before the forward."""

    least: float  # bytes at the highest if every copy were waited for
    peak: float  # bytes at the highest
    waited: float  # seconds
    leaving: tuple[float, ...]  # bytes that may be leaving when each layer begins, and when the loss does
    arriving: tuple[float, ...]  # bytes of earlier layers that may come back while each layer is in backward


def schedule(assignment: Sequence[Option], measured: Measured, room: float) -> Schedule:
    """Lets as much be under way as there is room for.

    Args:
        assignment: one option for each layer.
        measured: the step.
        room: bytes above what was there before the forward.
    """
    beside = measured.backward_bytes - (measured.layers - 1) * measured.input_bytes - measured.saved_bytes
    held = measured.input_bytes if measured.first_input_stays and assignment[0].sent else 0.0
    needs: list[float] = []  # when each layer begins and when the loss does, without what is leaving
    returns: list[float] = []  # in the backward of each layer, without what is coming back
    for option in assignment:
        needs.append(held + option.running)
        returns.append(held + beside + option.alive)
        held += option.held
    needs.append(held + measured.beside_inputs)
    least = max(*needs, *returns)
    leaving = [max(room - need, 0.0) for need in needs]
    for option, need in zip(reversed(assignment), reversed(returns), strict=True):
        if option.mode not in (KEEP, RECOMPUTE):
            break
        leaving[-1] = min(leaving[-1], max(room - need, 0.0))  # nobody gives it up before that layer's backward is over
    peak = least
    arriving: list[float] = []
    ahead = 0.0  # what is back for one layer is there still for the next
    for option, need in zip(assignment, returns, strict=True):
        ahead = min(max(room - need, 0.0), ahead)
        arriving.append(ahead)
        peak = max(peak, need + ahead)
        ahead += option.sent
    sent = 0.0
    for place, need in enumerate(needs):
        peak = max(peak, need + min(sent, leaving[place]))
        sent += assignment[place].sent if place < len(assignment) else 0.0
    waited = 0.0
    if measured.bandwidth and sent:
        waited, backlog = _waits_forward(assignment, measured, leaving)
        waited += _waits_backward(assignment, measured, arriving, backlog)
    return Schedule(least, peak, waited, tuple(leaving), tuple(arriving))


def _waits_forward(assignment: Sequence[Option], measured: Measured, leaving: Sequence[float]) -> tuple[float, float]:
    """Seconds waited before the loss, and for how long copies go on after the loss."""
    layer = measured.forward_seconds
    copies: list[tuple[float, float]] = []  # (bytes sent up to here, when they have left)
    now = bus = sent = 0.0
    for option, most in zip(assignment, leaving, strict=False):
        now = max(now, _done(copies, sent - most, measured.bandwidth))
        if option.sent:
            sent += option.sent
            bus = max(bus, now + _UNTIL_SENT * layer) + option.sent / measured.bandwidth
            copies.append((sent, bus))
        now += layer
    now = max(now, _done(copies, sent - leaving[-1], measured.bandwidth))
    return now - layer * len(assignment), max(bus - now - measured.loss_seconds, 0.0)


def _done(copies: Sequence[tuple[float, float]], count: float, bandwidth: float) -> float:
    """When the first `count` bytes have been copied."""
    for copied, done in copies:
        if copied >= count > 0:
            return done - (copied - count) / bandwidth
    return 0.0


def _waits_backward(
    assignment: Sequence[Option], measured: Measured, arriving: Sequence[float], backlog: float
) -> float:
    """Seconds that layers wait for what is leaving still and for what they sent."""
    now = bus = waited = backlog  # the first layer takes the memory of what is leaving still
    copies: list[tuple[float, float]] = []  # (bytes asked for up to here, when they have come)
    needed = asked = 0.0  # bytes, from the last layer on
    for option, ahead in zip(reversed(assignment), reversed(arriving), strict=True):
        needed += option.sent
        if option.mode not in (KEEP, RECOMPUTE):  # those ask for nothing
            for wanted in (needed, needed + ahead):
                if wanted > asked:
                    bus = max(bus, now) + (wanted - asked) / measured.bandwidth
                    asked = wanted
                    copies.append((asked, bus))
        takes = measured.backward_seconds + option.seconds
        come = _done(copies, needed, measured.bandwidth) if option.sent else 0.0
        end = max(now + takes, come + (1 - _UNTIL_NEEDED) * takes)
        waited += end - now - takes
        now = end
    return waited
