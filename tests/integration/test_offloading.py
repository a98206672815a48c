"""Offloaded checkpointing on whole models: plain checkpointing's gradients to the bit, whoever switches it on."""

from __future__ import annotations

import copy
import functools
import gc
import pickle

import pytest
import torch
from memory_cases import LAYERS, assert_same, batch, break_off, gradients, model_of, step, watch_inputs
from memory_machines import EarlyLane, LateLane, machine
from peft import LoraConfig, get_peft_model
from sft_cases import equal_training, sft
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fastft import patch_model, report, unpatch_model
from fastft.errors import UnsupportedOptionError
from fastft.memory.checkpoint import LayerCheckpoint
from fastft.modules.checkpointing import memories


def offloading(model, lane=LateLane, **options):
    """The model, patched so that the smallest tensors leave, on the CPU to a test machine."""
    patch_model(model, checkpointing="offload", **options)
    (memory,) = memories(model)
    memory.smallest = 1
    if not torch.cuda.is_available() or next(model.parameters()).device.type == "cpu":
        memory.machine = machine(lane)
    return model


def offloaded(model):
    return report(model).counters.get("input offloaded", 0)


def pair(family="llama", lane=LateLane, enable=None, **config):
    """A model with plain checkpointing and its copy with offloading, both with fastft's own layers."""
    plain = model_of(family, **config)
    other = copy.deepcopy(plain)
    patch_model(plain, checkpointing="recompute")
    offloading(other, lane)
    for model in (plain, other):
        model.gradient_checkpointing_enable(enable or {"use_reentrant": False})
    return plain, other


@pytest.mark.parametrize("lane", [LateLane, EarlyLane])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_gradients_are_those_of_plain_checkpointing_to_the_bit(family, lane):
    plain, other = pair(family, lane)
    for number in range(4):
        shape = {"length": (24, 31, 9, 40)[number], "rows": (2, 1, 3, 2)[number], "seed": number}
        assert_same(step(other, **shape), step(plain, **shape))
    assert offloaded(other) == 4 * (LAYERS - 1)


def test_the_memory_of_inputs_is_really_free_between_forward_and_backward():
    _, model = pair(lane=EarlyLane)
    inputs = watch_inputs(model.model.layers)
    loss = model(**batch()).loss
    assert [reference.expired() for reference in inputs] == [True] * (LAYERS - 1) + [False]
    loss.backward()


@pytest.mark.slow
def test_a_hundred_steps_of_many_lengths():
    plain, other = pair()
    for number in range(100):
        shape = {"length": 3 + number * 7 % 41, "rows": 1 + number % 3, "seed": number}
        assert_same(step(other, **shape), step(plain, **shape))
    assert offloaded(other) == 100 * (LAYERS - 1)
    (memory,) = memories(other)
    assert memory.host_bytes_in_use == 0
    largest = 43 * 3 * other.config.hidden_size * 4 * (LAYERS - 1)
    assert memory.host_bytes <= 1.3 * largest


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("preserve_rng_state", [True, False, None])
def test_the_options_of_torchs_checkpoint_are_honoured(use_reentrant, preserve_rng_state):
    options = {"use_reentrant": use_reentrant}
    if preserve_rng_state is not None:
        options["preserve_rng_state"] = preserve_rng_state
    plain, other = pair(enable=options)
    assert_same(step(other), step(plain))
    assert offloaded(other) == LAYERS - 1


def test_dropout_is_reproduced():
    plain, other = pair(attention_dropout=0.3, attn_implementation="eager")
    expected = step(plain)
    assert_same(step(other), expected)
    assert offloaded(other) == LAYERS - 1
    plain(**batch()).loss.backward()  # without the seed
    assert not torch.equal(gradients(plain)["lm_head.weight"], expected["lm_head.weight"])


def test_selective_checkpoint_policies_go_on_working():
    calls = []

    def policy(ctx, op, *args, **kwargs):
        calls.append(op)
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    plain, other = pair(enable={"use_reentrant": False, "context_fn": contexts})
    assert_same(step(other), step(plain))
    assert calls and offloaded(other) == LAYERS - 1


