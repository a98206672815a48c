"""Where stock lets the documents of a packed row see each other, and fastft does not."""

from __future__ import annotations

import copy

import pytest
from decoder_families import is_moe, tiny_decoder
from packed_cases import LENGTHS, attention_calls, differences, evaluate, inputs, leaks, separately

from fastft import patch_model

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
