"""Models whose decoder layers fuse the addition after attention with the norm behind it, and what they compute."""

from __future__ import annotations

import copy
import dataclasses
import functools

import torch
from decoder_families import tiny_decoder
from tiny_models import VOCAB
from torch import nn

from fastft import PatchConfig, patch_model, report

FAMILIES = ["llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"]
LAYERS = 2
# Everything off but the norms: what is left of a difference comes from the layers.
_OTHERS = {field.name for field in dataclasses.fields(PatchConfig)} - {
    "rms_norm",
    "add_rms_norm",
    "residual_stream",
    "memory_budget",
}
NORMS_ONLY = dict.fromkeys(sorted(_OTHERS), False)


def layers_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]


def fused_model(family="llama", stock=None, **options):
    stock = tiny_decoder(family) if stock is None else stock
    return patch_model(copy.deepcopy(stock), **(options or NORMS_ONLY))


def ids(rows=2, length=7, seed=0):
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def results(model, **batch):
    """Logits, loss and all gradients."""
    batch = batch or {"input_ids": ids(), "labels": ids()}
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"logits": output.logits.detach(), "loss": output.loss.detach()} | found


def differences(found, expected):
    assert found.keys() == expected.keys() and len(found) > 3
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def fusions(model):
    """How many times addition and norm ran as one, and why they did not."""
    counters = report(model).counters
    apart = {name.partition(": ")[2]: n for name, n in counters.items() if name.startswith("add_rms_norm apart")}
    return counters.get("add_rms_norm", 0), apart


def count_checkpoints(model):
    """The layers that called their checkpoint function, by the class that they showed it."""
    calls = []

    def counting(layer, inner, function, *args, **kwargs):
        calls.append(type(layer).__name__)
        return inner(function, *args, **kwargs)

    for layer in layers_of(model):
        layer._gradient_checkpointing_func = functools.partial(counting, layer, layer._gradient_checkpointing_func)
    return calls


class LegacyLayer(nn.Module):
    """Checkpoints around the module's call, as transformers 5.17 does."""

    gradient_checkpointing = False

    def __init__(self, layer):
        super().__init__()
        self.__dict__.update(layer.__dict__)

    def __call__(self, *args, **kwargs):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(functools.partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states, position_embeddings=position_embeddings, **kwargs
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states
