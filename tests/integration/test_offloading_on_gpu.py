"""Offloaded checkpointing on a GPU: bytes that leave, streams that race, nothing that leaks."""

from __future__ import annotations

import copy
import gc
import resource

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from fastft import patch_model, report
from fastft.memory.tape import LEAN, LEAN_SENT, THIN, THIN_SENT, Level
from fastft.modules.checkpointing import memories

pytestmark = pytest.mark.gpu

LAYERS, HIDDEN, TOKENS = 12, 512, 4096
INPUT_BYTES = TOKENS * HIDDEN * 2


@pytest.fixture(autouse=True)
def deterministic():
    """Attention of plain products: FlashAttention's backward adds in any order."""
    switches = ("flash_sdp", "mem_efficient_sdp", "cudnn_sdp")
    before = {name: getattr(torch.backends.cuda, f"{name}_enabled")() for name in switches}
    for name in switches:
        getattr(torch.backends.cuda, f"enable_{name}")(False)
    yield
    for name, enabled in before.items():
        getattr(torch.backends.cuda, f"enable_{name}")(enabled)


def model_of(lora=True, **config):
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 1024, "num_hidden_layers": LAYERS, "vocab_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1 << 20}
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **heads, **config})).to("cuda", torch.bfloat16).train()
    if not lora:
        return model
    adapter = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, adapter, autocast_adapter_dtype=False)  # as under autocast: one dtype everywhere


def pair(lora=True):
    plain = model_of(lora)
    other = copy.deepcopy(plain)
    patch_model(plain, checkpointing="recompute", attention="sdpa")
    patch_model(other, checkpointing="offload", attention="sdpa")
    memories(other)[0].smallest = 1
    for model in (plain, other):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return plain, other


