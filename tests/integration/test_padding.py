"""Padded batches lose their padding in training, and give what stock gives at every token."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from packed_cases import attention_calls, counters, differences, pair
from padded_cases import DROPPED, LENGTHS, USED, alone, one_sequence, padded, train_once
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, tiny_config, tiny_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from fastft import patch_model, unpatch_model
from fastft.modules import attention
from fastft.modules.state import UsedPadding, state_of


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_dropped_and_the_step_is_that_of_stock(family: str, side: str) -> None:
    stock, model = pair(family)
    batch = padded(side)
    seen: list[int] = []
    original = attention.varlen_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "varlen_attention", lambda q, *a, **k: seen.append(len(q)) or original(q, *a, **k))
        assert differences(train_once(model, batch), train_once(stock, batch)) == []
    assert seen == [sum(LENGTHS)] * 2
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


def test_the_padding_after_a_row_may_be_predicted_by_its_last_token() -> None:
    stock, model = pair("llama")
    batch = padded("right")
    for row, length in enumerate(LENGTHS[1:], 1):
        batch["labels"][row, length] = 0
    assert differences(train_once(model, batch), train_once(stock, batch)) == []
    assert counters(model)[DROPPED] == 1


def test_the_index_to_ignore_is_the_callers() -> None:
    stock, model = pair("llama")
    batch = padded("left")
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, -1)
    losses = [each(**batch, ignore_index=-1).loss for each in (model, stock)]
    torch.testing.assert_close(*losses)
    assert counters(model)[DROPPED] == 1


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def _with_another_forward(model: Any) -> Any:
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    return model


@pytest.mark.parametrize("late", [False, True], ids=["patched first", "patched last"])
@pytest.mark.parametrize("wrap", [_compiled, _with_another_forward])
def test_labels_are_seen_through_whatever_lies_over_the_model(wrap: Any, late: bool) -> None:
    """Trainers wrap a model's forward, put another in its place, or compile it, before or after patching."""
    stock = tiny_model("llama", initializer_range=0.2)
    model = copy.deepcopy(stock)
    outer = wrap(model if late else patch_model(model, lora=False))
    patch_model(model, lora=False)
    asking = padded("right")
    asking["labels"] = asking["input_ids"].clone()
    for batch, name in ((padded("left"), DROPPED), (padded("left", first_tokens=True), USED), (asking, USED)):
        before = counters(model).get(name, 0)
        torch.testing.assert_close(outer(**batch).loss, stock(**batch).loss)
        assert counters(model)[name] == before + 1


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("return_dict", [True, False])
def test_outputs_come_back_in_their_places_with_zeros_at_the_padding(embedded: bool, return_dict: bool) -> None:
    stock, model = pair("mistral")
    batch = padded("left")
    mask = batch["attention_mask"]
    if embedded:
        batch["inputs_embeds"] = stock.model.embed_tokens(batch.pop("input_ids"))
    batch |= {"position_ids": torch.arange(12).expand(4, -1) + 3, "return_dict": return_dict}
    got, expected = (each(**batch)[1] for each in (model, stock))
    torch.testing.assert_close(got[mask != 0], expected[mask != 0], rtol=1e-4, atol=1e-5)
    assert not got[mask == 0].any() and expected[mask == 0].any()
    assert counters(model)[DROPPED] == 1


def test_training_without_gradients_needs_to_be_told_of_the_cache() -> None:
    """As TRL computes the log-probabilities of a reference."""
    _, model = pair("llama")
    batch = padded("left")
    with torch.no_grad():
        model(**batch)
        assert DROPPED not in counters(model)
        model(**batch, use_cache=False)
    assert counters(model)[DROPPED] == 1


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


