"""Batches that contradict themselves: an error that says what and why, never another computation than asked for."""

from __future__ import annotations

import itertools

import pytest
import torch
from packed_cases import (
    LENGTHS,
    attention_calls,
    counters,
    differences,
    evaluate,
    inputs,
    packed_forwards,
    pair,
    separately,
)
from tiny_models import packed_batch, tiny_model

from fastft import PackedSequences, patch_model
from fastft.config import PatchConfig
from fastft.errors import PackingError, UnsupportedModelError, UnsupportedOptionError
from fastft.modules.attention import AttentionName, _WithConfig

T = sum(LENGTHS)


def boundaries(*values, longest=None):
    cu_seqlens = torch.tensor(values, dtype=torch.int32)
    longest = max((b - a for a, b in itertools.pairwise(values)), default=0) if longest is None else longest
    return {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": longest, "max_length_k": longest}


def refuse(match, **batch):
    stock, model = pair("llama")
    with pytest.raises(ValueError, match=match) as caught:
        model(**batch)
    assert isinstance(caught.value, PackingError)
    good = inputs(LENGTHS, "position_ids")  # a refused batch leaves nothing behind
    assert differences(evaluate(model, good, LENGTHS), separately(stock, good, LENGTHS)) == []


IDS = packed_batch(LENGTHS)["input_ids"]


@pytest.mark.parametrize("more", [1, 5, -3])
def test_positions_of_another_length_name_both(more):
    positions = torch.arange(T + more)[None]
    refuse(rf"{T + more} tokens.*{T} a row", input_ids=IDS, position_ids=positions)
    refuse(rf"{T + more} tokens.*{T} a row", input_ids=IDS, position_ids=positions, attention_mask=torch.ones_like(IDS))


def test_positions_of_another_number_of_rows():
    refuse("2 rows, the batch has 1", input_ids=IDS, position_ids=torch.arange(T).repeat(2, 1))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (boundaries(0, 5, T - 1), f"{T - 1}"),
        (boundaries(0, 5, T + 4), f"{T + 4}"),
        (boundaries(1, 5, T), "from 1"),
        (boundaries(0, 9, 5, T), "decrease"),
        (boundaries(0, 5, T, longest=7), "29 tokens, more than"),
        (boundaries(0, 5, T) | {"max_length_q": None}, "without max_length_q"),
        (boundaries(0, 5, T) | {"cu_seq_lens_k": torch.tensor([0, 6, T])}, "different sequences"),
        (boundaries(0, 5, T) | {"cu_seq_lens_k": torch.tensor([0, T])}, "different sequences"),
        (boundaries(0, 5, T) | {"cu_seq_lens_q": torch.tensor([0.0, 5.0, T])}, "."),
        (boundaries(0, 5, T) | {"cu_seq_lens_q": [0, 5, T]}, "must be tensors, got list"),
        (boundaries(0, 5, T) | {"cu_seq_lens_k": [0, 5, T]}, "must be tensors, got Tensor and list"),
    ],
)
def test_boundaries_that_do_not_fit(kwargs, match):
    refuse(match, input_ids=IDS, **kwargs)


def test_boundaries_and_padding():
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    refuse("hides tokens", input_ids=IDS, attention_mask=mask, **boundaries(0, 5, T))
    refuse(
        "hides tokens", input_ids=IDS, attention_mask=mask, packed_sequences=PackedSequences.from_lengths([T], "cpu")
    )


def test_sequences_of_another_batch():
    refuse(
        f"cover {T - 1} tokens, the batch has {T}",
        input_ids=IDS,
        packed_sequences=PackedSequences.from_lengths([T - 1], "cpu"),
    )
    refuse("got list", input_ids=IDS, packed_sequences=[0, T])
    two_rows = {"input_ids": IDS.repeat(2, 1), "position_ids": packed_batch(LENGTHS)["position_ids"]}
    refuse("from one row", **two_rows, packed_sequences=PackedSequences.from_lengths([5, T, T - 5], "cpu"))
    refuse("from one row", **two_rows, **boundaries(0, 5, 2 * T))


