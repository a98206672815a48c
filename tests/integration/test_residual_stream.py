"""Norms and embeddings in fp32 under autocast: counted, or lowered where that is asked for."""

from __future__ import annotations

import copy

import pytest
import torch
from patch_cases import counters, snapshot
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from tiny_models import packed_batch, tiny_model

import fastft
from fastft.errors import UnsupportedOptionError

COUNTED = "norms in fp32 under autocast; residual_stream='autocast' lowers them"


def prepared(family="qwen3"):
    """As scripts prepare a model of 4 bits: what is not quantised is in fp32."""
    model = tiny_model(family).bfloat16()
    model.is_loaded_in_4bit = True
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model.is_loaded_in_4bit = False  # its linear layers are plain ones here
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()


def step(model, autocast=True):
    """What layers are given, and the gradients of adapters."""
    seen = []
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0].dtype), with_kwargs=True
        )
        for layer in model.base_model.model.model.layers
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(**packed_batch((5, 7, 3))).loss
    loss.backward()
    for handle in handles:
        handle.remove()
    found = torch.cat([p.grad.float().flatten() for name, p in model.named_parameters() if "lora_" in name])
    model.zero_grad(set_to_none=True)
    return set(seen), loss.detach(), found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fp32_is_counted_and_lowered_on_request(family):
    model = prepared(family)
    lowered = fastft.patch_model(copy.deepcopy(model), residual_stream="autocast")
    fastft.patch_model(model)
    seen, loss, found = step(model)
    assert seen == {torch.float32} and counters(model)[COUNTED] > 0
    seen, other_loss, other = step(lowered)
    assert seen == {torch.bfloat16} and COUNTED not in counters(lowered)
    assert counters(lowered)["add_rms_norm"] == 2
    torch.testing.assert_close(other_loss, loss, rtol=0.01, atol=0)
    assert torch.nn.functional.cosine_similarity(found, other, dim=0) > 0.99


def test_without_autocast_nothing_is_lowered():
    model = fastft.patch_model(tiny_model("llama").train(), residual_stream="autocast")
    assert model(**packed_batch((5, 7, 3))).logits.dtype == torch.float32
    assert COUNTED not in counters(model)


def test_it_can_be_undone_and_is_no_other_option():
    model = tiny_model("llama")
    before = snapshot(model)
    fastft.patch_model(model, residual_stream="autocast")
    assert snapshot(model) != before
    fastft.unpatch_model(model)
    assert snapshot(model) == before
    with pytest.raises(UnsupportedOptionError, match="'auto' or 'autocast'"):
        fastft.patch_model(model, residual_stream="bfloat16")