@pytest.mark.parametrize("recorded", [False, True])
def test_a_tuple_of_outputs(recorded: bool) -> None:
    """Which heads of older models ask their backbone for."""
    stock = tiny_model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    model = patch_model(copy.deepcopy(stock))
    batch = padded("right")
    del batch["labels"]
    mask = batch["attention_mask"]
    state_of(model.model).shared.used_padding = UsedPadding(mask, torch.zeros_like(mask, dtype=torch.bool))
    got, expected = (x.model(**batch, return_dict=False, output_router_logits=recorded) for x in (model, stock))
    torch.testing.assert_close(got[0][mask != 0], expected[0][mask != 0], rtol=1e-4, atol=1e-5)
    assert (DROPPED in counters(model)) is not recorded
    assert ("router logits are recorded in a tuple" in " ".join(counters(model))) is recorded
    assert [x.shape for x in got[-1]] == [x.shape for x in expected[-1]] if recorded else len(got) == 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_classification_heads(kind: Any, side: str) -> None:
    torch.manual_seed(0)
    stock = kind.from_config(tiny_config("llama", num_labels=3, classifier_dropout=0.0)).train()
    model = patch_model(copy.deepcopy(stock))
    batch = padded(side, pad_id=0)
    real = batch["attention_mask"] != 0
    by_row = kind is AutoModelForSequenceClassification
    labels = batch["input_ids"].remainder(3)
    batch["labels"] = torch.tensor([0, 2, 1, 1]) if by_row else labels.masked_fill(~real, -100)
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    assert counters(model)[DROPPED] == 1
    # Another pad id than the config's makes a row be judged by its padding; labels of padding ask for it, too.
    other = padded("right")
    other["labels"] = batch["labels"] if by_row else labels
    assert torch.equal(model(**other).loss, stock(**other).loss)
    assert counters(model)[DROPPED] == 1 and counters(model)[USED] == 1


def test_copies_and_the_way_back() -> None:
    stock, model = pair("llama")
    copied = copy.deepcopy(model)
    train_once(copied, padded("right"))
    assert counters(copied)[DROPPED] == 1 and DROPPED not in counters(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    expected = train_once(stock, padded("right"))
    assert differences(train_once(loaded, padded("right")), expected) == []
    unpatch_model(model)
    assert not model._forward_pre_hooks and not model.model._forward_pre_hooks and not model.model._forward_hooks
    got = train_once(model, padded("right"))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


# ------------------------------------------------------------------------ a caller who uses no output at padding


def promised(mode: str) -> tuple[Any, Any]:
    stock, model = pair("llama", unpad=True)
    return stock.train(mode == "training"), model.train(mode == "training")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_a_promise_needs_no_labels(mode: str, side: str) -> None:
    stock, model = promised(mode)
    batch = padded(side)
    del batch["labels"]
    expected, got = (each(**batch, use_cache=False).logits for each in (stock, model))
    real = batch["attention_mask"] != 0
    torch.testing.assert_close(got[real], expected[real], rtol=2e-5, atol=2e-6)
    assert not got[~real].any() and counters(model)[DROPPED] == 1
    with torch.no_grad():
        model(**batch, use_cache=True)
        model(**batch, output_hidden_states=True, use_cache=False)
    assert counters(model)[DROPPED] == 1


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("labels", ["at the padding", "at the first tokens"])
def test_a_promise_does_not_change_the_loss(labels: str, mode: str) -> None:
    stock, model = promised(mode)
    batch = padded("left", first_tokens=True)  # which padding predicts
    if labels == "at the padding":
        batch = padded("right")
        batch["labels"] = batch["input_ids"]
    expected = train_once(stock, batch, use_cache=False)
    assert differences(train_once(model, batch, use_cache=False), expected) == []
    assert counters(model)[USED] == 1 and DROPPED not in counters(model)


@pytest.mark.parametrize("unknown", ["a hook", "logits_to_keep"])
def test_a_loss_that_is_not_known_is_not_promised_away(unknown: str) -> None:
    stock, model = pair("llama", unpad=True)
    batch = padded("left", first_tokens=True)
    options = {"logits_to_keep": 12} if unknown == "logits_to_keep" else {}
    if unknown == "a hook":
        model.register_forward_pre_hook(lambda module, args: None)
    losses = [each(**batch, **options).loss for each in (stock, model)]
    torch.testing.assert_close(losses[1], losses[0])
    assert DROPPED not in counters(model)


def test_generation_under_a_promise() -> None:
    stock, model = pair("llama", unpad=True)
    batch = padded("left")
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for use_cache in (True, False):
        options = {"max_new_tokens": 6, "do_sample": False, "use_cache": use_cache}
        assert torch.equal(model.eval().generate(**given, **options), stock.eval().generate(**given, **options))
