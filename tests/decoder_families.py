"""Tiny configs of decoder families, and the README's table of them, made from what patched models report."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

from tiny_models import packed_batch, tiny_model

from fastft import patch_model, report

_MOE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
_EAGER = {"attn_implementation": "eager"}  # what these need has no SDPA
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
    "num_key_value_heads": 4,
}  # fmt: skip

# transformers model_type -> fields of its config beyond those of every tiny model
DECODERS: dict[str, dict[str, Any]] = {
    "afmoe": _MOE,
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": _ALTERNATING,
    "deepseek_v3": _MOE | _LATENT | {"first_k_dense_replace": 1},
    "ernie4_5": {},
    "exaone4": _ALTERNATING,
    "gemma": {},
    "gemma2": _ALTERNATING | _EAGER,
    "gemma3_text": _ALTERNATING,
    "gemma4_text": _ALTERNATING | {"vocab_size_per_layer_input": 97},
    "glm4": {},
    "glm4_moe": _MOE | {"first_k_dense_replace": 1},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": _ALTERNATING | _MOE | _EAGER,
    "granite": {},
    "granitemoe": _MOE,
    "llama": {},
    "llama4_text": _MOE | {"attention_chunk_size": 8},
    "ministral3": {},
    "mistral": {"sliding_window": 5},
    "mixtral": _MOE,
    "olmo2": {},
    "olmo3": _ALTERNATING,
    "olmoe": _MOE,
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "phi": {},
    "phi3": {"sliding_window": 5},
    "qwen2": {},
    "qwen2_moe": _MOE,
    "qwen3": {},
    "qwen3_moe": _MOE,
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 5},
    # Not served, and the report says why.
    "bloom": {},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "gptj": {"n_layer": 2, "n_head": 4, "n_embd": 32, "rotary_dim": 4},
    "granitemoehybrid": _MAMBA2
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "num_experts": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 8},
    "minimax": _MOE | {"layer_types": ["linear_attention", "full_attention"]},
    "nemotron": {},
    "qwen3_next": _MOE | _LINEAR,
    "stablelm": {},
    "xglm": {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 48},
}
# Dropout draws other numbers for another layout of the same tokens.
_NO_DROPOUT = dict.fromkeys(
    (
        "activation_dropout", "attention_dropout", "attn_pdrop", "dropout", "embd_pdrop", "hidden_dropout", "layerdrop",
        "resid_pdrop", "residual_dropout",
    ),
    0.0,
)  # fmt: skip


def tiny_decoder(family: str, **config: Any) -> Any:
    """A tiny model of a family in training mode, without dropout, with weights large enough for attention to matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fields that a family does not have
        return tiny_model(family, initializer_range=0.2, **{**_NO_DROPOUT, **DECODERS[family], **config})


def is_moe(family: str) -> bool:
    return DECODERS[family].get("num_experts") is not None


def why_stock(model: Any) -> str:
    """Why a patched model's packed rows go the stock way, or ""."""
    return next((item.reason for item in report(model).skipped if item.op == "packing"), "")


def drops_padding(model: Any, side: str = "right") -> bool:
    """Whether a patched model's report promises to drop padding on this side."""
    said = [item.reason for item in report(model).replaced if item.op == "packing"]
    known = any(item.op == "rms_norm" for item in report(model).replaced)
    return any("padding is dropped" in reason for reason in said) and (side == "right" or known)


def served_how(family: str) -> str:
    """What becomes of a packed row of this family: a line of the README's table."""
    model = patch_model(tiny_decoder(family))
    if "is refused" in why_stock(model):
        return "refused with a message: they would see each other"
    if why_stock(model):
        return "kept apart by the model's own code, which stays as it is"
    model(**packed_batch([3, 5]), use_cache=False)
    fused = {item.op for item in report(model).replaced} - {"packing", "attention", "experts", "loss", "walks"}
    if any("by the previous implementation" in name for name in report(model).counters):
        return "kept apart, through a mask of T x T in the model's own attention"
    return "kept apart; kernels for norms and RoPE, fused LoRA" if fused else "kept apart"


def coverage_table() -> str:
    """The README's table."""
    families: dict[str, list[str]] = defaultdict(list)
    for family in sorted(DECODERS):
        families[served_how(family)].append(family)
    lines = ["| documents of a packed row are | families |", "|---|---|"]
    lines += [f"| {how} | {', '.join(families[how])} |" for how in sorted(families)]
    packed = {family: patch_model(tiny_decoder(family)) for family in sorted(DECODERS)}
    kept = [family for family, model in packed.items() if not why_stock(model) and not drops_padding(model)]
    said = f"Padding is dropped in training in those that are kept apart, but for {', '.join(kept)}"
    return "\n".join([*lines, "", f"{said};", "in those of the first line, only where it stands behind the tokens."])


if __name__ == "__main__":
    print(coverage_table())
