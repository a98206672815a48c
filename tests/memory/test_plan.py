"""The plan: the fastest assignment within a budget, by costs that are given."""

from __future__ import annotations

import itertools
import time

import pytest

from fastft.memory.plan import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    Measured,
    _assignments,
    _mixed,
    _peak,
    _waits,
    make_plan,
    name_of,
    options_of,
)  # fmt: skip

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
        "forward_seconds": 0.0137, "loss_bytes": 3000 * MIB, "backward_bytes": 8 * 128 * MIB + 3100 * MIB,
        "loss_seconds": 0.04, "bandwidth": 52e9,
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


def test_the_search_comes_close_to_what_trying_everything_finds():
    """For few layers, among all assignments and windows."""
    case = measured(layers=4)
    options = options_of(case)
    for budget in (3e9, 4e9, 5e9, 6e9, 8e9):
        fitting = [
            sum(option.seconds for option in assignment) + _waits(list(assignment), case, window)
            for assignment in itertools.product(options, repeat=4)
            for window in (2, 3)
            if not assignment[-1].sent and _peak(list(assignment), case, window) <= budget
        ]
        plan = make_plan(case, 0, 16384, budget)
        if fitting:
            assert plan.seconds <= min(fitting) + 0.15 * 4 * case.forward_seconds


def test_two_kinds_of_layers_that_send_take_turns():
    first, second, *_ = options_of(measured())
    assert _mixed(first, 2, second, 2) == [first, second, first, second]
    assert _mixed(first, 4, second, 1).count(second) == 1 and len(_mixed(first, 0, second, 3)) == 3


def test_waiting_for_copies():
    case = measured(forward_seconds=1.0, loss_seconds=1.0, bandwidth=1.0)
    light = options_of(case)[0]._replace(sent=1.0)
    heavy, last = light._replace(sent=2.0), light._replace(sent=0.0)
    assert _waits([light] * 3 + [last], case, 2) == 0
    # Copies are done 3, 5 and 7 after the beginning; the last layer waits for the second, backward for the third, and
    # the backward of each layer takes 1.5 while 2 arrive.
    assert _waits([heavy] * 3 + [last], case, 2) == pytest.approx(2.0 + 3 * 0.5)
    assert _waits([heavy] * 3 + [last], case, 4) == pytest.approx(2.0 + 3 * 0.5)


def test_a_plan_of_many_layers_is_made_quickly():
    start = time.perf_counter()
    make_plan(measured(layers=64, backward_bytes=64 * 128 * MIB + 3100 * MIB), STATIC, 16384, STATIC + 16e9)
    assert time.perf_counter() - start < 5
