"""unpatch_model restores everything, and patching again is safe at any time."""

from __future__ import annotations

import pytest
import torch
from patch_cases import LENGTHS, assert_same_behaviour, attention_calls, behaviour, counters, rows, snapshot, train_step
from tiny_models import FAMILIES, model_from, packed_batch, tiny_config, tiny_model
from torch import nn

import fastft
from fastft.errors import PatchConflictError


@pytest.mark.parametrize("family", [*FAMILIES, "phi3"])
def test_unpatch_restores_every_attribute_hook_and_config(family: str) -> None:
    model = tiny_model(family)
    backbone = model.model
    backbone.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    backbone.register_forward_hook(lambda module, args, output: None)
    model.model.layers[0].register_forward_hook(lambda *args: None, with_kwargs=True, always_call=True)
    expected = behaviour(model)
    before = snapshot(model)
    assert fastft.patch_model(model) is model
    patched = snapshot(model)
    assert patched != before  # the comparison sees what a patch does
    assert patched["state_dict"] == before["state_dict"] and patched["modules"] == before["modules"]
    model(**packed_batch(LENGTHS)).loss.backward()
    model.generate(rows(), max_new_tokens=2)
    model.zero_grad()
    assert fastft.unpatch_model(model) is model
    after = snapshot(model)
    assert {name for name in before if after.get(name) != before[name]} == set()
    assert after.keys() == before.keys()
    assert_same_behaviour(model, expected)


def test_classes_and_state_dict_stay_while_patched() -> None:
    model = tiny_model("qwen3")
    classes = [type(module) for module in model.modules()]
    fastft.patch_model(model)
    for module, cls in zip(model.modules(), classes, strict=True):
        if cls.__name__ == "Qwen3DecoderLayer":  # a subclass that goes by the same name
            assert isinstance(module, cls) and type(module) is not cls
            assert (type(module).__module__, type(module).__qualname__) == (cls.__module__, cls.__qualname__)
        else:
            assert type(module) is cls
    fastft.unpatch_model(model)
    assert [type(module) for module in model.modules()] == classes


def test_unpatch_leaves_an_unpatched_model_alone() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    fastft.unpatch_model(model)
    assert snapshot(model) == before


def test_changes_of_the_config_are_carried_over() -> None:
    config = tiny_config("llama", bos_token_id=1)
    config.id2label = {0: "no"}
    model = model_from(config)
    fastft.patch_model(model)
    model.config.use_cache = False
    model.config.note = "new"
    model.config.id2label[1] = "yes"  # in place, which identity would not show
    del model.config.bos_token_id
    assert config.use_cache and not hasattr(config, "note") and config.id2label == {0: "no"}
    config.pad_token_id = 5  # by somebody who holds the former config
    fastft.unpatch_model(model)
    assert model.config is config and model.model.config is config
    assert config.use_cache is False and config.note == "new" and config.id2label == {0: "no", 1: "yes"}
    assert "bos_token_id" not in config.__dict__
    assert config.pad_token_id == 5
    assert config._attn_implementation == "sdpa"


def test_an_attention_implementation_chosen_while_patched_is_kept() -> None:
    model = fastft.patch_model(tiny_model("llama"))
    model.set_attn_implementation("eager")
    fastft.unpatch_model(model)
    assert model.config._attn_implementation == "eager"


def test_patching_again_selects_fastfts_attention_again() -> None:
    model = fastft.patch_model(tiny_model("llama"))
    model.set_attn_implementation("eager")
    train_step(model)
    assert not attention_calls(model)
    fastft.patch_model(model)
    train_step(model)
    assert attention_calls(model) == 2
    fastft.unpatch_model(model)
    assert model.config._attn_implementation == "eager"


def test_five_calls_change_nothing_more() -> None:
    model = fastft.patch_model(tiny_model("qwen2"))
    first = snapshot(model)
    train_step(model)
    counted = counters(model)
    for _ in range(4):
        assert fastft.patch_model(model) is model
    model.zero_grad()
    assert snapshot(model) == first
    assert counters(model) == counted  # not started anew


def test_other_options_plan_anew() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    fastft.patch_model(model)
    fastft.patch_model(model, rope=False)
    train_step(model)
    assert "rope" not in counters(model) and counters(model)["rms_norm"] == 5
    assert len(model.model._forward_pre_hooks) == 1
    fastft.unpatch_model(model)
    assert snapshot(model) == before


