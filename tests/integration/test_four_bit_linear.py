"""Adapters over linear layers that bitsandbytes holds in 4 bits: fused, with weights made once a pass."""

from __future__ import annotations

import copy

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget
from patch_cases import counters
from peft import LoraConfig, get_peft_model
from tiny_models import packed_batch, tiny_model
from torch import nn

import fastft
from fastft.errors import UnsupportedOptionError

pytest.importorskip("bitsandbytes", reason="the extra fastft[quant] is not installed")
import bitsandbytes as bnb

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantised(family="llama", dtype=torch.float32, quant_type="nf4", nested=True, compute_dtype=None):
    """A tiny model whose linear layers, the head aside, are of 4 bits, as `load_in_4bit` leaves them."""
    model = tiny_model(family, hidden_size=64, intermediate_size=128).to(dtype)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if name in PROJECTIONS:
                    packed = bnb.nn.Linear4bit(
                        linear.in_features,
                        linear.out_features,
                        bias=linear.bias is not None,
                        compute_dtype=compute_dtype or dtype,
                        compress_statistics=nested,
                        quant_type=quant_type,
                    )
                    packed.load_state_dict(linear.state_dict())
                    setattr(block, name, packed.to("cpu"))
    model.is_loaded_in_4bit = True
    return model.requires_grad_(False)


def adapted(model, **config):
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | config
    return get_peft_model(model, LoraConfig(**options)).train()


def dense(model):
    """The same in fp64, each weight as it is dequantised."""
    model = copy.deepcopy(model)
    for block in [module for module in model.modules() if hasattr(module, "lora_A")]:
        packed = block.base_layer
        weight = bnb.functional.dequantize_4bit(packed.weight, packed.weight.quant_state)
        linear = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None)
        linear.weight.data.copy_(weight)
        if packed.bias is not None:
            linear.bias.data.copy_(packed.bias)
        block.base_layer = linear.requires_grad_(False)
    return model.double()


def with_pefts_forwards(model):
    """Patched apart from what is tested, for stock lets the documents of a packed row see each other."""
    return fastft.patch_model(copy.deepcopy(model), lora=False, gated_mlp=False)


def step(model, autocast=False):
    """Loss and gradients of the adapters; the gradient of the embeddings stands for what flows back to inputs."""
    embeddings = model.get_input_embeddings().weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(**packed_batch((5, 7, 3))).loss
    loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if "lora_" in name}
    found["embeddings"] = embeddings.grad.float()
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach().float(), **found}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("quant_type", "nested"), [("nf4", True), ("nf4", False), ("fp4", True)])
def test_gradients_are_those_of_peft(family, quant_type, nested):
    model = adapted(quantised(family, quant_type=quant_type, nested=nested))
    oracle, expected = step(with_pefts_forwards(dense(model))), step(with_pefts_forwards(model))
    fused = fastft.patch_model(model)
    found = step(fused)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5 * max(1, value.abs().max().item()))
        torch.testing.assert_close(found[name], oracle[name], rtol=1e-3, atol=1e-4 * max(1, value.abs().max().item()))
    assert counters(fused)["lora"] == 14 and not any("not fused" in name for name in counters(fused))


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast(stream):
    """Trainers' way: fp32 adapters, and norms in fp32 or bf16; bf16 products either way."""
    model = adapted(quantised(dtype=stream, compute_dtype=torch.bfloat16))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    oracle, expected = step(with_pefts_forwards(dense(model))), step(with_pefts_forwards(model), autocast=True)
    fused = fastft.patch_model(model)
    found = step(fused, autocast=True)
    found, expected, oracle = (
        {"all": torch.cat([v.flatten() for v in each.values()])} for each in (found, expected, oracle)
    )
    assert_within_budget(found, expected, oracle)
    assert_mutant_caught({"all": found["all"] * 1.1}, expected, oracle)
    assert counters(fused)["lora"] == 14


def test_weights_are_made_once_a_pass_in_memory_that_is_shared(monkeypatch):
    made = []
    original = bnb.functional.dequantize_4bit
    monkeypatch.setattr(
        bnb.functional, "dequantize_4bit", lambda *args, **kwargs: made.append(1) or original(*args, **kwargs)
    )
    model = fastft.patch_model(adapted(quantised()))
    model.get_input_embeddings().weight.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss = model(**packed_batch((5, 7, 3))).loss
    assert len(made) == 14
    assert not any(x.shape in ((64, 64), (128, 64), (64, 128)) for x in saved)
    loss.backward()
    assert len(made) == 28
    (memory,) = model.base_model.model.model.layers[0].mlp._fastft.shared.projector._four_bit._memory.values()
    assert memory.numel() == 64 * 128


def test_another_dtype_to_compute_in_stays_pefts():
    model = fastft.patch_model(adapted(quantised(compute_dtype=torch.float16)))
    step(model)
    words = "a base of 4 bits computes in torch.float16, its adapter in torch.float32"
    assert sum(count for name, count in counters(model).items() if words in name and name.startswith("lora")) == 14


def test_checkpointed_layers():
    plain = adapted(quantised())
    other = fastft.patch_model(copy.deepcopy(plain))
    fastft.patch_model(plain)
    plain.enable_input_require_grads()
    other.gradient_checkpointing_enable({"use_reentrant": False})
    found, expected = step(other), step(plain)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_by_name_it_is_honoured():
    model = fastft.patch_model(adapted(quantised()), lora="fused")
    step(model)
    assert counters(model)["lora"] == 14
    with pytest.raises(UnsupportedOptionError, match="dropout"):
        step(fastft.patch_model(adapted(quantised(), lora_dropout=0.1), lora="fused"))


def test_disabled_adapters_and_a_pickled_projector():
    model = fastft.patch_model(adapted(quantised()))
    with model.disable_adapter(), torch.no_grad():
        model(**packed_batch((5, 7, 3)))
    assert counters(model)["lora not fused: adapters are disabled"] == 14
    copied = copy.deepcopy(model)
    step(model)
    step(copied)
    readers = {id(m.base_model.model.model.layers[0].mlp._fastft.shared.projector._four_bit) for m in (model, copied)}
    assert len(readers) == 2
