"""Padded batches lose their padding in training, and give what stock gives at every token."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from packed_cases import attention_calls, counters, differences, pair
from padded_cases import DROPPED, LENGTHS, alone, one_sequence, padded, train_once
from peft import LoraConfig, PolyConfig, get_peft_model
from tiny_models import FAMILIES, VOCAB, tiny_config, tiny_model
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastft import patch_model, report, unpatch_model
from fastft.modules import attention
from fastft.modules.state import UsedPadding, state_of

USED = "batches: stock, an output at padding is used"
UNKNOWN = "which outputs are used is not known"


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


def test_the_padding_after_a_row_may_be_predicted_by_its_last_token() -> None:
    stock, model = pair("llama")
    batch = padded("right")
    for row, length in enumerate(LENGTHS[1:], 1):
        batch["labels"][row, length] = 0
    assert differences(train_once(model, batch), train_once(stock, batch)) == []
    assert counters(model)[DROPPED] == 1


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 28}])
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: get_peft_model(model, LoraConfig(r=2))])
def test_a_first_token_after_padding_that_is_a_target_keeps_the_batch_as_it_is(wrap: Any, options: dict) -> None:
    """Stock predicts it from padding, and counts it among the items of the batch."""
    stock, model = (wrap(each) for each in pair("llama"))
    batch = padded("left", first_tokens=True)
    got, expected = train_once(model, batch, **options), train_once(stock, batch, **options)
    assert torch.equal(got["loss"], expected["loss"]) and counters(model)[USED] == 1


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


def test_training_without_gradients_needs_to_be_told_of_the_cache() -> None:
    """As TRL computes the log-probabilities of a reference."""
    _, model = pair("llama")
    batch = padded("left")
    with torch.no_grad():
        model(**batch)
        assert DROPPED not in counters(model)
        model(**batch, use_cache=False)
    assert counters(model)[DROPPED] == 1


@pytest.mark.parametrize("options", [{"packing": False}, {"unpad": False}])
def test_padding_is_kept_on_request(options: dict[str, Any]) -> None:
    stock, model = pair("llama", **options)
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


def test_question_answering_keeps_the_padding() -> None:
    """Its softmax goes over all places of a row."""
    torch.manual_seed(0)
    stock = AutoModelForQuestionAnswering.from_config(tiny_config("llama")).train()
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
