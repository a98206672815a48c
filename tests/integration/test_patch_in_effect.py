"""The report tells what is in effect: adapters that come and go, modules put in later, another attention selected."""

from __future__ import annotations

import pytest
import torch
from described_devices import DESCRIBED
from patch_cases import counters, skipped_reasons, train_step
from peft import LoraConfig, get_peft_model
from tiny_models import packed_batch, tiny_model

import fastft
from fastft import choices, plan
from fastft.errors import UnsupportedOptionError


def lora_rows(model):
    return {(what, count, reason) for op, what, _, count, reason in fastft.report(model).rows() if op == "lora"}


def adapted(model, **config):
    return get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"]} | config))


@pytest.mark.parametrize("lora", ["auto", "fused"])
def test_adapters_are_reported_when_they_are_there(lora):
    model = fastft.patch_model(tiny_model("llama"), lora=lora)
    assert lora_rows(model) == {("skipped", 4, plan.NO_ADAPTER)}
    assert all("forward" in layer.mlp.__dict__ for layer in model.model.layers)
    train_step(model)
    assert not any(name.startswith("lora") for name in counters(model))
    model = adapted(model)
    by_reason = {reason: (what, count) for what, count, reason in lora_rows(model)}
    assert by_reason.pop(plan.NO_ADAPTER) == ("skipped", 2)  # the MLPs
    ((reason, row),) = by_reason.items()
    assert row == ("replaced", 2) and reason.startswith("2 of 4 projections have an adapter; ")
    train_step(model)
    assert {name: n for name, n in counters(model).items() if name.startswith("lora")} == {"lora": 4}


def test_only_adapters_count_as_not_fused():
    model = fastft.patch_model(adapted(tiny_model("llama")))
    with model.disable_adapter(), torch.no_grad():
        model(**packed_batch((5, 7, 3)))
    assert counters(model)["lora not fused: adapters are disabled"] == 4  # q and v of two layers, not k
    assert not any("not a LoRA" in name for name in counters(model))


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_bias": True}, {"lora_dropout": 0.1}], ids=str)
def test_adapters_that_cannot_be_fused_are_refused_by_name(config):
    model = fastft.patch_model(adapted(tiny_model("llama"), **config), lora="fused")
    with pytest.raises(UnsupportedOptionError, match=r"lora='fused' cannot be honoured .*; use lora='auto'"):
        train_step(model.train())
    train_step(fastft.patch_model(model, lora="auto"))


def test_a_layer_appended_after_patching():
    model = fastft.patch_model(tiny_model("llama"))
    model.model.layers.append(tiny_model("llama").model.layers[0])
    added = {key: reason for key, reason in skipped_reasons(model).items() if "added after patching" in reason}
    ops = [op for fqn, op in added if fqn.startswith("model.layers.2")]
    assert len(ops) == len(added) and set(ops) == {"attention", "rope", "rms_norm", "add_rms_norm", "gated_mlp", "lora"}
    assert not any(item.fqn.startswith("model.layers.2") for item in fastft.report(model).replaced)
    fastft.patch_model(model)
    assert not skipped_reasons(model)


def test_another_attention_selected_after_patching():
    model = fastft.patch_model(tiny_model("llama"))
    model.set_attn_implementation("eager")
    skipped = skipped_reasons(model)
    assert {op for _, op in skipped} == {"packing", "attention"} and len(skipped) == 3
    assert set(skipped.values()) == {"'eager' was selected after patching; call patch_model again"}
    fastft.patch_model(model)
    assert not skipped_reasons(model)


def test_a_forward_put_back_after_patching():
    model = fastft.patch_model(tiny_model("llama"))
    del model.model.norm.forward
    assert skipped_reasons(model) == {("model.norm", "rms_norm"): "its forward was put back; call patch_model again"}


def test_fp32_weights_name_the_engine_under_autocast_too(monkeypatch):
    model = fastft.patch_model(tiny_model("llama"))
    monkeypatch.setattr(choices, "probe", lambda device: DESCRIBED["H200"])
    (reason,) = {item.reason for item in fastft.report(model).replaced if item.op == "attention"}
    assert reason.endswith("; under bf16 autocast: fa2")
    model.to(torch.bfloat16)
    (item,) = {(i.impl, "autocast" in i.reason) for i in fastft.report(model).replaced if i.op == "attention"}
    assert item == ("fa2", False)
