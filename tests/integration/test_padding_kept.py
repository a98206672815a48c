"""Padded batches that keep their padding: where an output there may be used, or the rows matter to somebody."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoder_families import tiny_decoder
from packed_cases import counters, differences, pair
from padded_cases import DROPPED, UNKNOWN, USED, padded, train_once
from peft import LoraConfig, PolyConfig, get_peft_model
from tiny_models import VOCAB, tiny_config, tiny_model
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForQuestionAnswering,
    LlamaForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastft import patch_model, report
from fastft.errors import UnsupportedOptionError
from fastft.modules.state import state_of


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: get_peft_model(model, LoraConfig(r=2))])
def test_labels_of_padding_keep_the_batch_as_it_is(wrap: Any) -> None:
    """As scripts have them that pass labels=input_ids: stock trains on them."""
    stock, model = (wrap(each) for each in pair("llama"))
    batch = padded("right")
    batch["labels"] = batch["input_ids"].clone()
    got, expected = train_once(model, batch), train_once(stock, batch)
    assert torch.equal(got["loss"], expected["loss"])
    assert counters(model)[USED] == 1
    shifted = torch.full_like(batch["labels"], -100)
    shifted[1, 8] = 5  # predicted at padding
    assert torch.isfinite(model(**{**batch, "labels": batch["labels"], "shift_labels": shifted}).loss)
    assert counters(model)[USED] == 2


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 28}])
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: get_peft_model(model, LoraConfig(r=2))])
def test_a_first_token_after_padding_that_is_a_target_keeps_the_batch_as_it_is(wrap: Any, options: dict) -> None:
    """Stock predicts it from padding, and counts it among the items of the batch."""
    stock, model = (wrap(each) for each in pair("llama"))
    batch = padded("left", first_tokens=True)
    got, expected = train_once(model, batch, **options), train_once(stock, batch, **options)
    assert torch.equal(got["loss"], expected["loss"]) and counters(model)[USED] == 1


def test_labels_that_the_model_does_not_see_keep_the_batch_as_it_is() -> None:
    """As under label smoothing or a loss function of one's own, where a trainer keeps them."""
    stock, model = pair("llama")
    batch = padded("right")
    del batch["labels"]
    assert torch.equal(model(**batch).logits, stock(**batch).logits)
    assert not any("dropped" in name for name in counters(model)) and UNKNOWN in " ".join(counters(model))


def test_a_backbone_by_itself_keeps_the_padding() -> None:
    """What its caller does with the hidden states is not known: not even after a head has announced its own wishes."""
    stock, model = pair("mistral")
    batch = padded("left")
    model(**batch), stock(**batch)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    got, expected = model.model(**given).last_hidden_state, stock.model(**given).last_hidden_state
    assert torch.equal(got, expected) and UNKNOWN in " ".join(counters(model))
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
        (lambda batch: {**batch, "task_ids": torch.zeros(4)}, "'task_ids' cannot be mapped"),
    ],
)
def test_what_cannot_lose_its_padding_stays_stock(change: Any, reason: str) -> None:
    stock, model = pair("llama")
    batch = change(padded("right"))
    got, expected = train_once(model, batch), train_once(stock, batch)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert any(name.startswith("batches: stock") and reason in name for name in counters(model)), counters(model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}}, "depend on the length"),
        ({"family": "opt", "word_embed_proj_dim": 32, "ffn_dim": 48, "layerdrop": 0.9}, "left out at random"),
    ],
)
def test_models_that_keep_their_padding(config: dict[str, Any], reason: str) -> None:
    family = config.pop("family", "llama")
    stock = tiny_model(family, **{"max_position_embeddings": 8, **config})
    model = patch_model(copy.deepcopy(stock))
    said = next(item.reason for item in report(model).replaced if item.op == "packing")
    assert "padding is kept: " in said and reason in said


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (LoraConfig(r=2, task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6], target_modules=["q_proj"]), "aLoRA"),
        (PolyConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), "kind 'poly'"),
    ],
)
def test_adapters_that_look_at_rows(adapter: Any, reason: str) -> None:
    losses = []
    models = pair("llama", lora="auto")
    for each in models:
        torch.manual_seed(3)
        batch = padded("right") if reason == "aLoRA" else {**padded("right"), "task_ids": torch.zeros(4).long()}
        losses.append(get_peft_model(each, adapter)(**batch).loss)
    assert torch.equal(*losses)
    assert reason in " ".join(counters(models[1])) and DROPPED not in counters(models[1])


def test_noise_on_the_embeddings_keeps_the_padding() -> None:
    _, model = pair("llama")
    model.model.embed_tokens.neftune_noise_alpha = 5.0
    model(**padded("right"))
    assert "NEFTune" in " ".join(counters(model)) and DROPPED not in counters(model)


@pytest.mark.parametrize("options", [{"packing": False}, {"unpad": False}])
def test_padding_is_kept_on_request(options: dict[str, Any]) -> None:
    stock, model = pair("llama", **options)
    batch = padded("right")
    assert torch.equal(model(**batch).loss, stock(**batch).loss)
    assert not any("dropped" in name for name in counters(model))


