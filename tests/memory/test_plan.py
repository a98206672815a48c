"""The plan: the fastest assignment within a budget, by costs that are given."""

from __future__ import annotations

import itertools
import time

import pytest

from fastft.memory.plan import _assignments, _mixed, make_plan, name_of, options_of
from fastft.memory.schedule import KEEP, OFFLOAD, RECOMPUTE, Measured, schedule

MIB = 2.0**20
# A layer of Qwen3-8B, LoRA, 16,384 tokens, roughly.
KINDS = {
    "residual": 256 * MIB, "norm": 256 * MIB, "qkv": 192 * MIB, "rotated": 160 * MIB, "attention": 128 * MIB,
    "gate_up": 768 * MIB, "activation": 768 * MIB, "untold": 8 * MIB,
}  # fmt: skip
AGAIN = {"norm": 0.0002, "activation": 0.0007, "rotated": 0.0001, "gate_up": 0.0054}
STATIC = 5600 * MIB


def measured(**changes):
    known = {
        "tokens": 16384, "layers": 8, "input_bytes": 128 * MIB, "kinds": KINDS, "again_seconds": AGAIN,
        "forward_seconds": 0.0137, "backward_seconds": 0.0185, "loss_bytes": 3000 * MIB,
        "backward_bytes": 8 * 128 * MIB + 3100 * MIB, "loss_seconds": 0.04, "bandwidth": 52e9,
    }  # fmt: skip
    return Measured(**{**known, **changes})


def plain_of(case):
    return max(case.loss_bytes, case.backward_bytes)


def test_with_all_the_memory_there_is_everything_is_kept():
    plan = make_plan(measured(), 0, 16384, 1e12)
    assert set(plan.modes) == {KEEP} and plan.seconds < 1e-9


def test_within_the_memory_of_plain_checkpointing_it_is_faster_than_plain_checkpointing():
    case = measured()
    plan = make_plan(case, STATIC, 16384, STATIC + plain_of(case))
    print(plan)
    assert plan.peak <= STATIC + plain_of(case)
    assert plan.seconds < 0.6 * 8 * case.forward_seconds


def test_where_nothing_fits_it_is_the_smallest_there_is_and_says_so():
    plan = make_plan(measured(), STATIC, 16384, STATIC)
    assert "the least that can be had" in plan.reason
    assert plan.peak < STATIC + plain_of(measured())


def test_a_smaller_budget_is_never_faster_nor_exceeded():
    case = measured()
    before = 0.0
    for budget in [20e9, 15e9, 10e9, 8e9, 6e9, 5e9, 4.5e9, 4e9]:
        plan = make_plan(case, 0, 16384, budget)
        assert plan.seconds >= before - 1e-12
        assert plan.peak <= budget or "the least" in plan.reason
        before = plan.seconds


def test_without_a_way_to_the_host_nothing_is_sent():
    for budget in (20e9, 5e9, 1e9):
        plan = make_plan(measured(bandwidth=0.0), 0, 16384, budget)
        assert not any(plan.options[name].sent for _, name, _ in plan.rows())
        assert OFFLOAD not in plan.modes


def test_layers_that_tell_nothing_are_kept_or_run_again_whole():
    plan = make_plan(measured(can_tell=False, again_seconds={}), STATIC, 16384, STATIC + 6e9)
    assert set(plan.modes) <= {KEEP, RECOMPUTE, OFFLOAD} and len(set(plan.modes)) > 1


def test_a_slow_bus_is_not_waited_for():
    fast = make_plan(measured(), STATIC, 16384, STATIC + plain_of(measured()))
    slow = make_plan(measured(bandwidth=1e9), STATIC, 16384, STATIC + plain_of(measured()))
    assert sum(slow.options[name].sent for _, name, _ in slow.rows()) < sum(
        fast.options[name].sent for _, name, _ in fast.rows()
    )


def test_the_last_layer_sends_nothing():
    for assignment in _assignments(options_of(measured()), 8):
        assert len(assignment) == 8 and not assignment[-1].sent


def test_tokens_scale_the_costs():
    half = make_plan(measured(), 0, 8192, 1e12)
    whole = make_plan(measured(), 0, 16384, 1e12)
    assert half.peak == pytest.approx(whole.peak / 2)
    assert half.options["thin"].held == pytest.approx(whole.options["thin"].held / 2)


def test_levels_divide_a_layers_bytes_among_device_host_and_nothing():
    options = {name_of(option.mode): option for option in options_of(measured())}
    everything = sum(KINDS.values())
    assert options["thin"].held == everything - KINDS["norm"] - KINDS["activation"] - KINDS["rotated"]
    assert options["lean"].held == options["thin"].held - KINDS["gate_up"]
    sent = options["lean, sent"].sent
    assert sent == KINDS["residual"] + KINDS["qkv"] + KINDS["attention"]
    assert options["lean, sent"].held == options["lean"].held - sent == KINDS["untold"]
    assert options["thin, all sent"].sent == sent + KINDS["gate_up"]
    assert options["lean"].seconds == pytest.approx(sum(AGAIN.values()))


