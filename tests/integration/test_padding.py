"""Padded batches lose their padding in training, and give what stock gives at every token."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from packed_cases import attention_calls, counters, differences, pair
from padded_cases import DROPPED, LENGTHS, alone, one_sequence, padded, train_once
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, tiny_config, tiny_model
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from fastft import patch_model, unpatch_model
from fastft.modules.attention import AttentionName


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_dropped_and_the_step_is_that_of_stock(family: str, side: str) -> None:
    stock, model = pair(family)
    batch = padded(side)
    seen: list[tuple[int, ...]] = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append(tuple(args[0].shape)))
    assert differences(train_once(model, batch), train_once(stock, batch)) == []
    assert seen == [(1, sum(LENGTHS), 32)]
    found = counters(model)
    assert found[DROPPED] == 1 and found["padding dropped, in tokens"] == 4 * 12 - sum(LENGTHS)
    assert attention_calls(model) == 2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 11}, {"num_items_in_batch": torch.tensor(11)}])
def test_the_sum_of_separate_rows(side: str, options: dict[str, Any]) -> None:
    stock, model = pair("llama")
    batch = padded(side)
    got, expected = train_once(model, batch, **options), alone(stock, batch)
    scale = int((batch["labels"][:, 1:] != -100).sum()) / 11 if options else 1.0
    assert differences(got, {name: value * scale for name, value in expected.items()}) == []


def test_rows_that_see_each_other_would_be_noticed() -> None:
    """The mutant: one sequence where there are four."""
    stock, model = pair("llama")
    batch = padded("right")
    with one_sequence():
        assert differences(train_once(model, batch), train_once(stock, batch)) != []


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_under_peft_and_checkpointing(checkpointing: dict[str, bool]) -> None:
    stock, model = pair("qwen3", lora="auto")
    trains = []
    for each in (model, stock):
        torch.manual_seed(2)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        wrapped = get_peft_model(each, config)
        wrapped.enable_input_require_grads()
        wrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        trains.append(train_once(wrapped, padded("left")))
    assert differences(*trains) == []
    assert counters(model)[DROPPED] == 1 and counters(model)["lora"] > 0


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: get_peft_model(model, LoraConfig(r=2))])
def test_labels_of_padding_keep_the_batch_as_it_is(wrap: Any) -> None:
    """As scripts have them that pass labels=input_ids: stock trains on them."""
    stock, model = (wrap(each) for each in pair("llama"))
    batch = padded("right")
    batch["labels"] = batch["input_ids"].clone()
    got, expected = train_once(model, batch), train_once(stock, batch)
    assert torch.equal(got["loss"], expected["loss"])
    assert counters(model)["batches: stock, padding that is a target"] == 1
    shifted = torch.full_like(batch["labels"], -100)
    shifted[1, 8] = 5  # predicted at padding
    assert torch.isfinite(model(**{**batch, "labels": batch["labels"], "shift_labels": shifted}).loss)
    assert counters(model)["batches: stock, padding that is a target"] == 2


def test_the_padding_after_a_row_may_be_predicted_by_its_last_token() -> None:
    stock, model = pair("llama")
    batch = padded("right")
    for row, length in enumerate(LENGTHS[1:], 1):
        batch["labels"][row, length] = 0
    assert differences(train_once(model, batch), train_once(stock, batch)) == []
    assert counters(model)[DROPPED] == 1


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: get_peft_model(model, LoraConfig(r=2))])
def test_a_first_token_after_padding_is_no_target(wrap: Any) -> None:
    """Stock predicts it from padding, which no row does by itself."""
    stock, model = (wrap(each) for each in pair("llama"))
    batch = padded("left", first_tokens=True)
    labels = batch["labels"].clone()
    got = train_once(model, batch)
    assert torch.equal(batch["labels"], labels), "the caller's labels were written"
    assert not torch.allclose(got["loss"], train_once(stock, batch)["loss"])
    without = train_once(model, padded("left"))
    assert torch.equal(got["loss"], without["loss"]) and counters(model)[DROPPED] == 2


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("return_dict", [True, False])
def test_the_backbone_alone_gives_hidden_states_with_zeros_at_the_padding(embedded: bool, return_dict: bool) -> None:
    stock, model = (each.model for each in pair("mistral"))
    batch = padded("left")
    mask = batch["attention_mask"]
    positions = torch.arange(12).expand(4, -1) + 3
    given = {"inputs_embeds": stock.embed_tokens(batch["input_ids"])} if embedded else {"input_ids": batch["input_ids"]}
    kwargs = {**given, "attention_mask": mask, "position_ids": positions, "return_dict": return_dict}
    got, expected = model(**kwargs), stock(**kwargs)
    assert isinstance(got, tuple) is not return_dict
    torch.testing.assert_close(got[0][mask != 0], expected[0][mask != 0], rtol=1e-4, atol=1e-5)
    assert not got[0][mask == 0].any()
    assert counters(model)[DROPPED] == 1


def _with_gaps(batch: dict[str, Any]) -> dict[str, Any]:
    batch["attention_mask"][0, 5] = 0
    batch["labels"][0, 5:7] = -100
    return batch


def _with_restarts(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "position_ids": torch.arange(12).remainder(6).expand(4, -1)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_with_gaps, "a mask with gaps inside of a row"),
        (_with_restarts, "padded rows whose positions do not rise by one"),
        (lambda batch: {**batch, "output_hidden_states": True}, "hidden_states are recorded"),
        (lambda batch: {**batch, "use_cache": True}, "padded rows outside training"),
        (lambda batch: {**batch, "cache_position": torch.arange(12)}, "'cache_position' cannot be mapped"),
        (lambda batch: {**batch, "token_type_ids": torch.zeros(4, 12)}, "'token_type_ids' cannot be mapped"),
    ],
)
def test_what_cannot_lose_its_padding_stays_stock(change: Any, reason: str) -> None:
    stock, model = pair("llama")
    batch = change(padded("right"))
    got, expected = train_once(model, batch), train_once(stock, batch)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert any(name.startswith("batches: stock") and reason in name for name in counters(model)), counters(model)


def test_training_without_gradients_needs_to_be_told_of_the_cache() -> None:
    """As TRL computes the log-probabilities of a reference."""
    _, model = pair("llama")
    batch = padded("left")
    with torch.no_grad():
        model(**batch)
        assert DROPPED not in counters(model)
        model(**batch, use_cache=False)
    assert counters(model)[DROPPED] == 1


def test_packing_false_keeps_the_padding() -> None:
    stock, model = pair("llama", packing=False)
    batch = padded("right")
    assert torch.equal(model(**batch).loss, stock(**batch).loss)
    assert not any("dropped" in name for name in counters(model))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_router_logits_go_back_to_their_rows(family: str) -> None:
    options = {
        "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "router_aux_loss_coef": 0.5, "output_router_logits": True,
    }  # fmt: skip
    stock = tiny_model(family, **options)
    model = patch_model(copy.deepcopy(stock))
    batch = padded("right")
    got, expected = model(**batch), stock(**batch)
    assert counters(model)[DROPPED] == 1
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.aux_loss, expected.aux_loss)
    real = batch["attention_mask"].flatten() != 0
    for ours, theirs in zip(got.router_logits, expected.router_logits, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_classification_heads(kind: Any, side: str) -> None:
    torch.manual_seed(0)
    config = tiny_config("llama", num_labels=3, classifier_dropout=0.0)
    stock = kind.from_config(config).train()
    model = patch_model(copy.deepcopy(stock))
    batch = padded(side)
    real = batch["attention_mask"] != 0
    if kind is AutoModelForSequenceClassification:
        batch["labels"] = torch.tensor([0, 2, 1, 1])
    else:
        batch["labels"] = batch["labels"].remainder(3).masked_fill(~real, -100)
    losses = [each(**batch).loss for each in (model, stock)]
    torch.testing.assert_close(*losses)
    assert counters(model)[DROPPED] == 1


def test_an_unknown_family_with_padding_on_the_left_stays_stock() -> None:
    """Its positions may be counted from the first token, or from the first place: its code alone knows."""
    stock = tiny_model("opt", word_embed_proj_dim=32, ffn_dim=48, dropout=0.0)
    model = patch_model(copy.deepcopy(stock))
    for side, dropped in (("left", False), ("right", True)):
        assert differences(train_once(model, padded(side)), train_once(stock, padded(side))) == []
        assert (DROPPED in counters(model)) is dropped


def test_the_model_looks_as_before_to_those_who_inspect_it() -> None:
    stock, model = pair("llama")
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    copied = copy.deepcopy(model)
    assert copied.forward.__self__ is copied
    train_once(copied, padded("right"))
    assert counters(copied)[DROPPED] == 1 and DROPPED not in counters(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert differences(train_once(loaded, padded("right")), train_once(stock, padded("right"))) == []
    assert unpatch_model(model).forward.__func__ is type(model).forward
    assert "forward" not in model.__dict__ and not isinstance(model.config._attn_implementation, AttentionName)


def test_unpatching_below_a_wrapped_forward() -> None:
    """accelerate wraps the outermost forward, and goes on calling what was there."""
    stock, model = pair("llama")
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    patch_model(model, lora=False)  # changes nothing
    train_once(model, padded("right"))
    assert counters(model)[DROPPED] == 1
    unpatch_model(model)
    got, expected = train_once(model, padded("right")), train_once(stock, padded("right"))
    assert all(torch.equal(got[name], expected[name]) for name in expected)
