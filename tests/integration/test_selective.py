"""Layers that keep some of what they make and make the rest again: the gradients of layers that keep everything."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
from memory_cases import LAYERS, assert_same, batch, break_off, gradients, model_of, step, watch_inputs
from memory_machines import EarlyLane, LateLane, machine
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.activations import ACT2FN

from fastft import patch_model, report, unpatch_model
from fastft.bench.meters import StorageMeter
from fastft.memory.activations import ActivationMemory
from fastft.memory.checkpoint import LayerCheckpoint
from fastft.memory.schedule import OFFLOAD
from fastft.memory.tape import ALL_SENT, KINDS, LEAN, LEAN_SENT, THIN, THIN_SENT, Level
from fastft.modules.checkpointing import memories

KEEP = Level("keep", {})
EVERYTHING = Level("everything", dict.fromkeys(KINDS, "offload"))
LEVELS = [KEEP, THIN, LEAN, THIN_SENT, LEAN_SENT, ALL_SENT, EVERYTHING]


def lora_model(dropout=0.0, **config):
    adapter = LoraConfig(target_modules="all-linear", init_lora_weights=False, lora_dropout=dropout)
    return get_peft_model(model_of(**config), adapter).train()


def at_level(model, level, lane=LateLane, **options):
    patch_model(model, checkpointing="selective", **options)
    (memory,) = memories(model)
    memory.mode, memory.smallest, memory.machine = level, 1, machine(lane)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def pair(level, lora=True, lane=LateLane, **config):
    """A patched model that keeps everything, and its copy at a level."""
    plain = lora_model(**config) if lora else model_of(**config)
    other = at_level(copy.deepcopy(plain), level, lane)
    patch_model(plain)
    plain.enable_input_require_grads()
    return plain, other


def bytes_of(model):
    return memories(model)[0].bytes_of_layer[0]


def told_layers(model):
    return report(model).counters["layer kept in part"]


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("lora", [True, False])
def test_gradients_are_those_of_keeping_everything_to_the_bit(family, lora, level):
    plain, other = pair(level, lora, family=family)
    for number in range(3):
        shape = {"length": (24, 31, 9)[number], "rows": (2, 1, 3)[number], "seed": number}
        assert_same(step(other, **shape), step(plain, **shape))
    assert told_layers(other) == 3 * LAYERS
    gc.collect()
    assert memories(other)[0].host_bytes_in_use == 0


@pytest.mark.parametrize("level", [THIN, LEAN_SENT], ids=lambda level: level.name)
def test_under_autocast(level):
    plain, other = pair(level)
    results = []
    for model in (plain, other):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch()).loss
        loss.backward()
        results.append(gradients(model))
    assert_same(results[1], results[0])


def test_packed_rows():
    plain, other = pair(LEAN_SENT, family="qwen3")
    ids = torch.randint(1, 60, (1, 40))
    positions = torch.cat([torch.arange(length) for length in (13, 1, 26)])[None]
    results = []
    for model in (plain, other):
        model(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
        results.append(gradients(model))
    assert_same(results[1], results[0])


def test_dropout_of_adapters_is_never_drawn_again():
    plain, other = pair(LEAN, dropout=0.5)
    assert_same(step(other), step(plain))
    assert "gate_up" not in bytes_of(other)


def test_a_second_backward_and_several_forwards():
    plain, other = pair(LEAN_SENT, lane=EarlyLane)
    results = []
    for model in (plain, other):
        first, second = (model(**batch(seed=seed)).loss for seed in (1, 2))
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        results.append(gradients(model))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("gated_mlp", ["auto", False])
def test_what_is_made_again_is_not_kept(gated_mlp):
    """A fused MLP keeps neither activation nor product at any level."""
    shape = {"length": 32, "rows": 2}
    held = {}
    for level in (KEEP, THIN, LEAN):
        model = at_level(lora_model(), level, gated_mlp=gated_mlp)
        step(model, **shape)
        made = bytes_of(model)
        assert ("activation" in made) == (gated_mlp is False)
        held[level.name] = sum(size for kind, size in made.items() if level.actions.get(kind) != "again")
    tokens = 64
    config = model.config
    row = 4 * tokens
    activations = 2 * config.intermediate_size if gated_mlp is False else 0
    assert held["keep"] - held["thin"] >= row * (2 * config.hidden_size + activations)
    assert held["thin"] - held["lean"] >= row * 2 * config.intermediate_size


def test_the_memory_is_really_free():
    """Not by the tape's own account: the tensors that a norm and an activation made are gone after the forward."""
    model = at_level(model_of(), THIN)
    alive = []
    for layer in model.model.layers:
        for module in (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp.act_fn):
            module.register_forward_hook(lambda _, __, out: alive.append(weakref.ref(out)))
    loss = model(**batch()).loss
    assert len(alive) == 3 * LAYERS and not any(reference() is not None for reference in alive)
    loss.backward()