@pytest.mark.parametrize("budget", [3e9, 4e9, 5e9, 6e9, 8e9, 10e9])
@pytest.mark.parametrize("bandwidth", [52e9, 12e9])
def test_the_search_comes_close_to_what_trying_everything_finds(budget, bandwidth):
    """For few layers, among all assignments."""
    case = measured(layers=4, backward_bytes=4 * 128 * MIB + 3100 * MIB, bandwidth=bandwidth)
    fitting = []
    for assignment in itertools.product(options_of(case), repeat=4):
        found = schedule(assignment, case, budget)
        if not assignment[-1].sent and found.least <= budget:
            fitting.append(sum(option.seconds for option in assignment) + found.waited)
    plan = make_plan(case, 0, 16384, budget)
    assert ("the least" not in plan.reason) == bool(fitting)
    assert not fitting or plan.seconds <= min(fitting) + 0.05 * 4 * case.forward_seconds


def test_two_kinds_of_layers_that_send_take_turns():
    first, second, *_ = options_of(measured())
    assert _mixed(first, 2, second, 2) == [first, second, first, second]
    assert _mixed(first, 4, second, 1).count(second) == 1 and len(_mixed(first, 0, second, 3)) == 3


def bus_case(sent, **changes):
    """A layer's forward, the loss and a byte on the bus take a second each, a layer's backward takes two. A layer has a
    byte of its own while it runs, and holds nothing."""
    light = options_of(measured())[0]._replace(mode="sent", held=0.0, seconds=0.0, running=1.0, alive=1.0)
    assignment = [light._replace(sent=float(count)) for count in sent]
    found = measured(
        layers=len(sent), input_bytes=0.0, kinds={"untold": 1.0}, forward_seconds=1.0, backward_seconds=2.0,
        loss_seconds=1.0, loss_bytes=1.0, backward_bytes=1.0, bandwidth=1.0,
    )  # fmt: skip
    return assignment, found._replace(**changes)


def test_copies_that_have_time_are_not_waited_for():
    found = schedule(*bus_case([1, 1, 1, 0], loss_seconds=3.0), 3.0)
    assert found.waited == pytest.approx(0.0) and found.least == 1.0 and found.peak == 3.0
    assert found.leaving == (2.0,) * 5 and found.arriving == (0.0, 1.0, 2.0, 2.0)


def test_copies_are_waited_for_where_they_take_more_room_than_there_is():
    # Copies of two bytes are done at 2.4, 4.4 and 6.4. With room for three bytes, the last layer begins when three of
    # six have left, at 3.4.
    found = schedule(*bus_case([2, 2, 2, 0], loss_seconds=9.0), 4.0)
    assert found.waited == pytest.approx(0.4) and found.leaving == (3.0,) * 5
    # With room for two, the third layer begins when two have left, at 2.4, and the last when four have, at 4.4.
    assert schedule(*bus_case([2, 2, 2, 0], loss_seconds=9.0), 3.0).waited == pytest.approx(0.4 + 1.0)


def test_backward_waits_for_what_has_not_left_and_for_what_has_not_come_back():
    # All that is sent fits, so that forward waits for nothing. The copies are done at 6.4, backward begins at 5.
    assignment, case = bus_case([2, 2, 2, 0])
    assert schedule(assignment, case, 100.0).waited == pytest.approx(1.4)
    # Four bytes take four seconds to come back: the layer after hides two, and half of the layer's own backward one.
    assignment, case = bus_case([0, 4, 0], loss_seconds=100.0)
    assert schedule(assignment, case, 5.0).waited == pytest.approx(4 - 2 - 1)
    # With room for three of them the fourth starts when the third is there, which is in time; but the last layer's
    # forward begins when one has left, at 2.4.
    assert schedule(assignment, case, 4.0).waited == pytest.approx(4 - 2 - 1 + 0.4)
    # With room for one the others start with their own layer; the last layer's forward begins when three have left.
    assert schedule(assignment, case, 2.0).waited == pytest.approx(3 - 1 + 2.4)


def test_late_layers_hold_beside_the_loss_and_early_ones_hold_beside_them():
    assignment, case = bus_case([0, 0], loss_bytes=5.0, backward_bytes=3.0)
    assignment = [option._replace(held=10.0) for option in assignment]
    found = schedule(assignment, case, 30.0)
    assert found.least == found.peak == 25.0
    assert found.leaving == (29.0, 19.0, 5.0) and found.arriving == (0.0, 0.0)  # nothing was sent


def test_what_is_back_for_one_layer_leaves_room_for_the_next():
    assignment, case = bus_case([1, 1, 1, 0])
    # The first layer needs more than the others, so that no more may be back before it than it has sent.
    assignment[1] = assignment[1]._replace(alive=6.0)
    assert schedule(assignment, case, 6.5).arriving == (0.0, 0.5, 1.5, 2.5)


def test_rows_put_the_layers_of_one_mode_together():
    plan = make_plan(measured(), STATIC, 16384, STATIC + plain_of(measured()))
    named = [name_of(mode) for mode in plan.modes]
    seen = {}
    for layers, name, _ in plan.rows():
        for part in layers.split(", "):
            first, _, last = part.partition("-")
            seen.update(dict.fromkeys(range(int(first), int(last or first) + 1), name))
    assert [seen[place] for place in range(8)] == named and len(set(named)) > 1
    assert len(list(plan.rows())) == len(set(named))


def test_a_plan_of_many_layers_is_made_quickly():
    start = time.perf_counter()
    make_plan(measured(layers=64, backward_bytes=64 * 128 * MIB + 3100 * MIB), STATIC, 16384, STATIC + 16e9)
    assert time.perf_counter() - start < 5
