"""Packed rows in the model families that fastft knows: every document as if it were alone, in every mode."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from packed_cases import (
    LENGTHS,
    WAYS,
    attention_calls,
    counters,
    differences,
    evaluate,
    inputs,
    leaks,
    packed_forwards,
    pair,
    separately,
)
from tiny_models import FAMILIES, packed_batch, tiny_model
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fastft import PackedSequences, patch_model
from fastft.errors import PackingError

MERGED = (5, 22, 7)  # LENGTHS with two boundaries lost: the second document is seen by the two after it
LAYERS = 2


def keep_matmuls(ctx, op, *args, **kwargs):
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTING = {
    "off": None,
    "non-reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keep_matmuls)},
}


def checkpointed(model, kind):
    if CHECKPOINTING[kind] is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[kind])
        model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_as_if_alone(family, way):
    stock, model = pair(family)
    batch = inputs(LENGTHS, way)
    assert leaks(model, batch, LENGTHS) == []
    assert differences(evaluate(model, batch, LENGTHS), separately(stock, batch, LENGTHS)) == []
    assert packed_forwards(model) == 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lost_boundary_is_caught(family, way):
    stock, model = pair(family)
    mutant = inputs(LENGTHS, way, told=MERGED)
    assert leaks(model, mutant, LENGTHS) != []
    wrong = differences(evaluate(model, mutant, LENGTHS), separately(stock, mutant, LENGTHS))
    assert any(name.startswith("loss:") for name in wrong) and any(name.startswith("grad ") for name in wrong)


@pytest.mark.parametrize("way", WAYS)
def test_two_packed_rows(way):
    for family in ("llama", "mistral"):
        stock, model = pair(family)
        batch = inputs(LENGTHS, way, rows=2)
        assert leaks(model, batch, LENGTHS) == []
        assert leaks(model, batch, LENGTHS, changed=4) == []  # the last of a row, next to the first of the other
        assert differences(evaluate(model, batch, LENGTHS), separately(stock, batch, LENGTHS)) == []
        assert leaks(model, inputs(LENGTHS, way, rows=2, told=MERGED), LENGTHS) != []


@pytest.mark.parametrize("kind", [kind for kind in CHECKPOINTING if kind != "off"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_gradient_checkpointing(family, kind):
    stock, model = pair(family)
    checkpointed(model, kind)
    batch = inputs(LENGTHS, "position_ids")
    if kind != "reentrant":  # a reentrant checkpoint cannot tell the gradient of what a hook put in place
        assert leaks(model, batch, LENGTHS) == []
        assert leaks(model, inputs(LENGTHS, "position_ids", told=MERGED), LENGTHS) != []
    before = attention_calls(model)
    got = evaluate(model, batch, LENGTHS)
    assert differences(got, separately(stock, batch, LENGTHS)) == []
    assert attention_calls(model) - before == 2 * LAYERS, "the layers were not run twice: no checkpointing"
    assert packed_forwards(model) >= 1


@pytest.mark.parametrize("kind", ["off", "non-reentrant", "reentrant"])
def test_two_forwards_before_their_backwards(kind):
    stock, model = pair("llama")
    checkpointed(model, kind)
    lengths = (LENGTHS, (11, 2, 4, 17))
    batches = [inputs(length, "position_ids") for length in lengths]
    outputs = [model(**batch, labels=batch["input_ids"]) for batch in batches]
    for output in outputs:
        output.loss.backward()
    expected = {}
    for batch in batches:
        stock(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
    expected = {name: p.grad for name, p in stock.named_parameters()}
    assert differences({name: p.grad for name, p in model.named_parameters()}, expected) == []
    assert packed_forwards(model) == 2
    # the mutant: the second batch with the boundaries of the first
    model.zero_grad()
    wrong = [batches[0], {**batches[1], "packed_sequences": PackedSequences.from_lengths(LENGTHS, "cpu")}]
    for batch in wrong:
        model(**batch, labels=batch["input_ids"]).loss.backward()
    assert differences({name: p.grad for name, p in model.named_parameters()}, expected) != []


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_and_hidden_states(family):
    stock, model = pair(family)
    stock.eval(), model.eval()
    batch = inputs(LENGTHS, "position_ids")
    with torch.no_grad():
        expected = stock(**batch, use_cache=False, output_hidden_states=True)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                got = model(**batch, output_hidden_states=True)
            assert len(got.hidden_states) == LAYERS + 1
            for ours, theirs in zip(
                (got.logits, *got.hidden_states), (expected.logits, *expected.hidden_states), strict=True
            ):
                torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5)
            assert got.past_key_values is None
        mutant = model(**inputs(LENGTHS, "position_ids", told=MERGED)).logits
    assert not torch.allclose(mutant, expected.logits, atol=1e-3)


def test_attention_weights_are_recorded():
    stock = tiny_model("llama", attn_implementation="eager").eval()
    model = patch_model(copy.deepcopy(stock), lora=False)
    batch = inputs(LENGTHS, "position_ids", rows=2)
    expected = stock(**batch, use_cache=False, output_attentions=True)
    got = model(**batch, output_attentions=True)
    for ours, theirs in zip(got.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(got.logits, expected.logits, rtol=2e-5, atol=1e-5)
    assert counters(model)["attention by the previous implementation: attention weights are recorded"] == LAYERS


@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_in_one_forward(family):
    _, model = pair(family)
    model(**inputs(LENGTHS, "position_ids"))
    norms = 2 * LAYERS + 1 + (2 * LAYERS if family == "qwen3" else 0)
    found = {name: count for name, count in counters(model).items() if name != "rope in place"}
    assert found == {
        "rms_norm": norms,
        "rope": LAYERS,
        "add_rms_norm": LAYERS,
        "gated_mlp": LAYERS,
        "attention: sdpa": LAYERS,
        "batches: packed, positions restart": 1,
    }


@pytest.mark.parametrize("write", ["in place", "data", "numpy"])
def test_positions_rewritten_in_their_memory_are_read_again(write):
    """A write through `.data` or numpy leaves no trace on the tensor."""
    stock, model = pair("llama")
    batch = inputs(LENGTHS, "position_ids")
    memory = batch["position_ids"].numpy().copy()
    batch["position_ids"] = torch.from_numpy(memory)
    model(**batch)
    merged = packed_batch(MERGED)["position_ids"]
    if write == "in place":
        batch["position_ids"].copy_(merged)
    elif write == "data":
        batch["position_ids"].data[...] = merged
    else:
        memory[...] = merged.numpy()
    assert differences(evaluate(model, batch, MERGED), separately(stock, batch, MERGED)) == []


@pytest.mark.parametrize("way", ["position_ids and a mask of ones", "cu_seq_lens"])
def test_masks_and_boundaries_rewritten_through_data_are_read_again(way):
    _, model = pair("llama")
    batch = inputs(LENGTHS, way) | {"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long)}
    model(**batch)
    if way == "cu_seq_lens":
        batch["cu_seq_lens_q"].data[1] += 1
        model(**batch)
        assert packed_forwards(model) == 2
        batch["attention_mask"].data[0, 0] = 0
        with pytest.raises(PackingError, match="hides tokens"):
            model(**batch)
    else:
        batch["attention_mask"].data[0, 0] = 0
        model(**batch, use_cache=False)
        assert packed_forwards(model) == 1


# ------------------------------------------------------------------------------------------------ not packed


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_rows_in_training_equal_stock(family):
    stock, model = pair(family)
    ids = packed_batch([12])["input_ids"].repeat(3, 1)
    ids[1:] = ids[1:].flip(-1)
    for extra in ({}, {"attention_mask": torch.ones_like(ids)}, {"position_ids": torch.arange(2, 14)[None]}):
        got = evaluate(model, {"input_ids": ids, **extra}, (12,))
        expected = evaluate(stock, {"input_ids": ids, **extra}, (12,), use_cache=False)
        assert differences(got, expected) == []
    assert packed_forwards(model) == 0
    assert counters(model)["batches: whole rows"] == 3 and attention_calls(model) == 3 * LAYERS


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_outside_training_are_exactly_stock(family, side):
    stock, model = pair(family)
    stock.eval(), model.eval()
    ids = packed_batch([12])["input_ids"].repeat(3, 1)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[2, :9] = 0
    mask = mask if side == "left" else mask.flip(-1)
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    for extra in ({}, {"position_ids": positions}):
        batch = {"input_ids": ids, "attention_mask": mask, **extra}
        got, expected = evaluate(model, batch, (12,)), evaluate(stock, batch, (12,))
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert not torch.equal(got["logits"], evaluate(model, {"input_ids": ids, **extra}, (12,))["logits"])
    reasons = {name: count for name, count in counters(model).items() if "padded" in name}
    assert sum(reasons.values()) >= 2 and all(name.startswith("batches: stock") for name in reasons)


def test_a_prepared_mask_is_used():
    stock, model = pair("llama")
    batch = packed_batch([12])
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    mask[..., 6:, :6] = False
    kwargs = {"input_ids": batch["input_ids"], "attention_mask": mask, "use_cache": False}
    assert torch.equal(model(**kwargs).logits, stock(**kwargs).logits)
    assert counters(model)["batches: stock, a prepared attention mask"] == 1


def test_rows_that_start_at_two_are_not_packed():
    stock, model = pair("llama")
    stock.eval(), model.eval()
    ids = packed_batch([12])["input_ids"].repeat(2, 1)
    for positions in (torch.arange(2, 14)[None], torch.arange(2, 14).repeat(2, 1)):
        kwargs = {"input_ids": ids, "position_ids": positions}
        assert torch.equal(model(**kwargs).logits, stock(**kwargs).logits)
    assert packed_forwards(model) == 0 and counters(model)["batches: stock, padded or ambiguous positions"] == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_several_new_tokens_on_a_cache_are_not_packed(family):
    stock, model = pair(family)
    stock.eval(), model.eval()
    ids = packed_batch([14])["input_ids"]
    results = []
    for each in (stock, model):
        first = each(input_ids=ids[:, :10], use_cache=True)
        assert first.past_key_values.get_seq_length() == 10
        positions = torch.arange(10, 13)[None]
        second = each(input_ids=ids[:, 10:13], position_ids=positions, past_key_values=first.past_key_values)
        results.append(torch.cat([first.logits, second.logits], dim=1))
    assert torch.equal(*results)
    assert packed_forwards(model) == 0 and attention_calls(model) == 0
    assert counters(model)["batches: stock, a cache is in use, which holds one sequence a row"] == 1


def test_positions_of_several_axes_are_not_packed():
    _, model = pair("llama")
    (hook,) = model.model._forward_pre_hooks.values()
    batch = packed_batch(LENGTHS)
    three = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"].expand(3, 1, -1)}
    assert hook(model.model, (), three) is None
    _, announced = hook(model.model, (), {**three, "position_ids": batch["position_ids"]})
    assert announced["packed_sequences"].num_sequences == len(LENGTHS)
    assert counters(model)["batches: stock, positions of 3 dimensions"] == 1


def test_packing_switched_off_goes_the_stock_way():
    stock, model = pair("llama", packing=False)
    batch = inputs(LENGTHS, "position_ids")
    assert torch.equal(model(**batch, use_cache=False).logits, stock(**batch, use_cache=False).logits)
    assert packed_forwards(model) == 0 and attention_calls(model) == 0


def test_another_implementation_chosen_later_is_obeyed():
    stock, model = pair("llama")
    model.set_attn_implementation("eager")
    stock.set_attn_implementation("eager")
    batch = inputs(LENGTHS, "position_ids")
    assert torch.equal(model(**batch, use_cache=False).logits, stock(**batch, use_cache=False).logits)
    assert attention_calls(model) == 0


def test_norms_and_rotation_in_one_kernel():
    """Asked for by name: without a GPU the kernels run in the interpreter."""
    _, apart = pair("qwen3")
    _, model = pair("qwen3", rope="triton", rms_norm="triton")
    model.load_state_dict(apart.state_dict())
    results = []
    for each in (apart, model):
        loss = each.train()(**inputs(LENGTHS, "position_ids"), labels=inputs(LENGTHS, "position_ids")["input_ids"]).loss
        loss.backward()
        results.append({"loss": loss.detach(), **{name: p.grad for name, p in each.named_parameters()}})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-3, atol=1e-5)
    found = counters(model)
    assert found["q and k normalised and rotated in one kernel"] == found["rope"] == LAYERS
    assert found["rms_norm"] == 4 * LAYERS + 1
    seen = []
    model.model.layers[0].self_attn.k_norm.register_forward_hook(lambda *args: seen.append(1))
    model(**inputs(LENGTHS, "position_ids"))
    assert seen and counters(model)["q and k normalised and rotated in one kernel"] == 2 * LAYERS - 1