@pytest.mark.parametrize(
    ("family", "reason"), [("gpt_oss", "attention sinks"), ("lfm2", "mixes tokens besides attention")]
)
def test_a_promise_that_cannot_be_taken_up_is_refused(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"unpad=True cannot be honoured for model: .*{reason}"):
        patch_model(tiny_decoder(family), unpad=True)


def test_question_answering_keeps_the_padding() -> None:
    """Its softmax goes over all places of a row."""
    torch.manual_seed(0)
    stock = AutoModelForQuestionAnswering.from_config(tiny_config("llama")).train()
    with pytest.raises(UnsupportedOptionError, match="softmax of LlamaForQuestionAnswering goes over all places"):
        patch_model(copy.deepcopy(stock), unpad=True)
    model = patch_model(copy.deepcopy(stock))
    batch = padded("right")
    del batch["labels"]
    places = {"start_positions": torch.tensor([3, 1, 0, 2]), "end_positions": torch.tensor([5, 4, 0, 6])}
    assert torch.equal(model(**batch, **places).loss, stock(**batch, **places).loss)
    assert "no head of which fastft knows the outputs it uses" in str(report(model))


def test_an_unknown_family_with_padding_on_the_left_stays_stock() -> None:
    """Its positions may be counted from the first token, or from the first place: its code alone knows."""
    stock = tiny_model("opt", word_embed_proj_dim=32, ffn_dim=48, dropout=0.0)
    model = patch_model(copy.deepcopy(stock))
    for side, dropped in (("left", False), ("right", True)):
        assert differences(train_once(model, padded(side)), train_once(stock, padded(side))) == []
        assert (DROPPED in counters(model)) is dropped


def test_a_backbone_that_was_put_in_after_patching() -> None:
    stock, model = pair("llama")
    model.model = copy.deepcopy(stock.model)
    assert torch.equal(model(**padded("right")).loss, stock(**padded("right")).loss)


def test_an_announcement_is_for_one_forward() -> None:
    """Not even one that fails before the backbone leaves it behind."""
    stock, model = pair("llama")
    batch = padded("right")
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def fail(*_: Any) -> None:
        raise RuntimeError("once")

    handle = model.model.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(RuntimeError, match="once"):
        model(**batch)
    handle.remove()
    assert state_of(model).shared.used_padding is None
    assert torch.equal(model.model(**given).last_hidden_state, stock.model(**given).last_hidden_state)


class OwnLoss(LlamaForCausalLM):
    """Takes another output into its loss."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        logits = self.lm_head(hidden)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=VOCAB) + hidden[:, -1].pow(2).mean()
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def _own_loss_function(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
    return cross_entropy(logits.view(-1, vocab_size), labels.view(-1)) + logits.logsumexp(-1).mean()


def _with_own_class(model: Any) -> Any:
    made = OwnLoss(model.config)
    made.load_state_dict(model.state_dict())
    return made.train()


def _with_own_loss(model: Any) -> Any:
    model.loss_function = _own_loss_function
    return model


def _with_a_hook(model: Any) -> Any:
    steer = torch.full((4, 1, 32), 0.1)
    model.model.layers[0].register_forward_hook(lambda module, args, out: out + steer)
    return model


def _with_a_hook_on_the_head(model: Any) -> Any:
    def relabel(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "labels": kwargs["input_ids"].clone()}

    model.register_forward_pre_hook(relabel, with_kwargs=True)
    return model


@pytest.mark.parametrize("late", [False, True], ids=["before", "after patching"])
@pytest.mark.parametrize("change", [_with_own_loss, _with_a_hook, _with_a_hook_on_the_head, _with_own_class])
def test_what_may_use_other_outputs_keeps_the_padding(change: Any, late: bool) -> None:
    stock = tiny_model("llama", initializer_range=0.2)
    model = copy.deepcopy(stock)
    model = change(patch_model(model, lora=False)) if late else patch_model(change(model), lora=False)
    model = patch_model(model, lora=False)  # of a class of one's own: a new model
    stock = change(stock)
    got, expected = model(**padded("right")).loss, stock(**padded("right")).loss
    assert torch.equal(got, expected) and DROPPED not in counters(model)


def test_places_chosen_by_the_caller_keep_the_padding() -> None:
    stock, model = pair("llama")
    chosen = torch.arange(11, -1, -1)
    losses = [each(**padded("right"), logits_to_keep=chosen).loss for each in (model, stock)]
    assert torch.equal(*losses) and DROPPED not in counters(model)


def test_gradients_of_each_sample() -> None:
    """torch.func reads no values, so neither may we."""
    stock = tiny_model("llama", initializer_range=0.2, attn_implementation="eager")
    models = stock, patch_model(copy.deepcopy(stock), lora=False, rms_norm=False, rope=False)
    batch = padded("right")

    def loss(parameters: Any, model: Any, ids: Any, mask: Any, labels: Any) -> Any:
        kwargs = {"input_ids": ids[None], "attention_mask": mask[None], "labels": labels[None]}
        return torch.func.functional_call(model, parameters, (), kwargs).loss

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, None, 0, 0, 0))
    found = [gradients(dict(model.named_parameters()), model, *batch.values()) for model in models]
    torch.testing.assert_close(*found)
