"""Every decoder family that the README names: packed documents are as if alone, in stock or with fastft, or refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from decoder_families import DECODERS, coverage_table, drops_padding, is_moe, tiny_decoder, why_stock
from packed_cases import LENGTHS, counters, differences, evaluate, inputs, leaks, packed_forwards, separately
from padded_cases import DROPPED, one_sequence, padded, train_once

from fastft import patch_model
from fastft.errors import PackingError

README = Path(__file__).parents[2] / "README.md"
OWN_CODE = {"gptj", "nemotron", "stablelm"}
REFUSED = {"bloom", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "mamba", "minimax", "qwen3_next", "xglm"}
SERVED = sorted(DECODERS.keys() - OWN_CODE - REFUSED)
MERGED = (5, 22, 7)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("family", SERVED)
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
@pytest.mark.parametrize("family", SERVED)
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


@pytest.mark.parametrize("family", sorted(OWN_CODE))
def test_the_models_own_code_keeps_documents_apart(family):
    """But for a cache, which a model of transformers uses unless told otherwise: stock then sees no boundaries."""
    stock = tiny_decoder(family, use_cache=True)
    model = patch_model(copy.deepcopy(stock), lora=False)
    assert "its own masks keep" in why_stock(model)
    batch = inputs(LENGTHS, "position_ids")
    assert leaks(stock, batch, LENGTHS) != []
    assert leaks(model, batch, LENGTHS, rounding=1e-6) == []
    expected = separately(stock, batch, LENGTHS)
    assert differences(evaluate(model, batch, LENGTHS), expected, rtol=1e-4, atol=1e-5) == []
    assert packed_forwards(model) == 3


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_packed_batch_is_refused_where_documents_would_see_each_other(family):
    stock = tiny_decoder(family)
    model = patch_model(copy.deepcopy(stock), lora=False, experts=False)
    assert "is refused" in why_stock(model)
    for way in ("position_ids", "cu_seq_lens"):
        with pytest.raises(PackingError, match="which would see each other: "):
            model(**inputs(LENGTHS, way))
    assert differences(train_once(model, padded("left")), train_once(stock, padded("left")), rtol=0, atol=0) == []
    rows = {"input_ids": inputs((12, 12), "position_ids")["input_ids"].view(2, 12)}
    rows["position_ids"] = torch.arange(12).expand(2, -1)
    assert torch.equal(model(**rows).logits, stock(**rows).logits)
    patch_model(model, lora=False, packing=False, experts=False)  # for whoever wants that
    batch = inputs(LENGTHS, "position_ids")
    assert torch.equal(model(**batch, use_cache=False).logits, stock(**batch, use_cache=False).logits)
    assert leaks(model, batch, LENGTHS) != []


def test_the_readmes_table_is_what_the_reports_say():
    """After a change: python tests/decoder_families.py prints the table."""
    table = coverage_table()
    assert table in README.read_text(encoding="utf-8"), table
