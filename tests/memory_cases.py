"""Small models that are checkpointed, their steps and what equal gradients mean."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, tiny_model
from torch.multiprocessing.reductions import StorageWeakRef

LAYERS = 5


def model_of(family="llama", **config):
    return tiny_model(family, num_hidden_layers=LAYERS, **config).train()


def batch(length=24, rows=2, seed=0, device="cpu"):
    ids = torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids.to(device), "labels": ids.to(device)}


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def step(model, **kwargs):
    torch.manual_seed(1)  # gpt2 has dropout
    model(**batch(**kwargs)).loss.backward()
    return gradients(model)


def assert_same(got, expected):
    assert got.keys() == expected.keys() and len(got) > 3
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


def break_off(model, layer):
    """A forward that fails inside of a layer, one without backward, and a backward that fails in that layer."""

    def fail(*_):
        raise ValueError("in the middle")

    handle = layer.mlp.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        model(**batch())
    handle.remove()
    model(**batch())
    handle = layer.register_full_backward_hook(fail)
    loss = model(**batch()).loss
    with pytest.raises(ValueError, match="in the middle"):
        loss.backward()
    handle.remove()
    model.zero_grad(set_to_none=True)


def watch_inputs(layers):
    """Weak references to the memory of each layer's input, filled by the next forward."""
    found = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: found.append(StorageWeakRef(args[0].untyped_storage())))
    return found
