"""A step that follows a plan takes no more memory than the plan was given, counted storage by storage on a CPU."""

from __future__ import annotations

import pytest
import torch
from memory_machines import EarlyLane, Pins
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from fastft import patch_model
from fastft.bench.meters import StorageMeter
from fastft.capability import Verdict
from fastft.memory.activations import ActivationMemory, Budget
from fastft.memory.machine import Machine, MemoryState
from fastft.memory.plan import make_plan
from fastft.memory.schedule import KEEP, OFFLOAD, RECOMPUTE
from fastft.modules import attention, checkpointing
from fastft.modules.state import state_of

TOKENS, HIDDEN, LAYERS = 512, 128, 6
INPUT = TOKENS * HIDDEN * 4  # bytes


class SavesLikeFlashAttention(torch.autograd.Function):
    """q, k, v and the output, where attention on a CPU saves more. What it computes does not matter."""

    @staticmethod
    def forward(ctx, q, k, v):
        output = q + v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        ctx.save_for_backward(q, k, v, output)
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _ = ctx.saved_tensors
        return grad + q, k + v, v.clone()


class Counted:
    """A machine that counts storages as the device's memory; every mark is a second after the one before."""

    def __init__(self, model):
        self.meter = StorageMeter([*model.parameters(), *model.buffers()])
        self.host_bytes = lambda: 0
        self.peak = self.now = 0
        self.seconds = 0.0

    def machine(self):
        able = Verdict(True, "a test")
        return Machine(
            lambda _: EarlyLane(), Pins(), lambda _: able, lambda _: able, lambda _: self.state(), lambda _: 1 << 40,
            self.mark, lambda first, last: last - first, lambda _: 4.0 * INPUT,
        )  # fmt: skip

    def mark(self, _):
        self.seconds += 1.0
        return self.seconds

    def state(self):
        held, host = self.meter.read(), self.host_bytes()
        self.peak = max(self.peak, held.peak - host)
        return MemoryState(held.now - host, self.peak)


def counted_model(gated_mlp):
    """Weights are small beside activations, whose proportions are those of Qwen3-8B."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, vocab_size=64,
    )  # fmt: skip
    model = get_peft_model(Qwen3ForCausalLM(config), LoraConfig(r=1, target_modules="all-linear")).train()
    model.enable_input_require_grads()
    patch_model(model, gated_mlp=gated_mlp)
    checkpointing.uninstall(model)
    counted = Counted(model)
    memory = ActivationMemory(RECOMPUTE, counted.machine(), smallest=1, budget=Budget(None))
    counted.host_bytes = lambda: memory.host_bytes
    checkpointing.install(model, memory)
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            state.shared.memory = memory
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, memory, counted


def step(model, counted):
    """Bytes at the highest."""
    ids, positions = torch.arange(TOKENS)[None] % 64, torch.arange(TOKENS)[None]
    counted.state()
    counted.peak = 0
    output = model.base_model.model.model(input_ids=ids, position_ids=positions, use_cache=False)
    loss = output.last_hidden_state.float().square().mean()
    del output
    loss.backward()
    model.zero_grad(set_to_none=True)
    return counted.state().peak


@pytest.fixture(scope="module", params=["auto", False], ids=["", "stock MLP"])
def measured(request):
    """What two steps tell of the model, and the least and the most memory that a step takes."""
    patch = pytest.MonkeyPatch()
    patch.setattr(attention, "varlen_attention", lambda q, k, v, *_, **__: SavesLikeFlashAttention.apply(q, k, v))
    request.addfinalizer(patch.undo)
    model, memory, counted = counted_model(request.param)
    with counted.meter:
        plain = step(model, counted) - memory.planner._static
        for _ in range(2):
            step(model, counted)
        found = memory.planner._measured
        # A bus on which about half of what a layer saves can leave in the time of a layer.
        found = found._replace(
            again_seconds={"gate_up": 0.4, "activation": 0.05, "norm": 0.01, "rotated": 0.01}, loss_seconds=5.0,
            forward_seconds=1.0, backward_seconds=1.5, bandwidth=10.0 * INPUT,
        )  # fmt: skip
        least = make_plan(found, 0, TOKENS, 0).peak
        most = make_plan(found, 0, TOKENS, 1 << 40).peak
    return model, memory, counted, found, plain, least, most


def test_plain_checkpointing_is_measured_as_it_is(measured):
    _, _, _, found, plain, _, _ = measured
    assert max(found.backward_bytes, found.loss_bytes) == pytest.approx(plain, rel=0.002)
    assert found.input_bytes == INPUT and found.first_input_stays


@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0])
def test_a_step_takes_no_more_than_its_budget(measured, share):
    model, memory, counted, found, _, least, most = measured
    follow(model, memory, counted, found, least + share * (most - least))


@pytest.mark.parametrize("room_beside_least", [0, 0.5, 2])
def test_a_last_layer_that_asks_for_nothing_has_what_is_leaving_beside_it(measured, room_beside_least):
    model, memory, counted, found, *_ = measured
    # So fast a layer, and so slow a bus, that only inputs leave and the last layer is run again.
    found = found._replace(forward_seconds=0.05, backward_seconds=0.075, can_tell=False, bandwidth=30.0 * INPUT)
    follow(model, memory, counted, found, make_plan(found, 0, TOKENS, 0).peak + room_beside_least * INPUT)
    # Of a layer with a fused MLP all that is saved has room in forward, too.
    assert memory.plan.modes[-1] == (KEEP if found.passing_bytes else RECOMPUTE) and memory.plan.modes[0] == OFFLOAD


def follow(model, memory, counted, found, room):
    """Steps by the plan for a room take no more than it, and not far less."""
    planner = memory.planner
    planner._measured, planner._planned_static = found, 0
    with counted.meter:
        step(model, counted)
        planner._plans.clear()
        planner._budget = planner._static + round(room)
        for _ in range(2):  # the first one makes the host's memory, which counts here
            peak = step(model, counted) - planner._static
    # Gradients of adapters, which are not small beside so small a model, come one by one.
    assert peak <= room + 0.2 * INPUT, f"{peak / INPUT:.2f} of {room / INPUT:.2f} inputs, {memory.plan}"
    # Nor far less: what is not used could have made the step faster.
    assert peak >= 0.75 * (memory.plan.peak - planner._static)


def test_with_the_memory_of_plain_checkpointing_a_step_is_planned_that_runs_less_again(measured):
    _, _, _, found, plain, _, _ = measured
    plan = make_plan(found, 0, TOKENS, plain)
    assert plan.seconds < 0.6 * LAYERS * found.forward_seconds
    assert any(plan.options[name].sent for _, name, _ in plan.rows())
