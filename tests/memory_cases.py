"""Small models that are checkpointed, their steps and what equal gradients mean."""

from __future__ import annotations

import torch
from tiny_models import VOCAB, tiny_model

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
