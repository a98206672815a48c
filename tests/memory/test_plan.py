"""The plan: the fastest assignment within a budget, by costs that are given."""

from __future__ import annotations

import itertools

import pytest

from fastft.memory.plan import KEEP, OFFLOAD, RECOMPUTE, Measured, _assignments, _peak, _seconds, make_plan, options_of
from fastft.memory.tape import LEAN, THIN, offloaded

MIB = 2.0**20
# A layer of Qwen3-8B, LoRA, 16,384 tokens, roughly.
KINDS = {
    "residual": 256 * MIB, "norm": 256 * MIB, "qkv": 160 * MIB, "attention input": 200 * MIB, "attention": 130 * MIB,
    "gate_up": 768 * MIB, "activation": 768 * MIB, "untold": 8 * MIB,
}  # fmt: skip
AGAIN = {"norm": 0.0002, "activation": 0.0012, "gate_up": 0.0055, "qkv": 0.0015}
PLAIN = 2000 * MIB


def measured(**changes):
    known = {
        "tokens": 16384, "layers": 8, "input_bytes": 128 * MIB, "kinds": KINDS, "again_seconds": AGAIN,
        "forward_seconds": 0.013, "loss_bytes": 1500 * MIB, "backward_bytes": 8 * 128 * MIB + 3000 * MIB,
        "bandwidth": 50e9,
    }  # fmt: skip
    return Measured(**{**known, **changes})


def plain_of(case):
    return max(case.loss_bytes, case.backward_bytes)


def test_with_all_the_memory_there_is_everything_is_kept():
    plan = make_plan(measured(), 0, 16384, 1e12)
    assert set(plan.modes) == {KEEP} and plan.seconds == 0


def test_within_the_memory_of_plain_checkpointing_it_is_faster_than_plain_checkpointing():
    case = measured()
    plan = make_plan(case, PLAIN, 16384, PLAIN + plain_of(case))
    assert plan.peak <= PLAIN + plain_of(case)
    assert plan.seconds < 0.6 * 8 * case.forward_seconds


def test_where_nothing_fits_it_is_the_smallest_there_is_and_says_so():
    plan = make_plan(measured(), PLAIN, 16384, PLAIN)
    assert "the least that can be had" in plan.reason
    assert plan.peak < PLAIN + plain_of(measured())


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
    plan = make_plan(measured(can_tell=False, again_seconds={}), PLAIN, 16384, PLAIN + 6e9)
    assert set(plan.modes) <= {KEEP, RECOMPUTE, OFFLOAD} and len(set(plan.modes)) > 1


def test_a_slow_bus_is_not_waited_for():
    fast = make_plan(measured(), PLAIN, 16384, PLAIN + plain_of(measured()))
    slow = make_plan(measured(bandwidth=1e9), PLAIN, 16384, PLAIN + plain_of(measured()))
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
    options = {getattr(option.mode, "name", option.mode): option for option in options_of(measured())}
    everything = sum(KINDS.values())
    assert options["thin"].held == everything - KINDS["norm"] - KINDS["activation"]
    assert options["lean"].held == options["thin"].held - KINDS["gate_up"] - KINDS["qkv"]
    sent = options["lean, offloaded"].sent
    assert sent == KINDS["residual"] + KINDS["attention input"] + KINDS["attention"]
    assert options["lean, offloaded"].held == pytest.approx(options["lean"].held - sent)
    assert options["lean"].seconds == pytest.approx(sum(AGAIN.values()))


def test_the_search_finds_what_trying_everything_finds():
    """For few layers, among all assignments whose last layer sends nothing, early ones first."""
    case = measured(layers=3)
    options = options_of(case)
    for budget in (3e9, 4e9, 5e9, 6e9, 8e9):
        fitting = [
            _seconds(list(assignment), case)
            for assignment in itertools.product(options, repeat=3)
            if not assignment[-1].sent and _peak(list(assignment), case) <= budget
        ]
        plan = make_plan(case, 0, 16384, budget)
        if fitting:
            assert plan.seconds <= min(fitting) * 1.35 + 1e-9


def test_levels_of_a_plan_are_those_that_layers_run():
    names = {getattr(option.mode, "name", "") for option in options_of(measured())}
    assert {level.name for level in (THIN, LEAN, offloaded(THIN), offloaded(LEAN))} <= names