@pytest.mark.parametrize("lora", [False, True])
def test_what_is_sent_is_really_free(lora):
    model = at_level(lora_model() if lora else model_of(), LEAN_SENT, EarlyLane)
    layers = (model.base_model.model if lora else model).model.layers
    inputs, between = watch_inputs(layers), watch_inputs([layer.post_attention_layernorm for layer in layers])
    loss = model(**batch()).loss
    memories(model)[0].offloader.settle(torch.device("cpu"))
    # Autograd itself holds the first input where embeddings are frozen.
    assert [reference.expired() for reference in inputs] == [not lora] + [True] * (LAYERS - 1)
    assert all(reference.expired() for reference in between)
    loss.backward()


def test_an_attention_output_leaves_although_its_own_node_saved_it_first():
    model = at_level(lora_model(), Level("attention", {"attention": "offload"}))
    loss = model(**batch()).loss
    memory = memories(model)[0]
    memory.offloader.settle(torch.device("cpu"))
    width = 2 * 24 * model.config.num_attention_heads * model.config.head_dim * 4
    assert bytes_of(model)["attention"] == width
    assert report(model).counters["bytes offloaded"] == LAYERS * width
    loss.backward()


def test_a_kept_tensor_that_is_written_in_place_raises_as_in_autograd():
    model = at_level(model_of(), KEEP)
    model.model.layers[2].mlp.register_forward_hook(lambda module, args, output: (args[0].mul_(1.0), output)[1])
    loss = model(**batch()).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_stock_norms_are_kept_whole_beside_an_mlp_that_tells():
    plain = model_of()
    other = copy.deepcopy(plain)
    patch_model(plain, rms_norm=False, rope=False)
    patch_model(other, rms_norm=False, rope=False, checkpointing="selective")
    other.gradient_checkpointing_enable()
    plain.enable_input_require_grads()
    assert_same(step(other), step(plain))
    assert set(bytes_of(other)) == {"untold", "attention input", "attention", "gate_up"}


def test_steps_that_break_off_leave_nothing_behind():
    plain, other = pair(LEAN_SENT)
    (memory,) = memories(other)
    layer = other.base_model.model.model.layers[3]
    for _ in range(5):
        break_off(other, layer)
        assert memory.tape is None
    gc.collect()
    assert memory.host_bytes_in_use == 0
    assert_same(step(other), step(plain))


