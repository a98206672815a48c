"""Decoder layers with the fused addition and norm: what they compute, where they step aside, and checkpointing."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from decoder_cases import (
    FAMILIES,
    LAYERS,
    NORMS_ONLY,
    LegacyLayer,
    count_checkpoints,
    differences,
    fused_model,
    fusions,
    ids,
    layers_of,
    results,
)
from decoder_families import tiny_decoder
from interpreter import needs_interpreter, round_to_nearest
from memory_cases import step
from memory_machines import LateLane, machine
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastft import patch_model
from fastft.memory.tape import KINDS, LEAN_SENT, THIN, THIN_SENT, Level
from fastft.modules import decoder
from fastft.modules.checkpointing import memories
from fastft.modules.state import ATTRIBUTE, state_of

KEEP = Level("keep", {})
EVERYTHING = Level("everything", dict.fromkeys(KINDS, "offload"))


# ------------------------------------------------------------------------------------------------ what is computed


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_stocks_to_the_bit(family):
    stock = tiny_decoder(family)
    model = fused_model(family, stock)
    assert differences(results(model), results(stock)) == []
    assert fusions(model) == (LAYERS, {})


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@needs_interpreter
def test_with_kernels(family, monkeypatch):
    """The kernels' sum is torch's, and a norm of their own fp32 rounding: the same model without fusion agrees."""
    round_to_nearest(monkeypatch)
    options = {**NORMS_ONLY, "rms_norm": "triton"}
    apart = patch_model(tiny_decoder(family), **options, add_rms_norm=False)
    model = fused_model(family, tiny_decoder(family), **options)
    found, expected = results(model), results(apart)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(found["loss"], expected["loss"])
    assert fusions(model) == (LAYERS, {}) and fusions(apart) == (0, {})


def test_a_wrong_sum_is_noticed(monkeypatch):
    def mutant(x, residual, weight, **options):
        return original(x, residual + 1e-3 * x, weight, **options)

    original = decoder.add_rms_norm
    monkeypatch.setattr(decoder, "add_rms_norm", mutant)
    stock = tiny_decoder("llama")
    assert len(differences(results(fused_model(stock=stock)), results(stock))) > 5


def test_generation_and_recorded_outputs_are_stocks():
    stock = tiny_decoder("qwen3").eval()
    model = fused_model(stock=stock)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    assert torch.equal(model.generate(ids(), **options), stock.generate(ids(), **options))
    found, expected = (each(ids(), output_hidden_states=True).hidden_states for each in (model, stock))
    assert len(found) == LAYERS + 1 and all(map(torch.equal, found, expected))
    assert fusions(model)[0] == LAYERS * 6


def test_adapters_that_come_later():
    stock = tiny_decoder("llama")
    adapter = LoraConfig(target_modules="all-linear", init_lora_weights=False, modules_to_save=["lm_head"])
    found = []
    for model in (patch_model(copy.deepcopy(stock), add_rms_norm=False), fused_model(stock=stock, rms_norm="auto")):
        torch.manual_seed(3)
        adapted = get_peft_model(model, adapter)
        found.append(results(adapted))
    assert differences(*found) == []
    assert fusions(model) == (LAYERS, {})


# ------------------------------------------------------------------------------------------------ apart where need be


def _forward_hook(norm, seen):
    norm.register_forward_hook(lambda _, args, output: seen.append(args[0]) or output * 1.5)


def _pre_hook(norm, seen):
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]) or (args[0] * 1.5,))


def _backward_hook(norm, seen):
    norm.register_full_backward_hook(lambda _, before, after: seen.append(before[0]) or (before[0] * 1.5,))


def _backward_pre_hook(norm, seen):
    norm.register_full_backward_pre_hook(lambda _, after: seen.append(after[0]) or (after[0] * 1.5,))


def _own_forward(norm, seen):
    def forward(self, hidden_states):
        seen.append(hidden_states)
        return hidden_states * 2.0

    norm.forward = types.MethodType(forward, norm)


@pytest.mark.parametrize("interfere", [_forward_hook, _pre_hook, _backward_hook, _backward_pre_hook, _own_forward])
def test_what_others_do_to_the_norm_is_honoured(interfere):
    stock = tiny_decoder("llama")
    model = fused_model(stock=stock)
    expected, found = [], []
    interfere(layers_of(stock)[1].post_attention_layernorm, expected)
    interfere(layers_of(model)[1].post_attention_layernorm, found)
    assert differences(results(model), results(stock)) == []
    assert len(found) == len(expected) == 1 and torch.equal(found[0], expected[0])
    count, apart = fusions(model)
    assert (count, list(apart.values())) == (1, [1])


def test_a_hook_on_all_modules_is_honoured():
    model, seen = fused_model(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        results(model)
    finally:
        handle.remove()
    assert all(layer.post_attention_layernorm in seen for layer in layers_of(model))
    assert fusions(model) == (0, {"the norm has a hook, or was compiled": LAYERS})


def test_another_norm_in_its_place():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states):
            return self.inner(hidden_states) * 0.5

    stock = tiny_decoder("llama")
    model = fused_model(stock=stock)
    for each in (stock, model):
        layer = layers_of(each)[0]
        layer.post_attention_layernorm = Wrapper(layer.post_attention_layernorm)
    assert differences(results(model), results(stock)) == []
    assert fusions(model) == (1, {"the norm's forward is not fastft's": 1})


def test_dtypes_that_promote():
    """Trainers run fp32 weights under autocast: attention is bf16, what it is added to fp32."""
    stock = tiny_decoder("llama")
    model = fused_model(stock=stock)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = model(ids()).logits, stock(ids()).logits
    assert torch.equal(found, expected)
    assert fusions(model) == (0, {"torch.float32 + torch.bfloat16": LAYERS})


def test_arguments_reach_attention_as_from_stock():
    stock = tiny_decoder("llama")
    model = fused_model(stock=stock)
    x = torch.randn(2, 5, 32)
    rotary = stock.model.rotary_emb(x, torch.arange(5)[None])
    for args, kwargs in [
        ((x,), {"position_embeddings": rotary}),
        ((), {"hidden_states": x, "position_embeddings": rotary}),
        ((x, None, None), {"position_embeddings": rotary}),
        ((x,), {"position_embeddings": rotary, "something_else": 1}),
    ]:
        seen, outputs = [], []
        for each in (stock, model):
            layer = layers_of(each)[0]
            handle = layer.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs, seen=seen: seen.append((args, list(kwargs.items())[1:])), with_kwargs=True
            )
            outputs.append(layer(*args, **kwargs))
            handle.remove()
        assert torch.equal(*outputs)
        assert seen[0] == seen[1]
    with pytest.raises(TypeError, match="multiple values"):
        layer(x, None, attention_mask=None, position_embeddings=rotary)


# ------------------------------------------------------------------------------------------------ checkpointing


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_as_often_as_stock(use_reentrant):
    stock = tiny_decoder("llama")
    model = fused_model(stock=stock)
    expected = results(stock)
    calls = []
    for each in (stock, model):
        each.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        each.enable_input_require_grads()
        calls.append(count_checkpoints(each))
        assert differences(results(each), expected) == []
    assert calls == [["LlamaDecoderLayer"] * LAYERS] * 2
    # A recomputation may stop before it comes to the norm, but not before the first of a layer's two.
    assert fusions(model)[0] in (LAYERS, 2 * LAYERS)


def test_checkpointed_as_transformers_5_17_does():
    assert decoder.why_not_fusable(LegacyLayer) == ""
    stock = tiny_decoder("llama")
    expected = results(stock)
    model = patch_model(copy.deepcopy(stock), **NORMS_ONLY, add_rms_norm=False)
    for number, layer in enumerate(layers_of(model)):
        model.model.layers[number] = LegacyLayer(layer)
    calls = []

    def counting(function, *args):
        calls.append(function)
        return checkpoint(function, *args, use_reentrant=False)

    for layer in model.model.layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, counting
        layer.__dict__[ATTRIBUTE] = state_of(layer.mlp) or state_of(layer.input_layernorm)
        decoder.fuse(layer)
    assert differences(results(model), expected) == []
    assert len(calls) == LAYERS and fusions(model)[0] >= LAYERS
    assert {type(layer).__name__ for layer in model.model.layers} == {"LegacyLayer"}


@pytest.mark.parametrize("level", [KEEP, THIN, THIN_SENT, LEAN_SENT, EVERYTHING], ids=lambda level: level.name)
@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_the_memory_plan_is_told_the_same(impl, level, monkeypatch):
    """Gradients of keeping everything, and as many bytes of each kind as from layers that are not fused."""
    round_to_nearest(monkeypatch)
    stock = tiny_decoder("qwen3")
    plain = fused_model(stock=stock, rms_norm=impl)
    plain.enable_input_require_grads()
    told = {}
    for name in ("fused", "apart"):
        layers = "auto" if name == "fused" else False
        model = patch_model(copy.deepcopy(stock), rms_norm=impl, add_rms_norm=layers, checkpointing="selective")
        (memory,) = memories(model)
        memory.mode, memory.smallest, memory.machine = level, 1, machine(LateLane)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if name == "fused":
            assert differences(step(model), step(plain)) == []
        else:
            step(model)
        assert (fusions(model)[0] > 0) == (name == "fused")
        told[name] = memory.bytes_of_layer
    if impl == "reference":
        assert {n: dict(kinds) for n, kinds in told["fused"].items()} == {
            n: dict(kinds) for n, kinds in told["apart"].items()
        }
    for kind in ("residual", "norm", "untold"):
        assert told["fused"][0][kind] == told["apart"][0][kind], kind
    if not any(level.actions.get(kind) == "offload" for kind in ("residual", "norm")):
        assert told["fused"][0]["residual"] and told["fused"][0]["norm"]
    assert fusions(plain)[0] == LAYERS


@needs_interpreter
def test_nothing_more_is_saved_for_backward():
    def saved_bytes(model):
        storages = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: storages.setdefault(t.untyped_storage()._cdata, t) is None or t, lambda t: t
        ):
            output = model(ids())
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        del output
        return sum(t.untyped_storage().nbytes() for key, t in storages.items() if key not in parameters)

    options = {**NORMS_ONLY, "rms_norm": "triton"}
    stock = tiny_decoder("llama")
    assert saved_bytes(fused_model(stock=stock, **options)) == saved_bytes(patch_model(stock, **options)) > 0
