"""Models of the true published shapes with random weights: nothing is downloaded.

Run as a script it writes such a model to a folder, for the loaders that only read a folder (4-bit loading, Unsloth):
`python benchmarks/models.py Llama-3.2-1B --layers 4 --save DIR`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """What the published `config.json` of a model says, as far as it shapes the computation."""

    config_class: str
    config: dict[str, Any]
    moe: bool = False
    stock_attention: tuple[str, ...] = ("flash_attention_2", "sdpa", "eager")

    @property
    def lora_targets(self) -> list[str]:
        """All linear layers of a dense model; attention only where the experts are 3-D parameters."""
        return list(ATTENTION_LINEARS if self.moe else ATTENTION_LINEARS + MLP_LINEARS)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> ModelPreset:
    return ModelPreset(
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    )


PRESETS: dict[str, ModelPreset] = {
    "tiny": ModelPreset(
        "LlamaConfig",
        {
            "vocab_size": 1024,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
    ),
    "Llama-3.2-1B": ModelPreset(
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen3-30B-A3B": ModelPreset(
        "Qwen3MoeConfig",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.001,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        moe=True,
    ),
    "gpt-oss-20b": ModelPreset(
        "GptOssConfig",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "router_aux_loss_coef": 0.9,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        moe=True,
        # FlashAttention-2 and SDPA of the stock stack carry no attention sinks.
        stock_attention=("eager",),
    ),
}


def build_config(name: str, layers: int | None = None) -> Any:
    """The transformers config of a preset, cut to `layers` decoder layers if given."""
    import transformers

    preset = PRESETS[name]
    values = dict(preset.config)
    if layers is not None:
        values["num_hidden_layers"] = layers
    return getattr(transformers, preset.config_class)(**values)


def build_model(config: Any, attention: str, device: torch.device, seed: int) -> Any:
    """The model with random weights made on `device`: bfloat16 on a GPU, float32 on a CPU."""
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=PRESETS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = build_config(args.model, args.layers)
    build_model(config, "eager", device, args.seed).save_pretrained(args.save)


if __name__ == "__main__":
    main()