def test_several_forwards_before_their_backwards_in_either_order():
    plain, other = pair()
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        results = []
        for model in (plain, other):
            losses = [model(**batch(seed=seed, length=10 + seed)).loss for seed in range(3)]
            for number in order:
                losses[number].backward()
            results.append(gradients(model))
        assert_same(results[1], results[0])
    (memory,) = memories(other)
    assert memory.host_bytes_in_use == 0


def test_one_loss_over_several_forwards():
    plain, other = pair()
    results = []
    for model in (plain, other):
        sum(model(**batch(seed=seed)).loss for seed in range(3)).backward()
        results.append(gradients(model))
    assert_same(results[1], results[0])


def test_gradient_accumulation():
    plain, other = pair()
    results = []
    for model in (plain, other):
        for seed in range(3):
            model(**batch(seed=seed)).loss.backward()
        results.append(gradients(model))
    assert_same(results[1], results[0])


def test_a_second_backward_through_the_same_graph():
    plain, other = pair()
    results = []
    for model in (plain, other):
        loss = model(**batch()).loss
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(gradients(model))
    assert_same(results[1], results[0])


def test_evaluation_and_inference_mode_in_between():
    plain, other = pair()
    with torch.inference_mode():  # first of all, so that nothing that stays is made there
        other(**batch())
    assert_same(step(other), step(plain))
    other.eval()
    with torch.no_grad():
        other(**batch())
    before = offloaded(other)
    other.train()
    with torch.no_grad():
        other(**batch())
    assert offloaded(other) == before
    assert_same(step(other), step(plain))


def test_an_evaluation_between_forward_and_backward():
    plain, other = pair()
    loss = other(**batch()).loss
    with torch.inference_mode():
        other(**batch(seed=5))
    loss.backward()
    assert_same(gradients(other), step(plain))


def test_steps_that_break_off_leave_nothing_behind():
    plain, other = pair()
    (memory,) = memories(other)
    layer = other.model.layers[3]
    for _ in range(20):
        break_off(other, layer)
    gc.collect()
    assert memory.host_bytes_in_use == 0
    assert memory.host_bytes <= 4 * (LAYERS - 1) * 2 * 24 * other.config.hidden_size * 4
    assert_same(step(other), step(plain))


def test_two_models_at_once():
    plain, other = pair()
    third = offloading(copy.deepcopy(plain))
    assert memories(third)[0] is not memories(other)[0]
    losses = [model(**batch()).loss for model in (other, third)]
    for loss in losses:
        loss.backward()
    expected = step(plain)
    assert_same(gradients(other), expected)
    assert_same(gradients(third), expected)


def test_only_every_nth_layer_is_checkpointed_if_so_asked():
    plain, other = model_of(), None
    other = offloading(copy.deepcopy(plain))
    patch_model(plain, checkpointing="recompute")
    for model in (plain, other):
        model.gradient_checkpointing_enable({"use_reentrant": False}, every_n_layers=2)
    assert_same(step(other), step(plain))
    assert offloaded(other) == 2  # of layers 0, 2 and 4 the last stays


# ------------------------------------------------------------------------------------------- who switches it on


def test_it_is_off_until_somebody_switches_checkpointing_on_and_after_it_is_switched_off():
    model = offloading(model_of())
    step(model)
    assert offloaded(model) == 0
    model.gradient_checkpointing_enable()
    step(model)
    assert offloaded(model) == LAYERS - 1
    model.gradient_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    step(model)
    assert offloaded(model) == LAYERS - 1


