"""Where stock lets the documents of a packed row see each other, and fastft does not."""

from __future__ import annotations

import copy

import pytest
import torch
from decoder_families import is_moe, tiny_decoder, why_stock
from packed_cases import LENGTHS, attention_calls, counters, differences, evaluate, inputs, leaks, separately
from padded_cases import padded
from tiny_models import packed_batch

from fastft import patch_model
from fastft.errors import PackingError

ATTENTION_ONLY = {"layer_types": ["attention", "attention"]}
# Families whose masks are made without the positions.
FORGETFUL = {"afmoe": {}, "gpt_oss": {}, "granitemoehybrid": ATTENTION_ONLY, "opt": {}}


@pytest.mark.parametrize("way", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("family", FORGETFUL)
def test_masks_without_positions(family, way):
    stock = tiny_decoder(family, **FORGETFUL[family])
    model = patch_model(copy.deepcopy(stock), lora=False)
    batch = inputs(LENGTHS, way)
    expected = separately(stock, batch, LENGTHS)
    assert leaks(stock, batch, LENGTHS, rounding=1e-4) != []
    assert leaks(model, batch, LENGTHS, rounding=1e-4 if is_moe(family) else 1e-6) == []
    assert differences(evaluate(stock, batch, LENGTHS, use_cache=False), expected, rtol=1e-4, atol=1e-5) != []
    assert differences(evaluate(model, batch, LENGTHS), expected, rtol=1e-4, atol=1e-5) == []


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_a_cache_that_was_left_on(family):
    stock = tiny_decoder(family, use_cache=True)
    model = patch_model(copy.deepcopy(stock), lora=False)
    batch = inputs(LENGTHS, "position_ids")
    rounding = 1e-4 if is_moe(family) else 1e-6
    assert leaks(stock, batch, LENGTHS, rounding=rounding) != []
    assert leaks(model, batch, LENGTHS, rounding=rounding) == []
    assert evaluate(model, batch, LENGTHS, use_cache=True)["loss"] == evaluate(model, batch, LENGTHS)["loss"]


# ------------------------------------------------------------------------------------------------------- Llama 4


@pytest.mark.parametrize("chunk", [3, 8])
def test_chunks_begin_with_the_document(chunk):
    """Before transformers 5.23 they begin with the row in stock."""
    stock = tiny_decoder("llama4_text", attention_chunk_size=chunk)
    model = patch_model(copy.deepcopy(stock), lora=False)
    batch = inputs(LENGTHS, "position_ids", rows=2)
    expected = separately(stock, batch, LENGTHS)
    assert differences(evaluate(model, batch, LENGTHS), expected, rtol=1e-4, atol=1e-5) == []
    assert attention_calls(model) > 0
    without_chunks = separately(tiny_decoder("llama4_text", attention_chunk_size=64), batch, LENGTHS)
    assert differences(evaluate(model, batch, LENGTHS), without_chunks, rtol=1e-4, atol=1e-5) != []


@pytest.mark.parametrize("rows", [1, 2])
def test_the_temperature_is_that_of_the_document(rows):
    options = {"floor_scale": 4, "attn_scale": 2.0, "no_rope_layers": [1, 0], "attn_temperature_tuning": True}
    stock = tiny_decoder("llama4_text", **options)
    model = patch_model(copy.deepcopy(stock), lora=False)
    batch = inputs(LENGTHS, "position_ids", rows=rows)
    expected = separately(stock, batch, LENGTHS)
    assert differences(evaluate(model, batch, LENGTHS), expected, rtol=1e-4, atol=1e-5) == []
    stock_packed = evaluate(stock, batch, LENGTHS, use_cache=False)
    assert differences(stock_packed, expected, rtol=1e-4, atol=1e-5) != []


# --------------------------------------------------------------------------------- families left to their own code


@pytest.mark.parametrize("family", ["bloom", "lfm2", "qwen3_next", "nemotron"])
def test_generation_passes_the_guard(family):
    stock = tiny_decoder(family).eval()
    model = patch_model(copy.deepcopy(stock), lora=False)
    batch = padded("left")
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**given, **options), stock.generate(**given, **options))


def test_the_guard_lets_one_document_and_separate_rows_through():
    stock = tiny_decoder("lfm2")
    model = patch_model(copy.deepcopy(stock), lora=False)
    ids = packed_batch([12])["input_ids"]
    whole = torch.tensor([0, 12], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": whole, "cu_seq_lens_k": whole, "max_length_q": 12, "max_length_k": 12}
    positions = torch.arange(12)[None]
    for given in ({"position_ids": positions}, {"position_ids": positions, **lengths}, {"position_ids": positions + 3}):
        assert torch.equal(model(input_ids=ids, **given).logits, stock(input_ids=ids, **given).logits)
    rows = {"input_ids": ids.view(2, 6), "position_ids": torch.arange(6).expand(2, -1)}
    assert torch.equal(model(**rows).logits, stock(**rows).logits)
    with pytest.raises(PackingError, match="fastft does not serve this model"):
        model(**inputs(LENGTHS, "packed_sequences"))


def test_the_guard_refuses_what_a_head_hands_on_by_position():
    model = patch_model(tiny_decoder("lfm2"), lora=False)
    batch = inputs(LENGTHS, "position_ids")
    with pytest.raises(PackingError, match="would see each other"):
        model(batch["input_ids"], None, batch["position_ids"])
    with pytest.raises(PackingError, match="would see each other"):
        model.model(batch["input_ids"], None, batch["position_ids"])


@pytest.mark.parametrize("family", ["bloom", "jamba", "stablelm"])
def test_a_copy_keeps_its_guard(family):
    model = copy.deepcopy(patch_model(tiny_decoder(family), lora=False))
    assert why_stock(model)
    batch = inputs(LENGTHS, "position_ids")
    if family == "stablelm":
        model(**batch)
        assert counters(model)["batches: packed, kept apart by the model's own code"] == 1
    else:
        with pytest.raises(PackingError, match="would see each other"):
            model(**batch)