def batch(seed, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (1, tokens), generator=generator).cuda()
    return {"input_ids": ids, "labels": ids}


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def poison(count=6, size=INPUT_BYTES):
    """Leaves NaN in the memory that the allocator hands out next, in sizes of the activations."""
    for scale in (1, 2, 4):
        blocks = [torch.full((size * scale // 4,), float("nan"), device="cuda") for _ in range(count)]
        del blocks


def test_the_memory_after_forward_falls_by_layers_times_tokens_times_hidden_times_bytes():
    after = []
    for model in pair(lora=False):  # whose first input is no leaf, which autograd would hold
        torch.cuda.synchronize()
        model(**batch(0)).loss.backward()
        model.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        loss = model(**batch(0)).loss
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        gradients(model)
    freed = after[0] - after[1]
    assert freed >= 0.98 * (LAYERS - 1) * INPUT_BYTES
    assert report(model).counters["bytes offloaded"] == 2 * (LAYERS - 1) * INPUT_BYTES


@pytest.mark.parametrize("slow", ["nothing", "compute", "copies"])
def test_a_hundred_steps_are_equal_to_the_bit_with_a_poisoned_allocator_and_late_streams(slow):
    plain, other = pair()
    if slow == "compute":  # each layer's input is ready long after its copy was asked for
        for layer in other.base_model.model.model.layers:
            layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(200_000))
    (memory,) = memories(other)
    for number in range(100 if slow == "nothing" else 30):
        tokens = TOKENS - 37 * (number % 11)
        results = []
        for model in (plain, other):
            poison()
            if slow == "copies" and model is other and memory._offloader is not None:
                for port in memory._offloader._ports.values():
                    with torch.cuda.stream(port.lane._stream):
                        torch.cuda._sleep(3_000_000)
            loss = model(**batch(number, tokens)).loss
            poison()
            loss.backward()
            results.append(gradients(model))
        assert [name for name in results[0] if not torch.equal(results[0][name], results[1][name])] == []
        assert all(bool(gradient.isfinite().all()) for gradient in results[1].values())


def test_aliased_inputs():
    plain, other = pair()
    seen = []

    def look(module, args, output):
        view = args[0][:, : args[0].shape[1] // 2]  # alive beside the input that leaves
        seen.append(view)
        return output + 0 * view.sum()

    for model in (plain, other):
        for layer in model.base_model.model.model.layers:
            layer.register_forward_hook(look)
    results = []
    for model in (plain, other):
        for number in range(5):
            poison()
            model(**batch(number)).loss.backward()
            seen.clear()
        results.append(gradients(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_two_hundred_steps_leak_nothing_on_either_side():
    _, model = pair()
    (memory,) = memories(model)
    settled = {}
    for number in range(200):
        loss = model(**batch(number, TOKENS - 41 * (number % 13))).loss
        if number % 5 == 4:
            del loss  # a forward without backward
        else:
            loss.backward()
        model.zero_grad(set_to_none=True)
        if number in (60, 199):
            gc.collect()
            torch.cuda.synchronize()
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            settled[number] = (torch.cuda.memory_allocated(), resident, memory.host_bytes)
    device, resident, host = (last - first for first, last in zip(*settled.values(), strict=True))
    assert device <= INPUT_BYTES and host == 0 and resident < 64 << 20
    assert memory.host_bytes_in_use <= (LAYERS - 1) * INPUT_BYTES


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("level", [THIN, LEAN, THIN_SENT, LEAN_SENT], ids=lambda level: level.name)
def test_layers_that_keep_a_part_have_the_gradients_of_layers_that_keep_everything(level, lora):
    plain = model_of(lora)
    other = copy.deepcopy(plain)
    patch_model(plain, attention="sdpa")
    patch_model(other, attention="sdpa", checkpointing="selective")
    (memory,) = memories(other)
    memory.mode, memory.smallest = level, 1
    other.gradient_checkpointing_enable({"use_reentrant": False})
    plain.enable_input_require_grads()
    for number in range(10):
        results = []
        for model in (plain, other):
            poison()
            loss = model(**batch(number, TOKENS - 64 * number)).loss
            poison()
            loss.backward()
            results.append(gradients(model))
        assert [name for name in results[0] if not torch.equal(results[0][name], results[1][name])] == []
    assert report(other).counters["layer kept in part"] == 10 * LAYERS


@pytest.mark.parametrize("gated_mlp", ["auto", False])
def test_what_a_layer_keeps_shrinks_level_by_level(gated_mlp):
    after = []
    for level in (Level("keep", {}), THIN, LEAN, LEAN_SENT):
        model = model_of(hidden_size=1024, intermediate_size=4096)
        patch_model(model, checkpointing="selective", gated_mlp=gated_mlp)
        (memory,) = memories(model)
        memory.mode, memory.smallest = level, 1
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            loss = model(**batch(0)).loss
            held = torch.cuda.memory_allocated() - before
            loss.backward()
            gradients(model)
        after.append(held / LAYERS / TOKENS)
    print("bytes per layer and token:", [round(held) for held in after])
    keep, thin, lean, away = after
    hidden, width = 1024, 4096
    activations = (
        2 * width if gated_mlp is False else 0
    )  # the activation and its product, which a fused MLP never keeps
    assert thin <= keep - 0.98 * 2 * (2 * hidden + activations)  # and two norms
    assert lean <= thin - 0.98 * 2 * 2 * width and away < 0.5 * lean


@pytest.mark.parametrize("budget", [None, "auto", "half way"])
def test_a_planned_model_stays_within_its_budget(budget):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    plain = model_of()
    planned = copy.deepcopy(plain)
    patch_model(plain, attention="sdpa", checkpointing="recompute")
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    peaks = []
    for model in (plain, None):
        torch.cuda.reset_peak_memory_stats()
        if model is None:
            plain.disable_adapter_layers()  # nothing more of it
            most = int(peaks[0] + LAYERS * TOKENS * 4000) if budget == "half way" else budget
            patch_model(planned, attention="sdpa", memory_budget=most)
            planned.gradient_checkpointing_enable({"use_reentrant": False})
            model = planned
        results = []
        for number in range(6):
            model(**batch(number)).loss.backward()
            results.append(gradients(model))
        peaks.append(torch.cuda.max_memory_allocated())
        if model is plain:
            expected = results
    for got, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    plan = report(planned).memory
    print(budget, [peak / 2**20 for peak in peaks], plan)
    assert plan is not None
    if budget is None:
        assert peaks[1] <= 1.02 * peaks[0] + sum(g.nbytes for r in expected for g in r.values())
    elif budget == "half way":
        assert peaks[1] <= 1.05 * most + sum(g.nbytes for r in expected for g in r.values())
    else:
        assert {name for _, name, _ in plan.rows()} == {"keep"}


def test_pinned_memory_is_what_the_first_step_needs():
    _, model = pair(lora=False)
    model(**batch(0)).loss.backward()
    (memory,) = memories(model)
    assert memory.host_bytes == (LAYERS - 1) * INPUT_BYTES
    assert not memory._offloader.pool.refused