def test_a_model_whose_checkpointing_is_on_already():
    model = model_of()
    model.gradient_checkpointing_enable()
    offloading(model)
    step(model)
    assert offloaded(model) == LAYERS - 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_below_an_adapter(when):
    model = model_of()
    if when == "before":
        offloading(model)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    if when == "after":
        offloading(model)
    plain = copy.deepcopy(model)
    patch_model(plain, checkpointing="recompute")
    for each in (model, plain):
        each.train()
        each.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(step(model), step(plain))
    # The embeddings are frozen: the first input is a leaf, which autograd holds, and copying it would free nothing.
    assert offloaded(model) == LAYERS - 2
    assert report(model).counters["input kept: a leaf, which the node for its gradient holds"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_trl_switches_it_on(tmp_path, lora):
    stock = sft(tmp_path, patch=None, gradient_checkpointing=True, lora=lora)
    ours = sft(tmp_path, patch=None, gradient_checkpointing=True, lora=lora)
    offloading(ours.model)
    for trainer in (stock, ours):
        trainer.train()
    equal_training(stock, ours)
    counters = report(ours.model).counters
    if lora:  # of two layers one is the last, and the other's input is a leaf
        assert (
            counters["input kept: a leaf, which the node for its gradient holds"]
            == counters["input kept: last layer"]
            > 0
        )
    else:
        assert counters["input offloaded"] == counters["input kept: last layer"] > 0


# ------------------------------------------------------------------------------------------------- stepping aside


def test_other_hooks_on_saved_tensors_are_left_in_charge():
    plain, other = pair()
    with save_on_cpu():
        result = step(other)
    assert_same(result, step(plain))
    counters = report(other).counters
    assert offloaded(other) == 0
    assert counters["left alone: inside other saved-tensor hooks"] == LAYERS


def test_inside_a_checkpoint_of_the_callers():
    plain, other = pair()
    results = []
    for model in (plain, other):
        inputs = batch()
        loss = checkpoint(lambda m=model, i=inputs: m(**i).loss, use_reentrant=False)
        loss.backward()
        results.append(gradients(model))
    assert_same(results[1], results[0])
    assert offloaded(other) == 0


def test_a_checkpoint_function_that_is_not_torchs_is_left_in_charge():
    plain, other = pair()
    # As transformers makes one for offload=True, which needs a GPU.
    other._set_gradient_checkpointing(True, lambda function, *args: checkpoint(function, *args, use_reentrant=False))
    assert_same(step(other), step(plain))
    assert report(other).counters["left alone: a checkpoint function that is not torch's own"] == LAYERS


def test_without_a_gpu_it_is_off_and_the_report_says_why():
    model = model_of()
    patch_model(model, checkpointing="offload")
    memories(model)[0].smallest = 1
    model.gradient_checkpointing_enable()
    step(model)
    assert offloaded(model) == 0
    assert report(model).counters["input kept: cpu: offloading runs on CUDA devices only"] == LAYERS
    (row,) = [row for row in report(model).rows() if row[0] == "checkpointing"]
    assert row[1] == "skipped" and "CUDA devices only" in row[4]


def test_small_inputs_stay():
    _, model = pair()
    memories(model)[0].smallest = 1 << 20
    step(model)
    assert offloaded(model) == 0 and report(model).counters["input kept: small"] == LAYERS


def test_an_input_written_in_place_raises_as_in_plain_checkpointing():
    plain, other = pair()
    for model in (plain, other):
        model.model.layers[2].register_forward_hook(lambda module, args, output: (args[0].mul_(1.0), output)[1])
        loss = model(**batch()).loss
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --------------------------------------------------------------------------------------------- copies and the way back


def test_unpatching_gives_the_layers_their_own_functions_back():
    model = model_of()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    attributes = [set(module.__dict__) for module in model.modules()]
    offloading(model)
    step(model)
    unpatch_model(model)
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions
    assert [set(module.__dict__) for module in model.modules()] == attributes


def test_a_copy_of_a_model_has_a_memory_of_its_own():
    plain, other = pair()
    twin = copy.deepcopy(other)
    assert len(memories(twin)) == 1 and memories(twin)[0] is not memories(other)[0]
    assert_same(step(twin), step(plain))
    assert (offloaded(twin), offloaded(other)) == (LAYERS - 1, 0)


def test_a_pickle_holds_the_unpatched_model():
    model = offloading(model_of())
    model._set_gradient_checkpointing(True)  # without the hook on the embeddings, which cannot be pickled
    loaded = pickle.loads(pickle.dumps(model))
    assert not memories(loaded)
    assert not any(isinstance(layer._gradient_checkpointing_func, LayerCheckpoint) for layer in loaded.model.layers)
    loaded.gradient_checkpointing_disable()
    loaded.gradient_checkpointing_enable()
    step(loaded)
    patch_model(loaded)
    unpatch_model(loaded)
    assert not any("_set_gradient_checkpointing" in module.__dict__ for module in loaded.modules())


def test_bad_options_are_refused():
    with pytest.raises(UnsupportedOptionError, match="checkpointing='unsloth' is not an option"):
        patch_model(model_of(), checkpointing="unsloth")
