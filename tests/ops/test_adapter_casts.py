"""Copies of all adapters in one launch, for the forward that begins: each for one call, and never out of date."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import packed_batch, tiny_model

import fastft
from fastft.ops import adapter_casts
from fastft.ops.adapter_casts import AdapterCasts

BF16 = torch.bfloat16


@pytest.fixture
def single_casts(monkeypatch):
    """Calls that make the copies of one group."""
    calls = []
    original = adapter_casts.cast
    monkeypatch.setattr(adapter_casts, "cast", lambda *args: calls.append(1) or original(*args))
    return calls


def group(*ranks, size=24, device="cpu"):
    As = [torch.randn(rank, size, device=device) for rank in ranks]
    return As, [torch.randn(7 + rank, rank, device=device) for rank in ranks]


def get(store, adapters):
    with torch.no_grad():
        return store.get(*adapters, BF16)


def assert_copies(casts, adapters):
    (stacked, Bs), (As, expected) = casts, adapters
    assert torch.equal(stacked, torch.cat(As).to(BF16)) and stacked.is_contiguous()
    assert all(torch.equal(B, other.to(BF16)) and B.is_contiguous() for B, other in zip(Bs, expected, strict=True))
    assert all(x.data_ptr() % 16 == 0 for x in (stacked, *Bs))


def test_what_the_forward_before_asked_for_is_copied_at_once(device, single_casts):
    store, groups = AdapterCasts(), [group(4, device=device), group(3, 5, 2, device=device), group(8, 8, device=device)]
    store.begin_forward()
    for each in groups:
        get(store, each)
    store.end_forward()
    assert len(single_casts) == 3
    for As, Bs in groups:
        for x in (*As, *Bs):
            x.data.add_(1)  # as fused optimizers do: no version counts it
    store.begin_forward()
    for each in groups:
        assert_copies(get(store, each), each)
    assert len(single_casts) == 3
    store.end_forward()


def test_a_copy_serves_one_call(single_casts):
    store, adapters = AdapterCasts(), group(4)
    get(store, adapters)
    store.begin_forward()
    get(store, adapters)
    adapters[0][0].data.mul_(2)
    assert_copies(get(store, adapters), adapters)
    assert len(single_casts) == 2


def test_what_was_not_asked_for_is_out_of_date_after_the_forward(single_casts):
    store, adapters = AdapterCasts(), group(4)
    get(store, adapters)
    store.begin_forward()  # a layer that is left out
    store.end_forward()
    adapters[1][0].data.mul_(2)
    assert_copies(get(store, adapters), adapters)
    store.begin_forward()
    store.begin_forward()  # nobody asked in between
    assert not store._ready
    assert len(single_casts) == 2


def test_what_changed_or_died_since_is_copied_by_itself(single_casts):
    store, adapters, other = AdapterCasts(), group(4), group(2)
    get(store, adapters), get(store, other)
    store.begin_forward()
    with torch.no_grad():
        adapters[0][0].add_(1)
    assert_copies(get(store, adapters), adapters)
    assert len(single_casts) == 3
    del other
    store.end_forward()
    store.begin_forward()
    assert len(store._ready) == 1


def test_copies_of_an_earlier_forward_stay_what_they_were():
    """Its nodes have them still."""
    store, adapters = AdapterCasts(), group(4)
    get(store, adapters)
    store.begin_forward()
    stacked, (B,) = get(store, adapters)
    before = stacked.clone(), B.clone()
    for x in (*adapters[0], *adapters[1]):
        x.data.zero_()
    store.begin_forward()
    get(store, adapters)
    assert torch.equal(stacked, before[0]) and torch.equal(B, before[1])


def model_of(**config):
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | config
    model = get_peft_model(tiny_model("llama").bfloat16(), LoraConfig(**options)).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return model


def step(model):
    with torch.autocast("cpu", dtype=BF16):
        loss = model(**packed_batch((5, 7, 3))).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach()} | found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_copies_once_a_forward(checkpointing, single_casts):
    model, fresh = model_of(), model_of()
    fresh.load_state_dict(model.state_dict())
    for each in (model, fresh):
        fastft.patch_model(each)
        each.enable_input_require_grads()
        if checkpointing:
            each.gradient_checkpointing_enable({"use_reentrant": False})
    step(model)
    assert len(single_casts) == 8  # four groups of two layers
    for each in (model, fresh):
        for name, parameter in each.named_parameters():
            if "lora_" in name:
                parameter.data.mul_(1.5)
    single_casts.clear()
    found = step(model)
    assert not single_casts
    expected = step(fresh)
    assert len(single_casts) == 8
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_forward_that_breaks_off_leaves_nothing(single_casts):
    model = fastft.patch_model(model_of())
    step(model)
    layer = model.base_model.model.model.layers[1]
    handle = layer.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    handle.remove()
    store = layer.mlp._fastft.shared.projector._casts
    assert not store._ready
    single_casts.clear()
    step(copy.deepcopy(model))
    assert len(single_casts) == 8


def test_adapters_are_switched(single_casts):
    model = fastft.patch_model(model_of())
    step(model)
    model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.set_adapter("other")
    single_casts.clear()
    first, second = step(model), step(model)
    assert len(single_casts) in (0, 8) and all(torch.equal(first[name], value) for name, value in second.items())
    fastft.unpatch_model(model)
    assert not any("fastft" in hook.__module__ for m in model.modules() for hook in m._forward_pre_hooks.values())