def test_sequences_that_cannot_be_honoured_are_not_dropped():
    given = PackedSequences.from_lengths(LENGTHS, "cpu")
    stock, model = pair("llama")
    cache = stock(input_ids=IDS, use_cache=True).past_key_values
    with pytest.raises(PackingError, match="cache"):
        model(input_ids=IDS, packed_sequences=given, past_key_values=cache)
    with pytest.raises(PackingError, match="prepared attention mask"):
        model(input_ids=IDS, packed_sequences=given, attention_mask=torch.ones(1, 1, T, T, dtype=torch.bool))
    model.set_attn_implementation("sdpa")
    with pytest.raises(PackingError, match="sdpa"):
        model(input_ids=IDS, packed_sequences=given)


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ({"past_key_values": True}, "a cache is in use"),
        ({"attention_mask": torch.ones(1, 1, T, T, dtype=torch.bool)}, "a prepared attention mask"),
        ({"attention_mask": torch.ones(1, T + 2)}, "a 2-D attention mask of another shape"),
    ],
)
def test_boundaries_from_a_collator_are_not_ignored(beside, reason):
    stock, model = pair("llama")
    batch = {"input_ids": IDS, **boundaries(0, 5, T), **beside}
    if "past_key_values" in beside:
        batch["past_key_values"] = stock(input_ids=IDS, use_cache=True).past_key_values
    with pytest.raises(PackingError, match=f"cu_seq_lens_q cannot be honoured.*{reason}.*'sdpa' attention ignores"):
        model(**batch)
    (hook,) = model.model._forward_pre_hooks.values()
    flash = AttentionName("flash_attention_2")  # honours them itself
    model.config._attn_implementation_internal = flash
    assert hook(model.model, (), batch) is None


def test_an_attention_mask_of_another_shape_is_named():
    _, model = pair("llama")
    (hook,) = model.model._forward_pre_hooks.values()
    assert hook(model.model, (), {"input_ids": IDS, "attention_mask": torch.ones(1, T + 1)}) is None
    assert counters(model)["batches: stock, a 2-D attention mask of another shape than the tokens"] == 1


def test_fractional_positions_are_named():
    _, model = pair("llama")
    model(input_ids=IDS, position_ids=torch.arange(T)[None].float())
    assert counters(model)["batches: stock, positions that are no integers"] == 1


def test_arguments_that_stock_refuses():
    stock, model = pair("llama")
    for args, kwargs in (((None,) * 20, {}), ((IDS,), {"input_ids": IDS})):
        messages = []
        for each in (stock.model, model.model):
            with pytest.raises(TypeError) as caught:
                each(*args, **kwargs)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_a_layer_added_after_patching():
    _, model = pair("llama")
    model.model.layers[1] = type(model.model.layers[1])(model.config, 1).train()
    with pytest.raises(PackingError, match=r"LlamaAttention .* is not patched.*patch_model\(model\) again"):
        model(**inputs(LENGTHS, "position_ids"))


def test_a_mask_without_padding_is_looked_at_once(monkeypatch):
    _, model = pair("llama")
    shared = model.model.__dict__["_fastft"].shared
    monkeypatch.setattr(shared.packed_cache, "lookup", lambda question, *sources: (question == ("no padding",), None))
    remembered = []
    monkeypatch.setattr(shared.packed_cache, "remember", lambda answer, question, *sources: remembered.append(question))
    model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **boundaries(0, 5, T))
    assert ("no padding",) not in remembered and len(remembered) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rope_in_place": 1}, "rope_in_place=1 is no option"),
        ({"rope_in_place": 0}, "rope_in_place=0 is no option"),
        ({"rope_in_place": "yes"}, "rope_in_place='yes' is no option"),
        ({"rope_in_place": True, "rope": False}, "needs fastft's rope"),
    ],
)
def test_rope_in_place_options(options, match):
    with pytest.raises(UnsupportedOptionError, match=match):
        PatchConfig(**options)


def test_rope_in_place_refused_is_counted():
    for wanted, counted in ((True, 2), ("auto", 0)):
        _, model = pair("llama", rope_in_place=wanted)
        with torch.no_grad():
            model(**inputs(LENGTHS, "position_ids"))
        refused = {name: n for name, n in counters(model).items() if name.startswith("rope in place refused: ")}
        assert sum(refused.values()) == counted
        assert all("gradients are off" in name for name in refused)


def test_another_implementation_sees_the_config_under_its_own_name():
    _, model = pair("llama")
    seen = _WithConfig(model.model.layers[0].self_attn, "flash_attention_2")
    assert seen.config._attn_implementation == "flash_attention_2" and seen.layer_idx == 0
    assert seen.config.hidden_size == model.config.hidden_size and not hasattr(seen.config, "_is_quantized")
    assert model.config._attn_implementation == "fastft"


def test_empty_documents_count_for_nothing():
    stock, model = pair("llama")
    first, second, third = LENGTHS[0], sum(LENGTHS[:2]), sum(LENGTHS[:3])
    fourth = sum(LENGTHS[:4])
    batch = {"input_ids": IDS, **boundaries(0, 0, first, first, first, second, third, fourth, T, T)}
    assert differences(evaluate(model, batch, LENGTHS), separately(stock, batch, LENGTHS)) == []


def test_max_length_may_be_an_upper_bound():
    stock, model = pair("mistral")
    batch = inputs(LENGTHS, "cu_seq_lens") | {"max_length_q": 1000, "max_length_k": torch.tensor(1000)}
    assert differences(evaluate(model, batch, LENGTHS), separately(stock, batch, LENGTHS)) == []


