"""Planned checkpointing on whole models: measured, planned, planned again, and never another result."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from memory_cases import LAYERS, assert_same, batch, gradients, model_of, step
from memory_machines import Clockwork
from peft import LoraConfig, get_peft_model

from fastft import patch_model, report, unpatch_model
from fastft.errors import UnsupportedOptionError
from fastft.memory.activations import ActivationMemory, Budget
from fastft.memory.machine import MemoryState
from fastft.memory.plan import make_plan, name_of
from fastft.memory.schedule import KEEP, RECOMPUTE
from fastft.memory.tape import LEAN
from fastft.modules import checkpointing
from fastft.modules.state import state_of

GIB = 1 << 30


def planned(model, budget=None, clock=None, **options):
    """The model, patched, with a plan for a machine that the test makes up."""
    patch_model(model, **options)
    clock = clock or Clockwork()
    checkpointing.uninstall(model)
    memory = ActivationMemory(RECOMPUTE, clock.machine(), smallest=1, budget=Budget(budget))
    checkpointing.install(model, memory)
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            state.shared.memory = memory
    if budget is None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return memory, clock


def lora_pair(budget, clock=None, family="qwen3", **options):
    adapter = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    plain = get_peft_model(model_of(family), adapter).train()
    other = copy.deepcopy(plain)
    patch_model(plain, **options)
    plain.enable_input_require_grads()
    other.enable_input_require_grads()
    return plain, other, *planned(other, budget, clock, **options)


def measure(model, clock, static=0, plain=8 * GIB, steps=2):
    """The steps that are measured, told that each takes `plain` bytes."""
    for number in range(steps):
        clock.state = MemoryState(static, max(clock.state.peak, static))  # a peak only rises
        loss = model(**batch(seed=number)).loss
        clock.state = MemoryState(static, static + plain)
        loss.backward()
        gradients(model)


def modes(memory):
    return [name_of(mode) for mode in memory.plan.modes]


@pytest.mark.parametrize("budget", [None, 1, 100_000, 150_000, 200_000, 300_000, 500_000, 1 << 40, "auto"])
def test_results_do_not_depend_on_the_budget(budget):
    plain, other, memory, clock = lora_pair(budget)
    for number in range(5):
        clock.state = MemoryState(0, 100_000)
        assert_same(step(other, seed=number), step(plain, seed=number))
    assert len(memory.plan.modes) == LAYERS


def test_two_steps_are_measured_and_the_third_is_planned():
    _, model, memory, clock = lora_pair(1 << 40)
    assert memory.plan is None and report(model).memory is None
    measure(model, clock)
    assert memory.plan is None and report(model).counters["layer kept in part"] == 1  # the last layer, in the second
    step(model)
    assert modes(memory) == ["keep"] * LAYERS
    assert "memory plan: " in str(report(model)) and "layers 0-4" in str(report(model))


@pytest.mark.parametrize("gated_mlp", ["auto", False])
def test_what_is_measured(gated_mlp):
    _, model, memory, clock = lora_pair(1 << 40, gated_mlp=gated_mlp)
    measure(model, clock, static=GIB, plain=5 * GIB)
    step(model)
    found = memory.planner._measured
    width = 2 * 24 * 4  # bytes of one feature of all tokens
    config = model.config
    assert found.tokens == 48 and found.layers == LAYERS and found.input_bytes == width * config.hidden_size
    assert found.backward_bytes == 5 * GIB + found.input_bytes  # the input was there when the forward began
    assert found.forward_seconds == 1.0 and found.can_tell
    assert found.kinds["gate_up"] == 2 * width * config.intermediate_size
    assert found.kinds["residual"] == 2 * width * config.hidden_size
    assert {"norm", "gate_up"} <= found.again_seconds.keys()
    assert ("activation" in found.again_seconds) == (gated_mlp is False)


def test_times_are_those_of_the_loss_and_of_a_layer_that_runs_nothing_again():
    """Every mark is a second after the one before; the loss takes 50 more, and the backward of all layers 200."""
    _, model, memory, clock = lora_pair(1 << 40)
    measure(model, clock, steps=1)
    loss = model(**batch(seed=1)).loss
    clock.now += 50
    adapter = next(parameter for parameter in model.parameters() if parameter.requires_grad)

    def takes_time(_):
        clock.now += 200

    handle = adapter.register_post_accumulate_grad_hook(takes_time)
    loss.backward()
    handle.remove()
    gradients(model)
    step(model)
    found = memory.planner._measured
    again = sum(found.again_seconds.values())  # each with a mark before and one after
    assert found.forward_seconds == 1.0
    assert found.loss_seconds == 50 + 1 - 1  # the last layer, which was told, has no marks of its own
    assert found.backward_seconds == pytest.approx((200 + 1 + 2 * again - again - (LAYERS - 1)) / LAYERS)


def test_a_forward_without_backward_is_not_taken_for_a_step():
    _, model, memory, clock = lora_pair(1 << 40)
    for _ in range(4):
        model(**batch())
    assert memory.plan is None
    measure(model, clock)
    step(model)
    assert memory.plan is not None


def test_small_batches_send_nothing():
    _, model, memory, clock = lora_pair(1)
    measure(model, clock, plain=200_000)
    memory.planner._smallest = memory.planner._input_bytes
    step(model)
    assert any(option.sent for option in memory.plan.options.values())
    step(model, rows=1, length=20)
    assert not any(option.sent for option in memory.plan.options.values())


def test_an_input_that_autograd_holds_is_counted():
    peaks = []
    for lora in (True, False):
        model = model_of("qwen3")
        if lora:
            model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False)).train()
            model.enable_input_require_grads()
        memory, clock = planned(model, 1)  # the least that can be had
        measure(model, clock, plain=200_000)
        step(model)
        found = memory.planner._measured
        assert found.first_input_stays is lora
        as_if = make_plan(found._replace(first_input_stays=False), 0, found.tokens, 1)
        peaks.append(memory.plan.peak - as_if.peak)
    assert peaks[0] >= found.input_bytes * 0.9 and peaks[1] == 0


def test_by_default_the_budget_is_what_plain_checkpointing_takes():
    _, model, memory, clock = lora_pair(None)
    measure(model, clock, static=100, plain=300_000)
    clock.state = MemoryState(100, 300_100)
    step(model)
    assert 300_000 <= memory.plan.budget <= 1.13 * 300_100 and memory.plan.peak <= memory.plan.budget


def test_auto_is_most_of_what_is_free():
    _, model, memory, clock = lora_pair("auto", Clockwork(free=10_000_000))
    measure(model, clock, static=100)
    clock.state = MemoryState(100, 0)
    step(model)
    assert memory.plan.budget == pytest.approx(100 + 0.92 * 10_000_000)


def test_a_larger_batch_is_planned_anew_and_a_known_one_is_not():
    _, model, memory, clock = lora_pair(400_000, gated_mlp=False)
    measure(model, clock, plain=200_000)
    clock.state = MemoryState(0, 0)
    step(model)
    small = memory.plan
    step(model, rows=2, length=40)
    large = memory.plan
    assert large.peak > small.peak and large.modes != small.modes
    step(model)
    assert memory.plan is small


def test_plans_are_made_anew_when_other_things_take_more_memory():
    _, model, memory, clock = lora_pair(400_000)
    measure(model, clock, plain=200_000)
    clock.state = MemoryState(0, 0)
    step(model)
    before = memory.plan
    clock.state = MemoryState(250_000, 0)  # an optimizer's state
    step(model)
    assert memory.plan is not before and memory.plan.seconds > before.seconds


def test_running_out_of_memory_in_a_forward_is_survived_once_with_a_message(caplog):
    plain, model, memory, clock = lora_pair(1 << 40)
    measure(model, clock)
    layer = model.base_model.model.model.layers[2]
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def fail(*_):
        if failures:
            raise failures.pop()

    layer.mlp.register_forward_pre_hook(fail)
    with caplog.at_level(logging.WARNING, "fastft"):
        result = step(model, seed=7)
    assert_same(result, step(plain, seed=7))
    assert [record.getMessage() for record in caplog.records if "out of GPU memory" in record.getMessage()]
    assert report(model).counters["out of memory, planned anew"] == 1
    assert_same(step(model, seed=8), step(plain, seed=8))
    assert memory.plan.budget == pytest.approx(0.9 * 0.92 * (1 << 40))


def test_an_error_of_another_kind_is_not_caught():
    _, model, _, clock = lora_pair(1 << 40)
    measure(model, clock)
    model.base_model.model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)


def test_stock_layers_are_kept_or_run_again():
    model = model_of()
    plain = copy.deepcopy(model)
    clock = Clockwork()
    memory = ActivationMemory(RECOMPUTE, clock.machine(), smallest=1, budget=Budget(150_000))
    checkpointing.install(model, memory)
    measure(model, clock, plain=100_000)
    clock.state = MemoryState(0, 0)
    assert_same(step(model), step(plain))
    assert not any(isinstance(mode, type(LEAN)) for mode in memory.plan.modes)


def test_a_budget_switches_layers_on_and_unpatching_off_again():
    model = model_of()
    attributes = [set(module.__dict__) for module in model.modules()]
    patch_model(model, memory_budget="auto")
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    # A backbone with code of its own for checkpointing would be checkpointed without a plan.
    assert not model.model.gradient_checkpointing
    unpatch_model(model)
    assert [set(module.__dict__) for module in model.modules()] == attributes
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)


def test_the_callers_switch_wins_over_a_budget():
    model = model_of()
    patch_model(model, memory_budget="auto")
    model.gradient_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    model.gradient_checkpointing_enable()
    unpatch_model(model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_on_a_cpu_nothing_is_planned_and_the_report_says_so():
    model = model_of()
    patch_model(model, memory_budget=GIB)
    for _ in range(4):
        step(model)
    assert report(model).memory is None
    reason = "not planned: cpu: memory is planned on CUDA devices only"
    assert report(model).counters[reason] == 4 * LAYERS


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, "half"])
def test_bad_budgets_are_refused(budget):
    with pytest.raises(UnsupportedOptionError, match=r"memory_budget=.* is no option"):
        patch_model(model_of(), memory_budget=budget)


def test_a_budget_for_a_fixed_way_is_refused():
    with pytest.raises(UnsupportedOptionError, match="memory_budget needs checkpointing='auto'"):
        patch_model(model_of(), memory_budget=GIB, checkpointing="offload")


def test_everything_kept_is_no_checkpointing():
    _, model, memory, clock = lora_pair(1 << 40)
    measure(model, clock)
    runs = []
    model.base_model.model.model.layers[0].mlp.register_forward_hook(lambda *_: runs.append(1))
    step(model)
    assert set(memory.plan.modes) == {KEEP} and len(runs) == 1


def test_a_much_larger_batch_is_measured_itself():
    plain, model, memory, clock = lora_pair(400_000)
    measure(model, clock, plain=200_000)
    step(model)
    shape = {"rows": 8, "length": 40}
    for number in range(3):
        clock.state = MemoryState(0, clock.state.peak + 1_000_000)
        assert_same(step(model, seed=number, **shape), step(plain, seed=number, **shape))
    assert memory.planner._measured.tokens == 320


@pytest.mark.parametrize("budget", [None, 100_000, "auto"])
@pytest.mark.parametrize("length", [1, 5, 7])
def test_batches_of_a_few_tokens(length, budget):
    plain, model, memory, clock = lora_pair(budget)
    measure(model, clock, plain=200_000)
    for number in range(2):
        shape = {"rows": 1, "length": length + 1, "seed": number}
        assert_same(step(model, **shape), step(plain, **shape))
    assert memory.plan is not None


def test_a_plan_made_without_gradients_holds_with_them():
    _, model, memory, clock = lora_pair(800_000)
    measure(model, clock, plain=200_000)
    for static, length in ((0, 24), (250_000, 24), (0, 40), (250_000, 40)):
        clock.state = MemoryState(static, static)
        step(model, length=length)
        assert memory.planner._planned_static >= static - memory.planner._input_bytes


def test_a_budget_of_what_is_free_shrinks_with_it():
    _, model, memory, clock = lora_pair("auto", Clockwork(free=10_000_000))
    measure(model, clock, plain=200_000)
    step(model)
    before = memory.plan
    clock.free = 100_000  # another process has taken it
    step(model)
    assert memory.plan.budget < before.budget and memory.plan.modes != before.modes


def test_no_budget_is_larger_than_what_is_free():
    _, model, memory, clock = lora_pair(1 << 40, Clockwork(free=500_000))
    measure(model, clock, plain=200_000)
    clock.state = MemoryState(0, 0)
    step(model)
    assert memory.plan.budget == pytest.approx(0.92 * 500_000)


def test_running_out_of_memory_outside_of_the_layers_makes_the_next_plan_tighter():
    _, model, memory, clock = lora_pair(1 << 40)
    measure(model, clock)
    step(model)
    before = memory.plan.budget
    clock.state = clock.state._replace(ooms=1)
    step(model)
    assert memory.plan.budget == pytest.approx(0.9 * before)
    step(model)
    assert memory.plan.budget == pytest.approx(0.9 * before)


def test_running_out_of_memory_while_measuring_ends_planning(caplog):
    plain, model, memory, clock = lora_pair(1 << 40)
    measure(model, clock, steps=1)
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def fail(*_):
        if failures:
            raise failures.pop()

    model.base_model.model.model.layers[LAYERS - 1].mlp.register_forward_pre_hook(fail)
    for number in range(4):
        assert_same(step(model, seed=number), step(plain, seed=number))
    assert memory.planner.is_off and memory.plan is None and not failures
    assert len([record for record in caplog.records if "out of GPU memory" in record.getMessage()]) == 1


def test_a_head_that_trains_alone():
    model = model_of()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    planned(model, 1 << 40)
    for _ in range(4):
        model(**batch()).loss.backward()
        assert model.lm_head.weight.grad is not None
        model.zero_grad(set_to_none=True)


def test_a_copy_of_a_model_with_a_budget_can_be_unpatched():
    model = model_of()
    patch_model(model, memory_budget="auto")
    twin = copy.deepcopy(model)
    unpatch_model(twin)
    assert not any(layer.gradient_checkpointing for layer in twin.model.layers)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
