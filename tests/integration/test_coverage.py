"""Every decoder family that the README names: documents of a packed row are as if alone, or the row stays stock."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from decoder_families import DECODERS, coverage_table, drops_padding, is_moe, tiny_decoder, why_stock
from packed_cases import LENGTHS, counters, differences, evaluate, inputs, leaks, packed_forwards, separately
from padded_cases import DROPPED, one_sequence, padded, train_once

from fastft import patch_model

README = Path(__file__).parents[2] / "README.md"
STOCK = {"bloom", "jamba", "llama4_text", "nemotron", "qwen3_next", "stablelm"}
MERGED = (5, 22, 7)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("family", sorted(DECODERS.keys() - STOCK))
def test_documents_are_as_if_alone(family, checkpointing):
    stock = tiny_decoder(family)
    model = patch_model(copy.deepcopy(stock), lora=False)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = inputs(LENGTHS, "position_ids")
    # Which tokens share an expert's GEMM depends on all of them, and rounding with it.
    rounding = 1e-4 if is_moe(family) else 1e-6
    assert leaks(model, batch, LENGTHS, rounding=rounding) == []
    expected = separately(stock, batch, LENGTHS)
    assert differences(evaluate(model, batch, LENGTHS), expected, rtol=1e-4, atol=1e-5) == []
    assert packed_forwards(model) == 3
    mutant = inputs(LENGTHS, "position_ids", told=MERGED)
    assert leaks(model, mutant, LENGTHS, rounding=rounding) != []
    assert differences(evaluate(model, mutant, LENGTHS), expected, rtol=1e-4, atol=1e-5) != []


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", sorted(DECODERS.keys() - STOCK))
def test_a_padded_batch_trains_as_stock_does(family, side, checkpointing):
    stock = tiny_decoder(family)
    model = patch_model(copy.deepcopy(stock), lora=False)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = train_once(stock, padded(side))
    assert differences(train_once(model, padded(side)), expected, rtol=1e-4, atol=1e-5) == []
    dropped = drops_padding(model, side)
    assert (DROPPED in counters(model)) is dropped
    if dropped:
        with one_sequence():
            assert differences(train_once(model, padded(side)), expected, rtol=1e-4, atol=1e-5) != []


@pytest.mark.parametrize("family", sorted(STOCK))
def test_what_cannot_be_kept_apart_is_left_to_stock(family):
    stock = tiny_decoder(family).eval()
    model = patch_model(copy.deepcopy(stock), lora=False)
    assert why_stock(model)
    batch = inputs(LENGTHS, "position_ids")
    assert torch.equal(model(**batch, use_cache=False).logits, stock(**batch, use_cache=False).logits)


def test_the_readmes_table_is_what_the_reports_say():
    """After a change: python tests/decoder_families.py prints the table."""
    table = coverage_table()
    assert table in README.read_text(encoding="utf-8"), table
