"""Models that no family file names: packed rows are served where the code allows it, and otherwise left to stock."""

from __future__ import annotations

import copy

import pytest
import torch
from packed_cases import (
    CONFIG,
    LENGTHS,
    attention_calls,
    counters,
    differences,
    evaluate,
    inputs,
    leaks,
    packed_forwards,
    separately,
)
from tiny_models import packed_batch, tiny_model

from fastft import PackedSequences, patch_model, report
from fastft.errors import PackingError

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
# What each asks of attention that the packed engines lack, or "" where they serve it.
SERVED = {
    "gemma2": (LAYER_TYPES | {"attn_implementation": "eager"}, "softcap"),
    "gpt_oss": (LAYER_TYPES | MOE | {"attn_implementation": "eager"}, "s_aux"),
    "gemma3_text": (LAYER_TYPES, ""),
    "olmoe": (MOE, ""),
    "cohere2": (LAYER_TYPES, ""),
    "olmo2": ({}, ""),
    "phi3": ({"sliding_window": 5}, ""),
}
MERGED = (5, 22, 7)


def models(family):
    config, lacking = SERVED[family]
    stock = tiny_model(family, **CONFIG, **config)
    # Experts are another matter, and round otherwise.
    return stock, patch_model(copy.deepcopy(stock), lora=False, experts=False), lacking


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", SERVED)
def test_documents_are_as_if_alone(family, rows):
    stock, model, lacking = models(family)
    batch = inputs(LENGTHS, "position_ids", rows=rows)
    # Which tokens share an expert's GEMM depends on all of them, and rounding with it.
    rounding = 1e-4 if hasattr(model.config, "num_experts_per_tok") else 0.0
    assert leaks(model, batch, LENGTHS, rounding=rounding) == []
    found, expected = evaluate(model, batch, LENGTHS), separately(stock, batch, LENGTHS)
    assert differences(found, expected, rtol=1e-4, atol=1e-5) == []
    mutant = inputs(LENGTHS, "position_ids", rows=rows, told=MERGED)
    assert leaks(model, mutant, LENGTHS, rounding=rounding) != []
    assert differences(evaluate(model, mutant, LENGTHS), expected, rtol=1e-4, atol=1e-5) != []
    by_mask = sum(
        n for name, n in counters(model).items() if name == f"attention by the previous implementation: {lacking}"
    )
    by_engine = attention_calls(model)
    assert (by_mask, by_engine) == ((6 * 2, 0) if lacking else (0, 6 * 2))
    assert packed_forwards(model) == 6


@pytest.mark.parametrize("family", SERVED)
def test_whole_rows_are_left_to_stock(family):
    """The mask of an unknown family may say more than causality, which only its own code knows."""
    stock, model, _ = models(family)
    ids = packed_batch([12])["input_ids"].repeat(2, 1)
    assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    got, expected = model(input_ids=ids, attention_mask=mask).logits, stock(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(got, expected)
    assert packed_forwards(model) == 0 and attention_calls(model) == 0


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen2_moe", MOE | LAYER_TYPES | {"use_sliding_window": True}),
        ("phimoe", MOE | {"sliding_window": 5}),  # its attention is not told the window
    ],
)
def test_what_cannot_be_served_is_stock(family, config):
    stock = tiny_model(family, **CONFIG, **config).eval()  # routers add noise in training
    model = patch_model(copy.deepcopy(stock), lora=False, experts=False)
    batch = inputs(LENGTHS, "position_ids")
    assert torch.equal(model(**batch, use_cache=False).logits, stock(**batch, use_cache=False).logits)
    reasons = [skipped.reason for skipped in report(model).skipped if skipped.op == "packing"]
    assert len(reasons) == 1 and reasons[0]


def test_a_layer_that_drops_the_boundaries_is_noticed():
    _, model, _ = models("olmo2")
    layer = model.model.layers[1]
    forward = layer.self_attn.forward

    def forgetful(*args, packed_sequences=None, **kwargs):
        return forward(*args, **kwargs)

    layer.self_attn.forward = forgetful
    with pytest.raises(PackingError, match="without its boundaries"):
        model(**inputs(LENGTHS, "position_ids"))


def test_a_model_that_never_asks_for_attention_is_noticed():
    _, model, _ = models("olmo2")
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(PackingError, match="not kept apart"):
        model(**inputs(LENGTHS, "position_ids"))


def test_attention_across_is_refused():
    from fastft.modules.attention import fastft_attention

    _, model, _ = models("olmo2")
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 9, 8)
    packed = PackedSequences.from_lengths([2, 4], "cpu")
    with pytest.raises(PackingError, match="9 keys for 6 queries"):
        fastft_attention(model.model.layers[0].self_attn, q, k, k, None, packed_sequences=packed)
