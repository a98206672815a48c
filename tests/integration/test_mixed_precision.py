"""Packed batches in the dtypes that people train in: half-precision weights, autocast, and norms kept in fp32."""

from __future__ import annotations

import copy

import pytest
import torch
from packed_cases import (
    LENGTHS,
    attention_calls,
    differences,
    evaluate,
    inputs,
    leaks,
    packed_forwards,
    pair,
    separately,
)
from tiny_models import FAMILIES

from fastft import patch_model

# A few roundings of the dtype in two layers, there and back; a lost boundary changes logits by tenths.
ROUNDINGS = {torch.bfloat16: {"rtol": 0.05, "atol": 0.03}, torch.float16: {"rtol": 0.01, "atol": 0.005}}
MERGED = (5, 22, 7)
# Document by document, so that a row of another length cannot choose other kernels: only the boundaries differ.
BATCH = inputs(LENGTHS, "position_ids")


def models(family, dtype):
    stock, _ = pair(family)
    exact = copy.deepcopy(stock).double()
    stock = stock.to(dtype)
    return exact, stock, patch_model(copy.deepcopy(stock), lora=False)


def error(found, exact):
    """Root mean square error of the logits and of each gradient, relative to the oracle's size."""
    errors = {}
    for name, value in exact.items():
        if value.dim() and value.norm() > 1e-6:
            errors[name] = ((found[name].double() - value.double()).norm() / value.double().norm()).item()
    return errors


def close_to_stock(ours, stock, exact):
    """As near to the exact result as stock: at most twice its error, with a floor for what is luck."""
    got, allowed = error(ours, exact), error(stock, exact)
    assert all(torch.isfinite(value).all() for value in ours.values())
    assert all(got[name] <= 2 * allowed[name] + 2e-3 for name in got), {
        name: (got[name], allowed[name]) for name in got if got[name] > 2 * allowed[name] + 2e-3
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_weights(family, dtype):
    exact, stock, model = models(family, dtype)
    truth = separately(exact, BATCH, LENGTHS)
    found = evaluate(model, BATCH, LENGTHS)
    assert found["logits"].dtype == dtype
    truth = {name: value for name, value in truth.items() if name != "loss"}
    close_to_stock(found, evaluate(stock, BATCH, LENGTHS, use_cache=False), truth)
    assert leaks(model, BATCH, LENGTHS) == []
    with pytest.raises(AssertionError):
        close_to_stock(
            evaluate(model, inputs(LENGTHS, "position_ids", told=MERGED), LENGTHS),
            evaluate(stock, BATCH, LENGTHS, use_cache=False),
            truth,
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_over_fp32_weights(family):
    exact, stock, model = models(family, torch.float32)
    truth = {name: value for name, value in separately(exact, BATCH, LENGTHS).items() if name != "loss"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = evaluate(model, BATCH, LENGTHS), evaluate(stock, BATCH, LENGTHS, use_cache=False)
        assert leaks(model, BATCH, LENGTHS) == []
    assert ours["logits"].dtype == theirs["logits"].dtype == torch.bfloat16
    close_to_stock(ours, theirs, truth)
    assert packed_forwards(model) == 3 and attention_calls(model) > 0


def test_norms_in_fp32_in_a_bf16_model():
    """Such norms widen q and k, which stock attention refuses outside of autocast; v keeps the model's dtype."""
    exact, stock, _ = models("qwen3", torch.bfloat16)
    for name, module in stock.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            module.float()
    model = patch_model(copy.deepcopy(stock), lora=False)
    with pytest.raises(RuntimeError):
        stock(**BATCH)
    truth = {name: value for name, value in separately(exact, BATCH, LENGTHS).items() if name != "loss"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = evaluate(stock, BATCH, LENGTHS, use_cache=False)
        close_to_stock(evaluate(model, BATCH, LENGTHS), theirs, truth)
    ours = evaluate(model, BATCH, LENGTHS)
    close_to_stock(ours, theirs, truth)
    assert ours["grad model.layers.0.self_attn.q_norm.weight"].dtype == torch.float32
    assert leaks(model, BATCH, LENGTHS) == []


def test_fp64_stays_fp64_under_autocast():
    exact, _, _ = models("llama", torch.float32)
    model = patch_model(copy.deepcopy(exact), lora=False)
    expected = separately(exact, BATCH, LENGTHS)
    assert differences(evaluate(model, BATCH, LENGTHS), expected, rtol=1e-6, atol=1e-6) == []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(**BATCH).logits.dtype == torch.float64
        torch.testing.assert_close(model(**BATCH).logits, expected["logits"], check_dtype=False, rtol=1e-6, atol=1e-6)