def test_patch_unpatch_patch() -> None:
    model = tiny_model("mistral")
    fastft.patch_model(fastft.unpatch_model(fastft.patch_model(model)))
    train_step(model)
    assert attention_calls(model) == 2 and counters(model)["batches: packed, positions restart"] == 1


def test_a_module_put_in_later_is_patched_by_the_second_call() -> None:
    model = fastft.patch_model(tiny_model("llama"))
    fresh = type(model.model.norm)(32)
    model.model.norm = fresh
    assert len([item for item in fastft.report(model).replaced if item.op == "rms_norm"]) == 4
    fastft.patch_model(model)
    train_step(model)
    assert counters(model)["rms_norm"] == 5
    assert "forward" in fresh.__dict__


def test_parts_patched_on_their_own_become_one() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    fastft.patch_model(model.model, rope=False)
    fastft.patch_model(model)
    train_step(model)
    assert counters(model)["rope"] == 2
    fastft.unpatch_model(model)
    assert snapshot(model) == before


def test_two_models_that_share_a_backbone() -> None:
    first, second = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    second.model = first.model
    stock = behaviour(first)
    fastft.patch_model(first)
    fastft.patch_model(second)  # its backbone is patched already
    train_step(second)
    assert counters(first) == counters(second) and attention_calls(first) == 2
    fastft.unpatch_model(second)
    assert "_fastft" not in first.model.__dict__ and "forward" not in first.model.norm.__dict__
    fastft.unpatch_model(first)
    first.load_state_dict(tiny_model("llama", seed=0).state_dict())
    assert_same_behaviour(first, stock)


def test_a_forward_replaced_over_fastfts_is_refused() -> None:
    model = fastft.patch_model(tiny_model("llama"))
    norm = model.model.norm
    ours = norm.forward
    norm.forward = lambda x: ours(x)
    patched = snapshot(model)
    assert fastft.patch_model(model) is model  # nothing to do: fastft's forward still runs
    with pytest.raises(PatchConflictError, match=r"model\.norm"):
        fastft.unpatch_model(model)
    with pytest.raises(PatchConflictError, match="undo that"):
        fastft.patch_model(model, rope=False)
    assert snapshot(model) == patched  # refused before anything was changed
    norm.forward = ours
    fastft.unpatch_model(model)
    assert "forward" not in norm.__dict__


def test_nothing_keeps_an_unpatched_model_alive() -> None:
    import gc
    import weakref

    model = fastft.patch_model(tiny_model("llama"))
    train_step(model)
    fastft.unpatch_model(model)
    config = weakref.ref(model.config)
    patched = fastft.patch_model(tiny_model("llama"))
    gone = [weakref.ref(model), weakref.ref(patched), weakref.ref(patched._modules["model"].__dict__["_fastft"].shared)]
    del model, patched
    gc.collect()
    assert [reference() for reference in (*gone, config)] == [None] * 4


def test_a_norm_without_weight_and_frozen_norms() -> None:
    model = tiny_model("llama")
    bare = model.model.norm
    del bare.weight
    bare.register_parameter("weight", None)
    bare.forward = lambda x: x
    for layer in model.model.layers:
        layer.input_layernorm.weight.requires_grad_(False)
    fastft.patch_model(model)
    skipped = [item for item in fastft.report(model).skipped if item.op == "rms_norm"]
    assert [item.fqn for item in skipped] == ["model.norm"]
    model(**packed_batch(LENGTHS)).loss.backward()
    assert model.model.layers[0].input_layernorm.weight.grad is None
    assert model.model.layers[0].post_attention_layernorm.weight.grad is not None
    assert counters(model)["rms_norm"] == 4


def test_tied_weights_stay_tied() -> None:
    model = fastft.patch_model(tiny_model("llama", tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    train_step(model)
    fastft.unpatch_model(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_module_another_library_changed_is_skipped() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = nn.Linear(32, 64)
    del attention.q_proj
    fastft.patch_model(model)
    skipped = {(item.fqn, item.op) for item in fastft.report(model).skipped if "q_proj" in item.reason}
    assert skipped == {("model.layers.0.self_attn", "rope"), ("model.layers.0.self_attn", "lora")}
    assert "forward" not in attention.__dict__
    assert torch.is_tensor(model.model.layers[1](torch.zeros(1, 3, 32), position_embeddings=model.model.rotary_emb(
        torch.zeros(1, 3, 32), torch.arange(3)[None])))  # fmt: skip
