"""Tiny random models of the families that fastft knows, and packed batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]

_SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_config(family: str, **config: Any) -> Any:
    """The config of a tiny model of `family` (a transformers model_type); `config` overrides its fields."""
    return AutoConfig.for_model(family, **{**_SIZE, **config})


def tiny_model(family: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A tiny causal language model in training mode with random weights; norms and biases are random too."""
    return model_from(tiny_config(family, **config), seed)


def model_from(config: Any, seed: int = 0) -> PreTrainedModel:
    """A causal language model built from this very config object, with the weights of `seed`, in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a wrong or missing one
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


def packed_batch(lengths: Sequence[int], vocab: int = VOCAB, seed: int = 0) -> dict[str, torch.Tensor]:
    """One row with sequences of these lengths one after another, as a flattening collator makes it.

    Returns:
        input_ids, position_ids and labels, each [1, sum(lengths)]; the first label of each sequence is -100.
    """
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, vocab, (1, sum(lengths)), generator=generator)
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "labels": input_ids.masked_fill(position_ids == 0, -100),
    }
