"""Experts whose weights bitsandbytes holds in 4 bits: made once a pass, in memory that all layers share."""

from __future__ import annotations

import copy

import pytest
import torch
from patch_cases import counters
from peft import LoraConfig, get_peft_model
from tiny_models import packed_batch, tiny_model

from fastft import patch_model, report, unpatch_model

pytest.importorskip("bitsandbytes", reason="the extra fastft[quant] is not installed")
from bitsandbytes.nn.parametrize import replace_parameter_4bit

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NAMES = ("gate_up_proj", "down_proj")


def quantised(family="qwen3_moe", nested=False):
    model = tiny_model(family, **MOE, hidden_size=64)
    model.set_experts_implementation("eager")
    for layer in model.model.layers:
        for name in NAMES:
            replace_parameter_4bit(layer.mlp.experts, name, compress_statistics=nested, quant_type="nf4")
    return model.requires_grad_(False).train()


def with_adapters(model):
    # PEFT finds parametrised ones by their whole names only.
    targets = [f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in NAMES]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets))
    for name, factor in sorted(factors(model).items()):
        factor.data.normal_(std=0.1, generator=torch.Generator().manual_seed(sum(map(ord, name))))
    return model


def factors(model):
    """By layer and parameter: in which order wrappers lie in one another depends on how the parameters are held."""
    found = {}
    for number, layer in enumerate(model.get_base_model().model.layers):
        wrapper = layer.mlp.experts
        while hasattr(wrapper, "parameter_name"):
            for kind in ("lora_A", "lora_B"):
                found[f"{number} {wrapper.parameter_name} {kind}"] = getattr(wrapper, kind).default.weight
            wrapper = wrapper.base_layer
    return found


def plain(family="qwen3_moe", nested=False):
    """The same numbers in plain parameters."""
    model = tiny_model(family, **MOE, hidden_size=64)
    model.set_experts_implementation("eager")
    for layer, packed in zip(model.model.layers, quantised(family, nested).model.layers, strict=True):
        for name in NAMES:
            getattr(layer.mlp.experts, name).data.copy_(getattr(packed.mlp.experts, name))
    return model.requires_grad_(False).train()


def batch():
    return {"input_ids": packed_batch([23])["input_ids"]}


def gradients(model):
    embeddings = model.get_input_embeddings().weight.requires_grad_()
    logits = model(**batch(), use_cache=False).logits
    logits.square().sum().backward()
    found = {name: factor.grad for name, factor in factors(model).items()} if hasattr(model, "peft_config") else {}
    return logits.detach(), {"embeddings": embeddings.grad, **found}


def assert_same(model, other):
    (logits, found), (expected, wanted) = gradients(model), gradients(other)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert found.keys() == wanted.keys()
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_outputs_and_gradients_are_those_of_the_same_numbers(family, nested):
    model = patch_model(quantised(family, nested))
    assert_same(model, plain(family, nested))
    assert counters(model)["experts: reference"] == 2


def test_the_memory_is_shared_by_layers_and_passes():
    model = patch_model(quantised())
    gradients(model)
    (shared,) = {id(m._fastft.shared): m._fastft.shared for m in model.modules() if hasattr(m, "_fastft")}.values()
    memory = shared.read_packed._memory
    (made,) = memory.values()
    before = made.data_ptr()
    gradients(model)
    assert [m.data_ptr() for m in memory.values()] == [before]
    assert made.numel() == 4 * 64 * 64  # the larger of the two weights


def test_adapters_over_four_bits_count_once():
    """In PEFT's own forward, what the cache of bitsandbytes holds decides which updates are there."""
    model = with_adapters(quantised())
    other = with_adapters(plain())
    patch_model(model)
    for _ in range(2):
        model.zero_grad(), other.zero_grad()
        assert_same(model, other)
    assert counters(model)["lora on experts"] == 4


def test_adapters_that_stay_pefts_count_once_too():
    model, other = with_adapters(quantised()), with_adapters(quantised())
    patch_model(model)
    for module in model.modules():
        if hasattr(module, "parameter_name"):
            module.lora_A.default.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        first, second = (model(**batch()).logits for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, other(**batch()).logits, rtol=1e-4, atol=1e-5)
    assert sum(n for name, n in counters(model).items() if name.startswith("lora on experts by PEFT")) == 4


def test_undone_and_copied():
    model = quantised()
    expected = model(**batch()).logits
    patch_model(model)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(**batch()).logits, expected, rtol=1e-4, atol=1e-5)
    assert "experts" in str(report(copied))
    unpatch_model(model)
    assert torch.equal(model(**batch()).logits, expected)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_training_after_evaluation(context):
    model = patch_model(quantised())
    with context():
        expected = model(**batch(), use_cache=False).logits
    logits, found = gradients(model)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert found["embeddings"].isfinite().all()
