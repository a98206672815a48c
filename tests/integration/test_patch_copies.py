"""Copies of a patched model: deepcopy, pickle, checkpoints."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from patch_cases import LENGTHS, assert_same_behaviour, attention_calls, behaviour, counters, snapshot, train_step
from tiny_models import FAMILIES, packed_batch, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

import fastft


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deepcopy_is_patched_and_independent(family: str) -> None:
    model = fastft.patch_model(tiny_model(family))
    train_step(model)
    counted = counters(model)
    twin = copy.deepcopy(model)
    assert counters(twin) == counted
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    batch = packed_batch(LENGTHS)
    theirs = twin(**batch).loss
    theirs.backward()
    assert counters(model) == counted
    assert attention_calls(twin) == counted["attention: sdpa"] + 2
    assert counters(twin)["rms_norm"] > counted["rms_norm"]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())  # its own weights were used
    assert not torch.isclose(theirs, model(**batch).loss, rtol=1e-3)


def test_unpatching_a_deepcopy_leaves_the_original_patched() -> None:
    model = fastft.patch_model(tiny_model("llama"))
    twin = copy.deepcopy(model)
    patched = snapshot(model)
    fastft.unpatch_model(twin)
    assert snapshot(model) == patched
    assert_same_behaviour(twin, behaviour(tiny_model("llama")))
    assert "(not patched)" in str(fastft.report(twin))
    assert twin.config._attn_implementation == "sdpa"
    assert not twin.model._forward_pre_hooks and not twin.model._forward_hooks
    train_step(model)
    assert attention_calls(model) == 2


def _by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _by_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("load", [_by_pickle, _by_torch_save])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_pickled_model_comes_back_unpatched_and_can_be_patched_again(
    family: str, load: Callable[[nn.Module], nn.Module]
) -> None:
    model = fastft.patch_model(tiny_model(family))
    loaded = load(model)
    assert "(not patched)" in str(fastft.report(loaded)) and not fastft.report(loaded).replaced
    assert_same_behaviour(loaded, behaviour(tiny_model(family)))
    assert not counters(loaded)

    fastft.patch_model(loaded)
    assert len(loaded.model._forward_pre_hooks) == 1 and len(loaded.model._forward_hooks) == 1
    train_step(loaded)
    train_step(model)
    assert counters(loaded) == counters(model)

    unpatched = fastft.unpatch_model(load(model))
    for module in unpatched.modules():
        assert "forward" not in module.__dict__ and "_fastft" not in module.__dict__
    assert not unpatched.model._forward_pre_hooks and not unpatched.model._forward_hooks


def test_checkpoints_are_those_of_stock(tmp_path: Path) -> None:
    stock, model = tiny_model("qwen2"), fastft.patch_model(tiny_model("qwen2"))
    assert list(model.state_dict()) == list(stock.state_dict())
    model.save_pretrained(tmp_path / "patched")
    stock.save_pretrained(tmp_path / "stock")
    for name in ("config.json", "generation_config.json"):
        text = (tmp_path / "patched" / name).read_text()
        assert "fastft" not in text
        assert json.loads(text) == json.loads((tmp_path / "stock" / name).read_text())
    assert sorted(p.name for p in (tmp_path / "patched").iterdir()) == sorted(
        p.name for p in (tmp_path / "stock").iterdir()
    )
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), model.parameters(), strict=True))


def test_accelerate_finds_the_layers_by_their_class_names() -> None:
    from accelerate.utils.dataclasses import get_module_class_from_name

    model = tiny_model("llama")
    names = model._no_split_modules
    expected = {name: get_module_class_from_name(model, name) for name in names}
    assert expected and None not in expected.values()
    fastft.patch_model(model)
    for name, cls in expected.items():
        found = get_module_class_from_name(model, name)
        assert found.__name__ == cls.__name__ and issubclass(found, cls)
        # FSDP wraps the instances of what is found: every layer has to be one.
        wrapped = [module for module in model.modules() if isinstance(module, found)]
        assert wrapped == [module for module in model.modules() if isinstance(module, cls)] != []
    fastft.unpatch_model(model)
    assert {name: get_module_class_from_name(model, name) for name in names} == expected
