"""patch_model changes the model it is given and nothing else in the process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patch_cases import (
    LENGTHS,
    assert_same_behaviour,
    attention_calls,
    behaviour,
    counters,
    left_padded,
    library_snapshot,
    train_step,
)
from tiny_models import FAMILIES, model_from, packed_batch, tiny_config, tiny_model
from transformers import AutoModelForCausalLM

import fastft

_REBUILT: dict[str, Callable[[Any], Any]] = {
    "the same object": lambda config: config,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),
    "to_dict": lambda config: type(config).from_dict(config.to_dict()),
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_shares_its_config_with_a_patched_one_is_untouched(family: str, implementation: str) -> None:
    config = tiny_config(family, attn_implementation=implementation)
    patched, other = model_from(config, seed=0), model_from(config, seed=1)
    assert patched.config is config and other.config is config  # the hazard is there
    fields = {name: (id(value), str(value)) for name, value in config.__dict__.items()}
    expected = behaviour(other)
    fastft.patch_model(patched)
    train_step(patched)
    assert attention_calls(patched) == 2
    assert other.config is config and patched.config is not config
    assert {name: (id(value), str(value)) for name, value in config.__dict__.items()} == fields
    assert not counters(other)
    assert_same_behaviour(other, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("rebuild", _REBUILT)
def test_models_built_from_the_config_of_a_patched_model_behave_as_stock(rebuild: str, implementation: str) -> None:
    expected = behaviour(tiny_model("qwen2", seed=1, attn_implementation=implementation))
    patched = fastft.patch_model(tiny_model("qwen2", attn_implementation=implementation))
    config = _REBUILT[rebuild](patched.config)
    if rebuild == "to_dict":  # stock forgets the implementation, too
        config._attn_implementation = implementation
    elif rebuild == "pickle":
        assert type(config._attn_implementation) is str and config._attn_implementation == implementation
    other = model_from(config, seed=1)
    before = counters(patched)
    assert_same_behaviour(other, expected)
    assert "(not patched)" in str(fastft.report(other))
    assert counters(patched) == before
    fastft.unpatch_model(patched)
    assert_same_behaviour(other, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_models_loaded_with_the_config_of_a_patched_model_behave_as_stock(tmp_path: Path, implementation: str) -> None:
    expected = behaviour(tiny_model("llama", seed=1, attn_implementation=implementation))
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "other")
    patched = fastft.patch_model(tiny_model("llama", attn_implementation=implementation))
    assert_same_behaviour(AutoModelForCausalLM.from_pretrained(tmp_path / "other", config=patched.config), expected)
    patched.save_pretrained(tmp_path / "patched")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched", attn_implementation=implementation)
    assert_same_behaviour(reloaded, behaviour(tiny_model("llama", attn_implementation=implementation)))
    assert not counters(reloaded)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_of_the_patched_model_is_that_of_stock(family: str, implementation: str) -> None:
    stock = tiny_model(family, attn_implementation=implementation)
    patched = fastft.patch_model(tiny_model(family, attn_implementation=implementation))
    expected, actual = behaviour(stock), behaviour(patched)
    assert torch.equal(actual["greedy"], expected["greedy"])
    assert torch.equal(actual["static cache"], expected["static cache"])
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=2e-6, rtol=2e-5, msg=lambda m, name=name: f"{name}: {m}")
    # The comparison above can fail: without its mask a left-padded batch gives something else.
    with torch.no_grad():
        unmasked = stock(left_padded()["input_ids"]).logits
    assert (unmasked[0, 3:] - expected["padded logits"][:3]).abs().max() > 1e-4


def test_two_models_with_different_options_in_one_process() -> None:
    config = tiny_config("llama")
    everything, nothing_packed = model_from(config), model_from(config)
    fastft.patch_model(everything, rope=False)
    fastft.patch_model(nothing_packed, packing=False, rms_norm=False)
    stock = model_from(config)
    batch = packed_batch(LENGTHS)
    losses = [model(**batch, use_cache=False).loss for model in (everything, nothing_packed, stock)]
    torch.testing.assert_close(losses[0], losses[2])
    torch.testing.assert_close(losses[1], losses[2])
    assert attention_calls(everything) == 2 and "rope" not in counters(everything)
    assert counters(nothing_packed)["rope"] == 2 and not attention_calls(nothing_packed)
    assert "rms_norm" in counters(everything) and "rms_norm" not in counters(nothing_packed)
    assert not counters(stock)


def test_no_class_or_module_of_a_library_is_changed() -> None:
    models = {name: tiny_model(name) for name in [*FAMILIES, "phi3", "gpt2"]}
    for model in models.values():
        behaviour(model)
    before = library_snapshot()
    for model in models.values():
        fastft.patch_model(model)
        behaviour(model)
        fastft.unpatch_model(model)
    after = library_snapshot()
    changed = {name for name, value in before.items() if after.get(name) != value}
    added = {name for name in after.keys() - before.keys() if name.rsplit(".", 1)[0] in before}
    assert len(before) > 5000
    assert not changed and not added