def test_host_boundaries_follow_the_tokens_to_their_device():
    """The meta device stands in for a GPU: what the layers get has to be there, and nothing may read from it."""
    _, model = pair("llama")
    (hook,) = model.model._forward_pre_hooks.values()
    ids = IDS.to("meta")
    for extra, num_sequences in ((boundaries(0, 5, 14, T), 3), ({}, 1)):
        _, announced = hook(model.model, (), {"input_ids": ids, **extra})
        packed = announced["packed_sequences"]
        assert packed.cu_seqlens.device.type == "meta" and packed.num_sequences == num_sequences
        assert announced["attention_mask"].device == announced["position_ids"].device == ids.device
        assert announced["position_ids"].shape == ids.shape
    assert hook(model.model, (), {"input_ids": ids, "position_ids": torch.zeros_like(ids)}) is None


def test_strided_inputs():
    stock, model = pair("qwen3")
    batch = inputs(LENGTHS, "position_ids")
    wide = {name: torch.stack([value, value + 1], dim=-1)[..., 0] for name, value in batch.items()}
    assert not any(value.is_contiguous() for value in wide.values())
    expected = separately(stock, batch, LENGTHS)
    assert differences(evaluate(model, wide, LENGTHS), expected) == []
    assert differences(evaluate(model, {**wide, "position_ids": batch["position_ids"].int()}, LENGTHS), expected) == []
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().repeat_interleave(2, dim=2)[..., ::2]
    logits = model(inputs_embeds=embedded, position_ids=batch["position_ids"]).logits
    torch.testing.assert_close(logits, expected["logits"], rtol=2e-5, atol=1e-5)
    assert packed_forwards(model) == 3


def test_one_row_of_positions_for_several_rows_of_tokens():
    stock, model = pair("llama")
    batch = inputs(LENGTHS, "position_ids", rows=2)
    batch["position_ids"] = batch["position_ids"][:1]
    assert differences(evaluate(model, batch, LENGTHS), separately(stock, batch, LENGTHS)) == []
    assert packed_forwards(model) == 1


@pytest.mark.parametrize("rows", [[0], [0, 1]])
def test_rows_without_a_token_are_as_stock(rows):
    stock, model = pair("llama")
    ids = packed_batch([12])["input_ids"].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[rows] = 0
    labels = ids.masked_fill(mask == 0, -100)
    got, expected = (
        each(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=11) for each in (model, stock)
    )
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.logits[mask != 0], expected.logits[mask != 0])
    got.loss.backward(), expected.loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_a_batch_of_no_tokens():
    _, model = pair("llama")
    for batch in (
        {"input_ids": torch.zeros(1, 0, dtype=torch.long)},
        {"input_ids": torch.zeros(1, 0, dtype=torch.long), **boundaries(0)},
        {
            "input_ids": torch.zeros(1, 0, dtype=torch.long),
            "packed_sequences": PackedSequences.from_lengths([0], "cpu"),
        },
    ):
        logits = model(**batch).logits
        assert logits.shape == (1, 0, 97)
        logits.sum().backward()
    assert attention_calls(model) == 6


@pytest.mark.parametrize(
    ("boundaries", "host", "longest", "tokens", "words"),
    [
        ([0, 100], None, 100, T, "run from 0 to 100"),
        ([0, 10], (0, 10), 10, T, "run from 0 to 10"),
        ([0, 20, 10, T], None, T, T, "must not decrease"),
        ([0, T], None, 3, T, "more than max_seqlen=3"),
        ([0, 5, T], (0, T), T, T, "3 cu_seqlens run from"),
    ],
)
def test_boundaries_made_by_hand_are_checked(boundaries, host, longest, tokens, words):
    with pytest.raises(PackingError, match=words):
        PackedSequences(torch.tensor(boundaries, dtype=torch.int32), host, longest, tokens)


def test_positions_without_rows_and_lengths_that_are_no_numbers():
    refuse("no row of tokens", input_ids=IDS, position_ids=torch.tensor(3))
    refuse("max_length_q='x'", input_ids=IDS, **{**boundaries(0, T), "max_length_q": "x"})


def test_replicas_of_data_parallel_are_refused():
    """What nn.DataParallel does to each module, on one device: a shallow copy with other parameters."""
    model = patch_model(tiny_model("llama"), lora=False)
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            replica._modules[name] = child and replicas[child]
        for name, parameter in module._parameters.items():
            replica._parameters[name] = None if parameter is None else parameter.detach() * 3
    with pytest.raises(UnsupportedModelError, match=r"nn\.DataParallel.*one process a GPU"):
        replicas[model](input_ids=IDS)
