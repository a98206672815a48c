"""torch.compile on a patched model: the same results, and no new compilation for each batch."""

from __future__ import annotations

import copy

import pytest
import torch
from memory_cases import LAYERS, batch, gradients, model_of
from packed_cases import (
    LENGTHS,
    TOLERANCE,
    attention_calls,
    differences,
    evaluate,
    inputs,
    packed_forwards,
    pair,
    separately,
)
from tiny_models import packed_batch
from torch._dynamo.testing import CompileCounterWithBackend

from fastft import patch_model


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_batches(family):
    stock, model = pair(family)
    backend = CompileCounterWithBackend("aot_eager" if family == "llama" else "eager")
    compiled = torch.compile(model, backend=backend)
    batch = inputs(LENGTHS, "position_ids")
    assert differences(evaluate(compiled, batch, LENGTHS), separately_named(stock, batch)) == []
    compiled(**packed_batch(LENGTHS))  # the same with labels
    frames = backend.frame_count
    assert frames > 0
    total = sum(LENGTHS)
    for seed, lengths in enumerate(
        [(total,), (total - 1, 1), *((n, total - n) for n in range(2, 11)), (4,) * 8 + (2,)]
    ):
        other = packed_batch(lengths, seed=seed)
        got, expected = compiled(**other), model(**other)
        torch.testing.assert_close(got.logits, expected.logits, **TOLERANCE)
    assert backend.frame_count == frames, "each batch is compiled anew"
    mutant = inputs(LENGTHS, "position_ids", told=(5, 22, 7))
    assert differences(evaluate(compiled, mutant, LENGTHS), separately_named(stock, batch)) != []
    assert packed_forwards(model) > 10 and attention_calls(model) > 0


def separately_named(stock, batch):
    """Expected results, with the names that the parameters have in a compiled model."""
    found = separately(stock, batch, LENGTHS)
    return {name.replace("grad ", "grad _orig_mod."): value for name, value in found.items()}


def test_whole_and_padded_rows():
    stock, model = pair("llama")
    compiled = torch.compile(model, backend="eager")
    ids = packed_batch([12])["input_ids"].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for kwargs in ({}, {"attention_mask": mask}):
        got, expected = compiled(input_ids=ids, **kwargs).logits, stock(input_ids=ids, **kwargs).logits
        real = kwargs.get("attention_mask", torch.ones_like(ids)) != 0
        torch.testing.assert_close(got[real], expected[real], **TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"checkpointing": "selective"}, {"memory_budget": "auto"}], ids=str)
def test_checkpointed_layers(options):
    plain = model_of()
    model = patch_model(copy.deepcopy(plain), **options)
    for each in (plain, model):
        each.gradient_checkpointing_enable({"use_reentrant": False})
    torch.compile(model, backend="aot_eager")(**batch()).loss.backward()
    plain(**batch()).loss.backward()
    assert differences(gradients(model), gradients(plain)) == []
    assert attention_calls(model) == 2 * LAYERS  # each is run again


def test_a_decoding_step_stays_one_graph():
    """fullgraph=True raises at the first break; serving code compiles the step with a static cache like this."""
    stock, model = pair("llama")
    stock.eval(), model.eval()
    ids = packed_batch([6])["input_ids"]
    results = []
    for each in (stock, model):
        cache = each(input_ids=ids, use_cache=True).past_key_values
        step = torch.compile(copy.deepcopy(each), backend="eager", fullgraph=True)
        with torch.no_grad():
            results.append(step(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits)
    assert torch.equal(*results)


def test_strict_export_of_a_patched_model():
    stock, model = pair("llama")
    stock.eval(), model.eval()
    ids = packed_batch([6])["input_ids"]
    exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=True)
    torch.testing.assert_close(exported.module()(input_ids=ids, use_cache=False)[0], stock(input_ids=ids)[0])
