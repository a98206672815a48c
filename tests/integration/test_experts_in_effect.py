"""Which experts are fastft's: classes, gates and dtypes that rule it out, what comes after patching, and the report."""

from __future__ import annotations

import copy

import pytest
import torch
from memory_cases import LAYERS
from patch_cases import counters
from peft import LoraConfig, get_peft_model
from tiny_models import packed_batch, tiny_model
from torch.func import functional_call
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fastft import patch_model, report
from fastft.errors import UnsupportedOptionError
from fastft.modules.checkpointing import memories
from fastft.modules.expert_layout import find_gate

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def batch():
    return {"input_ids": packed_batch([15])["input_ids"]}


def experts_of(model):
    return [module for module in model.modules() if hasattr(type(module), "_apply_gate")]


def rows_of(model, op):
    return [(what, impl, count, reason) for name, what, impl, count, reason in report(model).rows() if name == op]


# ------------------------------------------------------------------------------------------------------------ gates


class Clamped(Qwen3MoeExperts):
    """As DeepSeek-V4 does it."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class Optional(Qwen3MoeExperts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate * getattr(self, "temperature", 1.0)) * up


def experts(cls=Qwen3MoeExperts, **attributes):
    model = tiny_model("qwen3_moe", **MOE)
    module = cls(model.config)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_the_plain_gate_is_known():
    assert find_gate(experts()).activation == "silu"


@pytest.mark.parametrize("limit", [7.0, 16.0, 1e3, 1e6])
def test_a_clamp_is_seen_wherever_it_is(limit):
    assert find_gate(experts(Clamped, limit=limit)) is None


def test_a_limit_that_no_known_gate_uses_is_not_overlooked():
    assert find_gate(experts(limit=10.0)) is None


@pytest.mark.parametrize("attributes", [{}, {"temperature": 2.0}])
def test_a_gate_that_reads_more_of_its_module_is_not_told_by_numbers(attributes):
    assert find_gate(experts(Optional, **attributes)) is None


def test_a_gate_of_one_module_alone_is_not_fused():
    module = experts()
    module._apply_gate = lambda gate_up: gate_up.chunk(2, -1)[0]
    assert find_gate(module) is None


# ------------------------------------------------------------------------------------------------ classes and dtypes


class Wrapped(Qwen3MoeExperts):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_a_class_that_builds_on_one_stays_stock_and_is_reported(implementation):
    model = tiny_model("qwen3_moe", **MOE)
    model.set_experts_implementation(implementation)
    model.model.layers[0].mlp.experts.__class__ = Wrapped
    expected = model(**batch()).logits
    patch_model(model)
    torch.testing.assert_close(model(**batch()).logits, expected, rtol=1e-4, atol=1e-5)
    assert [row[:3] for row in rows_of(model, "experts")] == [("replaced", "reference", 1), ("skipped", "stock", 1)]
    with pytest.raises(UnsupportedOptionError, match="a forward of its own"):
        patch_model(model, experts="loop")


def mixed_dtypes():
    model = tiny_model("gpt_oss", **MOE, layer_types=["full_attention"] * 2, attn_implementation="eager")
    for module in experts_of(model):
        module.down_proj_bias = torch.nn.Parameter(module.down_proj_bias.to(torch.bfloat16))
    return model


def test_weights_of_two_dtypes_are_refused_by_name_and_reported():
    with pytest.raises(UnsupportedOptionError, match="differ in dtype"):
        patch_model(mixed_dtypes(), experts="loop")
    (row,) = rows_of(patch_model(mixed_dtypes()), "experts")
    assert row[0] == "skipped" and "down_proj_bias bfloat16" in row[3]


def test_weights_that_change_after_patching_go_to_the_implementation_before():
    model = patch_model(tiny_model("qwen3_moe", **MOE, num_hidden_layers=1))
    hidden, indices, weights = torch.randn(5, 32), torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)
    module = experts_of(model)[0].bfloat16()
    out = module(hidden, indices, weights)
    assert out.dtype == hidden.dtype and counters(model)["experts: reference"] == 1
    module.down_proj.data = module.down_proj.data.float()
    found = module(hidden, indices, weights)  # the one before casts
    torch.testing.assert_close(found, out, rtol=0.02, atol=0.02)
    assert counters(model)["experts: reference"] == 1
    assert any(name.startswith("experts by the previous implementation: weights differ") for name in counters(model))


def test_unaligned_sizes_are_refused_by_name():
    model = tiny_model("qwen3_moe", **MOE | {"moe_intermediate_size": 12}).bfloat16()
    with pytest.raises(UnsupportedOptionError, match="multiples of 16 bytes"):
        patch_model(model, experts="grouped_mm")


def test_functional_gradients_are_those_of_stock():
    model = tiny_model("qwen3_moe", **MOE, num_hidden_layers=1)
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return functional_call(model, parameters, (), batch()).logits.square().mean()

    expected = torch.func.grad(loss)(parameters)
    patch_model(model, rms_norm=False, rope=False)
    found = torch.func.grad(loss)(parameters)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert counters(model)["experts by the previous implementation: torch.func takes the gradients"] == 1


# ----------------------------------------------------------------------------------------------- adapters, by report


def with_adapters(model):
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=BOTH, init_lora_weights=False)
    return get_peft_model(model, config)


def test_wrappers_that_came_after_patching_are_reported_as_what_they_will_be():
    model = with_adapters(patch_model(tiny_model("qwen3_moe", **MOE)))
    before = rows_of(model, "lora")
    model(**batch())
    assert rows_of(model, "lora") == before and ("replaced", "fused") in [row[:2] for row in before]
    assert "call patch_model again" not in str(report(model))


def test_another_implementation_reaches_experts_with_adapters():
    model = patch_model(with_adapters(tiny_model("qwen3_moe", **MOE)))
    expected = model(**batch()).logits
    assert counters(model)["lora on experts"] == 2
    model.get_base_model().set_experts_implementation("eager")
    torch.testing.assert_close(model(**batch()).logits, expected, rtol=1e-4, atol=1e-5)
    found = counters(model)
    assert found["lora on experts"] == 2
    assert found["lora on experts by PEFT: 'eager' was selected after patching"] == 2


def test_adapters_in_fp32_over_weights_in_bf16():
    stock = with_adapters(tiny_model("qwen3_moe", **MOE).bfloat16())
    for name, parameter in stock.named_parameters():
        if "experts" in name and "lora_" in name:
            parameter.data = parameter.data.float()
    model = patch_model(copy.deepcopy(stock))
    torch.testing.assert_close(model(**batch()).logits, stock(**batch()).logits, rtol=0.05, atol=0.05)
    assert counters(model)["lora on experts"] == 2


def test_disabled_while_merged_and_hooks_inside_are_pefts():
    model = patch_model(with_adapters(tiny_model("qwen3_moe", **MOE)))
    with model.disable_adapter():
        plain = model(**batch()).logits
    model.merge_adapter()
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch()).logits, plain, rtol=1e-4, atol=1e-5)
    assert counters(model)["lora on experts by PEFT: adapters are disabled, and merged"] == 2
    inner = model.get_base_model().model.layers[0].mlp.experts.base_layer
    seen = []
    inner.register_forward_hook(lambda *_: seen.append(1))
    model(**batch())
    assert seen == [1] and counters(model)["lora on experts by PEFT: a wrapper has hooks or a forward of its own"] == 1


# -------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_layers_tell_whenever_checkpointing_is_switched_on(family, when):
    model = tiny_model(family, num_hidden_layers=LAYERS, **(MOE if family == "qwen3_moe" else {})).train()
    steps = [
        lambda: model.gradient_checkpointing_enable({"use_reentrant": False}),
        lambda: patch_model(model, checkpointing="selective"),
    ]
    for step in steps if when == "before" else reversed(steps):
        step()
    model(**batch()).logits.sum().backward()
    assert report(model).counters["layer kept in part"] == LAYERS
    assert not any("by its operators" in name for name in report(model).counters)


def test_layers_tell_where_a_budget_switches_them_on():
    model = patch_model(tiny_model("qwen3", num_hidden_layers=LAYERS), memory_budget=2**32)
    assert memories(model)
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    assert all(function.tells for function in functions)
