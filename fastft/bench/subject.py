"""The model that is measured: its shapes are somebody's, its weights are random, and nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fastft.errors import UnsupportedModelError, UnsupportedOptionError

TINY = "tiny"
LORA_RANK = 16
# Small, but with layers enough to see, and with layer inputs of 4 MiB at 8,192 tokens in 16 bits: large enough for
# fastft to send them to the host.
TINY_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1 << 17,
    "tie_word_embeddings": True,
}


def build_config(name: str, layers: int | None = None) -> Any:
    """A transformers config.

    Args:
        name: "tiny", a `config.json`, or a folder with one.
        layers: cut to so many decoder layers, if given.

    Raises:
        UnsupportedOptionError: no such file, or more layers than there are.
        UnsupportedModelError: a file that is no config, or one of a quantised model.
    """
    from transformers import AutoConfig, LlamaConfig

    if name == TINY:
        shape = TINY_SHAPE if layers is None else {**TINY_SHAPE, "num_hidden_layers": layers}
        return LlamaConfig(**shape)
    values = _read(Path(name))
    if values.get("quantization_config"):
        raise UnsupportedModelError(
            f"{name} is of a quantised model, whose weights cannot be made at random; give the model it was made of"
        )
    kind = values.pop("model_type", None)
    try:
        config = AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise UnsupportedModelError(f"{name} is of a model that this transformers does not know: {error}") from error
    if layers is not None:
        _cut(config, layers)
    return config


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedOptionError(
            f"--model: {file} cannot be read ({error.strerror}); give {TINY!r}, a config.json or a folder with one "
            "(names of the Hugging Face hub are not looked up)"
        ) from error
    except ValueError as error:
        raise UnsupportedModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UnsupportedModelError(f"{file} is not the config of a model")
    return values


def _cut(config: Any, layers: int) -> None:
    owner = config.get_text_config()
    there = owner.num_hidden_layers
    if layers > there:
        raise UnsupportedOptionError(f"--layers {layers}: this model has {there}")
    for name, value in list(vars(owner).items()):
        if isinstance(value, list) and len(value) == there:  # something of each layer, such as its kind of attention
            setattr(owner, name, value[:layers])
    owner.num_hidden_layers = layers


def build_model(config: Any, method: str, device: torch.device, seed: int = 0) -> Any:
    """A causal language model in training mode, and with adapters on all linear layers if `method` is "lora".

    Its weights have 16 bits on a GPU and 32 on a CPU.

    Raises:
        UnsupportedModelError: the config is not of a causal language model.
    """
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise UnsupportedModelError(f"{config.model_type} is no causal language model: {error}") from error
    model = model.to(device).train()
    if method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters)


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The layers that can be checkpointed, first to last: of several stacks the longest.

    Raises:
        UnsupportedModelError: there are none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    stacks: list[list[torch.nn.Module]] = [
        [layer for layer in module if isinstance(layer, GradientCheckpointingLayer)]
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
    ]
    longest = max(stacks, key=len, default=[])
    if not longest:
        raise UnsupportedModelError(f"{type(model).__name__} has no layers that transformers can checkpoint")
    return longest
