"""The classes of fused decoder layers: nobody else sees a difference, and it can be undone."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import linecache
import pickle
from importlib import import_module

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
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
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fastft import patch_model, report, unpatch_model
from fastft.modules import decoder
from fastft.modules.state import state_of

# ------------------------------------------------------------------------------------------------ classes and copies


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_looks_like_stock(family):
    from accelerate.utils.dataclasses import get_module_class_from_name

    stock, model = tiny_decoder(family), fused_model(family)
    for layer, before in zip(layers_of(model), layers_of(stock), strict=True):
        cls, original = type(layer), type(before)
        assert cls is not original and isinstance(layer, original)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(cls, name) == getattr(original, name)
        assert repr(layer) == repr(before)
        assert "forward" not in layer.__dict__
    assert len(set(map(type, layers_of(model)))) == 1
    for name in model._no_split_modules:
        found = get_module_class_from_name(model, name)
        assert all(isinstance(layer, found) for layer in layers_of(model))
    assert list(model.state_dict()) == list(stock.state_dict())


def _by_pickle(model, protocol):
    return pickle.loads(pickle.dumps(model, protocol))


def _by_torch_save(model, _):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@pytest.mark.parametrize(("load", "protocol"), [(_by_pickle, 2), (_by_pickle, 5), (_by_torch_save, None)])
def test_a_pickle_is_of_the_class_it_came_with(load, protocol):
    stock = tiny_decoder("llama")
    loaded = load(fused_model(stock=stock), protocol)
    assert set(map(type, layers_of(loaded))) == set(map(type, layers_of(stock)))
    assert all(state_of(layer) is None for layer in layers_of(loaded))
    assert differences(results(loaded), results(stock)) == []


def test_a_deepcopy_is_fused_and_independent():
    model = fused_model()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.25)
    before = fusions(model)
    found = results(twin)
    assert fusions(model) == before and fusions(twin) == (LAYERS, {})
    assert set(map(type, layers_of(twin))) == set(map(type, layers_of(model)))
    for layer, original in zip(layers_of(twin), layers_of(model), strict=True):
        assert state_of(layer) is not state_of(original)
        assert state_of(layer).shared is state_of(layer.post_attention_layernorm).shared
    stock = tiny_decoder("llama")
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.mul_(1.25)
    assert differences(found, results(stock)) == []


def test_unfusing_and_fusing_twice():
    stock = tiny_decoder("llama")
    model = fused_model(stock=stock)
    fused = set(map(type, layers_of(model)))
    assert fused != set(map(type, layers_of(stock)))
    patch_model(model, **NORMS_ONLY)
    assert set(map(type, layers_of(model))) == fused
    unpatch_model(model)
    assert differences(results(model), results(stock)) == []
    assert set(map(type, layers_of(model))) == set(map(type, layers_of(stock)))
    for layer, before in zip(layers_of(model), layers_of(stock), strict=True):
        assert sorted(layer.__dict__) == sorted(before.__dict__)


@pytest.mark.parametrize("first", ["fused", "dispatched"])
def test_device_hooks_of_accelerate(first):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    stock = tiny_decoder("llama")
    expected = results(stock)
    model = copy.deepcopy(stock)
    if first == "fused":
        patch_model(model, **NORMS_ONLY)
    for layer in layers_of(model):
        add_hook_to_module(layer, ModelHook())
    if first == "dispatched":
        patch_model(model, **NORMS_ONLY)
        reasons = {item.reason for item in report(model).skipped if item.op == "add_rms_norm"}
        assert len(reasons) == 1 and "replaced a layer's forward already" in reasons.pop()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = count_checkpoints(model)
    assert differences(results(model), expected) == [] and len(calls) == LAYERS
    assert (fusions(model)[0] > 0) == (first == "fused")
    unpatch_model(model)
    assert differences(results(model), expected) == [] and len(calls) == 2 * LAYERS
    for layer in layers_of(model):
        remove_hook_from_module(layer)
    assert differences(results(model), expected) == [] and len(calls) == 3 * LAYERS


# ------------------------------------------------------------------------------------------------ compilers, processes


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_as_without_fusion(checkpointed):
    frames = []
    stock = tiny_decoder("llama")
    apart = patch_model(copy.deepcopy(stock), **NORMS_ONLY, add_rms_norm=False)
    for model in (apart, fused_model(stock=stock)):
        torch._dynamo.reset()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(model, backend=counter)
        torch.testing.assert_close(compiled(ids()).logits, stock(ids()).logits)
        frames.append(counter.frame_count)
    torch._dynamo.reset()
    assert frames[0] == frames[1] > 0
    assert fusions(model) == (0, {})


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _whole(found):
    return {
        name.replace("module.", ""): value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }


def _sharded(model, *, norms):
    for layer in layers_of(model):
        if norms:
            fully_shard(layer.post_attention_layernorm)
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_ddp(checkpointed, one_process):
    stock = tiny_decoder("llama")
    model = fused_model(stock=stock)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert differences(_whole(results(wrapped)), results(stock)) == []
    assert fusions(model)[0] >= LAYERS


@pytest.mark.parametrize("norms", [False, True], ids=["layers", "norms_too"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_fsdp2_over_fused_layers(norms, checkpointed, one_process):
    stock = tiny_decoder("llama")
    model = _sharded(fused_model(stock=stock), norms=norms)
    expected = _whole(results(_sharded(stock, norms=norms)))
    layers, calls = list(model.model.layers), []
    assert {type(layer).__name__ for layer in layers} == {"FSDPLlamaDecoderLayer"}
    assert set(map(decoder.layer_class, layers)) == {_layer_class("llama")}
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        calls = count_checkpoints(model)
    assert differences(_whole(results(model)), expected) == []
    count, apart = fusions(model)
    assert bool(count) == (not norms) and bool(apart) == norms  # FSDP2 gathers a norm's own weight in its hooks
    for layer in layers:
        decoder.unfuse(layer)  # does nothing: the class is FSDP2's
    unpatch_model(model)
    assert differences(_whole(results(model)), expected) == []
    assert len(calls) == (2 * LAYERS if checkpointed else 0)
    assert all(isinstance(layer, FSDPModule) for layer in layers)


# ------------------------------------------------------------------------------------------------ which classes


def _layer_class(family):
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    return next(cls for name, cls in vars(module).items() if name.endswith("DecoderLayer"))


@pytest.mark.parametrize("family", FAMILIES)
def test_known_layers_can_be_fused(family):
    assert decoder.why_not_fusable(_layer_class(family)) == ""
    model = fused_model(family)
    assert decoder.why_not_fusable(type(layers_of(model)[0])) == ""  # looked at again by a second patch_model


@pytest.mark.parametrize("family", ["granitemoe", "gemma2", "olmo2", "phi3", "gpt_oss", "cohere"])
def test_layers_that_do_something_else_cannot(family):
    assert "DecoderLayer" in decoder.why_not_fusable(_layer_class(family))


def test_small_changes_of_a_layer_are_noticed():
    source = inspect.getsource(LegacyLayer)
    for number, (before, after) in enumerate(
        [
            ("residual + hidden_states\n        residual", "residual + 0.5 * hidden_states\n        residual"),
            ("self.post_attention_layernorm(hidden_states)", "self.post_attention_layernorm(residual * 2)"),
            ("position_embeddings=position_embeddings, **kwargs", "**kwargs"),
            ("hidden_states=hidden_states, position", "hidden_states=residual, position"),
            ("        return hidden_states\n", "        return (hidden_states,)\n"),
            ("**kwargs):\n        residual", "*args, **kwargs):\n        residual"),
        ]
    ):
        assert before in source
        name = f"<changed layer {number}>"
        changed = source.replace(before, after)
        linecache.cache[name] = (len(changed), None, changed.splitlines(keepends=True), name)
        space = {"nn": nn, "functools": functools}
        exec(compile(changed, name, "exec"), space)
        assert "LegacyLayer.forward" in decoder.why_not_fusable(space["LegacyLayer"]), after
    space = {"nn": nn, "functools": functools}
    exec(compile(source, "<no such file>", "exec"), space)
    assert "cannot be read" in decoder.why_not_fusable(space["LegacyLayer"])


def test_a_decorated_forward_is_not_stood_in_for(monkeypatch):
    stock = tiny_decoder("llama")
    cls = type(layers_of(stock)[0])
    original = cls.forward

    @functools.wraps(original)
    def steered(self, *args, **kwargs):
        return original(self, *args, **kwargs) * 1.5

    monkeypatch.setattr(cls, "forward", steered)
    model = patch_model(copy.deepcopy(stock), **NORMS_ONLY)
    assert differences(results(model), results(stock)) == []
    assert {item.reason for item in report(model).skipped if item.op == "add_rms_norm"} == {
        f"{cls.__name__}.forward is decorated"
    }