class Noisy(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(torch.nn.functional.silu(x), 0.3)


@pytest.mark.parametrize("change", ["activation", "projection", "identity", "inner hook"])
def test_code_of_others_is_never_run_again(change):
    plain, other = pair(LEAN)
    for model in (plain, other):
        for layer in model.base_model.model.model.layers:
            if change == "activation":
                layer.mlp.act_fn = Noisy()
            elif change == "identity":
                layer.mlp.act_fn = ACT2FN["linear"]
            elif change == "projection":
                own = layer.mlp.gate_proj.forward
                layer.mlp.gate_proj.forward = lambda x, own=own: own(x) * (1 + torch.rand(()))
            else:
                layer.mlp.up_proj.lora_A["default"].register_forward_hook(lambda *a: a[2] * (1 + torch.rand(())))
    assert_same(step(other), step(plain))
    assert ("gate_up" in bytes_of(other)) == (change in ("activation", "identity"))


def test_a_view_of_the_input_beside_it():
    """CK-05: told apart from the input, which begins at the same address."""
    memory = ActivationMemory(OFFLOAD, machine(EarlyLane), smallest=1)

    def layer(x, part):
        return x * part.sum().sigmoid() + x.sin()

    results = []
    for way in ("plain", "offloaded"):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
        hidden = x * 1.5
        for index in range(4):
            inner = functools.partial(checkpoint, use_reentrant=False)
            run = inner if way == "plain" else LayerCheckpoint(inner, memory, index, 4)
            hidden = run(layer, hidden, hidden[:, :2])
        hidden.sum().backward()
        results.append(x.grad)
    assert torch.equal(*results) and memory.counters["input offloaded"] == 3


def test_weights_are_neither_counted_nor_held():
    model = at_level(model_of(), KEEP)
    step(model, length=8, rows=1)
    layer = model.model.layers[0]
    weights = sum(parameter.nbytes for parameter in layer.parameters())
    assert sum(bytes_of(model).values()) < weights


def test_evaluation_is_not_told():
    model = at_level(lora_model(), THIN)
    with torch.no_grad():
        model(**batch())
    model.eval()
    model(**batch()).loss.backward()
    assert "layer kept in part" not in report(model).counters


def test_a_policy_of_the_callers_is_left_in_charge():
    model = at_level(model_of(), THIN)
    calls = []

    def policy(ctx, op, *args, **kwargs):
        calls.append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    step(model)
    assert calls and "layer kept in part" not in report(model).counters


def test_unpatching_ends_it():
    model = at_level(model_of(), THIN)
    step(model)
    unpatch_model(model)
    assert not memories(model)
    step(model)


# ------------------------------------------------------------------------------------- layers that tell nothing


def stock_pair(family, **config):
    """Two patched models whose feed-forward parts stay stock: checkpointed whole, and by operators."""
    plain = model_of(family, **config)
    other = copy.deepcopy(plain)
    for model, option in ((plain, "recompute"), (other, "selective")):
        patch_model(model, checkpointing=option, experts=False)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return plain, other


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral", "gpt_neox", "bloom", "qwen3_next", "jamba"])
def test_layers_that_tell_nothing_are_kept_by_their_operators(family):
    plain, other = stock_pair(family)
    for number in range(2):
        assert_same(step(other, seed=number), step(plain, seed=number))
    counters = report(other).counters
    assert counters["layer kept in part, by its operators"] == 2 * LAYERS and "layer kept in part" not in counters


def test_products_are_not_run_again():
    products = []
    for model in stock_pair("gemma2"):
        with Products() as counted:
            step(model)
        products.append(counted.count)
    with Products() as counted:
        step(model_of("gemma2"))
    assert products[1] == counted.count < products[0]


def test_what_operators_make_is_less_than_everything():
    held = []
    for model in (*stock_pair("gemma2"), model_of("gemma2")):
        with StorageMeter() as meter:
            loss = model(**batch(length=64), use_cache=False).loss
            held.append(meter.read().now)
            loss.backward()
    assert held[0] < held[1] < 0.75 * held[2]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_layer_that_writes_into_a_product_is_run_again_whole(dropout):
    plain, other = stock_pair("gpt_oss", attention_dropout=dropout)
    for number in range(2):
        assert_same(step(other, seed=number), step(plain, seed=number))
    reason = "left alone: aten.add_.Tensor writes into a product of matrices or the output of attention"
    assert report(other).counters[reason] == 2 * LAYERS


def test_the_callers_policy_and_reentrant_checkpoints_of_layers_that_tell_nothing():
    plain, other = stock_pair("gpt2")
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    other.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": policy})
    assert_same(step(other), step(plain))
    other.gradient_checkpointing_enable({"use_reentrant": True})
    assert_same(step(other), step(plain))
    assert report(other).counters["layer kept in part, by its operators"] == LAYERS  # torch's other form keeps nothing
    assert report(other).counters["left alone: a checkpoint with context_fn of the caller's"] == LAYERS


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_weights_that_autocast_has_cast_before(family):
    results = []
    for model in stock_pair(family):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                model(**batch())
            torch.manual_seed(1)
            loss = model(**batch()).loss + model(**batch(seed=1)).loss
        loss.backward()
        results.append(gradients(model))
    # Not to the bit: gradients of a weight that was cast once are summed in its bf16 copy, of one cast twice in fp32.
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=0.02, atol=0.01 * expected.abs().max().item())


def test_a_checkpoint_that_is_debugged_is_left_alone():
    plain, other = stock_pair("gpt2")
    other.gradient_checkpointing_enable({"use_reentrant": False, "debug": True})
    assert_same(step(other), step(plain))
    assert report(other).counters["left alone: a checkpoint with debug of the caller's"] == LAYERS


def test_where_the_mlp_is_left_to_stock_operators_say_what_is_kept():
    plain = model_of("llama")
    other = copy.deepcopy(plain)
    patch_model(plain, gated_mlp=False, lora=False)
    patch_model(other, gated_mlp=False, lora=False, checkpointing="selective")
    other.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(step(other), step(plain))
    assert report(other).counters["layer kept in part, by its operators"] == LAYERS


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))
