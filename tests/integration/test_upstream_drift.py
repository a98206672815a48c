"""The upstream code that fastft's forwards stand in for, or rely on, is code that somebody has compared them with."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import textwrap

import pytest

from fastft.families import FAMILIES as SPECS

# Besides what is replaced: what the hooks rely on. A 4-D mask passes through, layers hand on kwargs.
OTHERS = {
    "transformers.masking_utils._preprocess_mask_arguments": "a 4-D mask must be returned as it is, first of all",
    "transformers.integrations.sdpa_attention.sdpa_attention_forward": "what a packed batch's attention must equal",
}
# Hashes of 5.17.0 and 5.23.0, one where they agree.
KNOWN: dict[str, tuple[str, ...]] = {
    "transformers.masking_utils._preprocess_mask_arguments": ("1540bf6cb16987e2",),
    "transformers.integrations.sdpa_attention.sdpa_attention_forward": (
        "43d75248d76fb255",
        "c6857e7b5991246b",
    ),
    "transformers.models.llama.modeling_llama.LlamaAttention.forward": ("865d17a1b6edd273",),
    "transformers.models.llama.modeling_llama.LlamaMLP.forward": ("7d2027d4464e3e71",),
    "transformers.models.llama.modeling_llama.LlamaRMSNorm.forward": ("9635bcd843f309a0",),
    "transformers.models.llama.modeling_llama.LlamaModel.forward": ("3ee4b3154dd99641",),
    "transformers.models.llama.modeling_llama.apply_rotary_pos_emb": ("f0e978aab1df6bb0",),
    "transformers.models.llama.modeling_llama.rotate_half": ("7b6c9b425ca04287",),
    "transformers.models.mistral.modeling_mistral.MistralAttention.forward": ("38eb7a675fc00c3f",),
    "transformers.models.mistral.modeling_mistral.MistralMLP.forward": ("7d2027d4464e3e71",),
    "transformers.models.mistral.modeling_mistral.MistralRMSNorm.forward": ("9635bcd843f309a0",),
    "transformers.models.mistral.modeling_mistral.MistralModel.forward": ("3e106c8cfc95b78a",),
    "transformers.models.mistral.modeling_mistral.apply_rotary_pos_emb": ("f0e978aab1df6bb0",),
    "transformers.models.mistral.modeling_mistral.rotate_half": ("7b6c9b425ca04287",),
    "transformers.models.qwen2.modeling_qwen2.Qwen2Attention.forward": ("467d2e0bba2fd378",),
    "transformers.models.qwen2.modeling_qwen2.Qwen2MLP.forward": ("7d2027d4464e3e71",),
    "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm.forward": ("9635bcd843f309a0",),
    "transformers.models.qwen2.modeling_qwen2.Qwen2Model.forward": ("7082cc645fa7709b",),
    "transformers.models.qwen2.modeling_qwen2.apply_rotary_pos_emb": ("f0e978aab1df6bb0",),
    "transformers.models.qwen2.modeling_qwen2.rotate_half": ("7b6c9b425ca04287",),
    "transformers.models.qwen3.modeling_qwen3.Qwen3Attention.forward": ("e0b15d778eecc3a8",),
    "transformers.models.qwen3.modeling_qwen3.Qwen3MLP.forward": ("7d2027d4464e3e71",),
    "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm.forward": ("9635bcd843f309a0",),
    "transformers.models.qwen3.modeling_qwen3.Qwen3Model.forward": ("7082cc645fa7709b",),
    "transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb": ("f0e978aab1df6bb0",),
    "transformers.models.qwen3.modeling_qwen3.rotate_half": ("7b6c9b425ca04287",),
    "transformers.models.granitemoe.modeling_granitemoe.GraniteMoeAttention.forward": ("865d17a1b6edd273",),
    "transformers.models.granitemoe.modeling_granitemoe.GraniteMoeRMSNorm.forward": ("9635bcd843f309a0",),
    "transformers.models.granitemoe.modeling_granitemoe.GraniteMoeModel.forward": ("95f9326ba1580858",),
    "transformers.models.granitemoe.modeling_granitemoe.apply_rotary_pos_emb": ("f0e978aab1df6bb0",),
    "transformers.models.granitemoe.modeling_granitemoe.rotate_half": ("7b6c9b425ca04287",),
    "transformers.models.mixtral.modeling_mixtral.MixtralAttention.forward": ("38eb7a675fc00c3f",),
    "transformers.models.mixtral.modeling_mixtral.MixtralRMSNorm.forward": ("9635bcd843f309a0",),
    "transformers.models.mixtral.modeling_mixtral.MixtralModel.forward": ("851e9999148b6cd5",),
    "transformers.models.mixtral.modeling_mixtral.apply_rotary_pos_emb": ("f0e978aab1df6bb0",),
    "transformers.models.mixtral.modeling_mixtral.rotate_half": ("7b6c9b425ca04287",),
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeAttention.forward": ("865d17a1b6edd273",),
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeMLP.forward": ("7d2027d4464e3e71",),
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeRMSNorm.forward": ("9635bcd843f309a0",),
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeModel.forward": ("364a19816f339ccc",),
    "transformers.models.qwen2_moe.modeling_qwen2_moe.apply_rotary_pos_emb": ("f0e978aab1df6bb0",),
    "transformers.models.qwen2_moe.modeling_qwen2_moe.rotate_half": ("7b6c9b425ca04287",),
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeAttention.forward": ("e0b15d778eecc3a8",),
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeMLP.forward": ("7d2027d4464e3e71",),
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeRMSNorm.forward": ("9635bcd843f309a0",),
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeModel.forward": ("851e9999148b6cd5",),
    "transformers.models.qwen3_moe.modeling_qwen3_moe.apply_rotary_pos_emb": ("f0e978aab1df6bb0",),
    "transformers.models.qwen3_moe.modeling_qwen3_moe.rotate_half": ("7b6c9b425ca04287",),
}


def _forwards() -> dict[str, str]:
    found = dict(OTHERS)
    for spec in SPECS:
        what = {
            f"{spec.attention}.forward": "fastft/modules/attention.py:forward, and the kwargs it gives to attention",
            f"{spec.rms_norm}.forward": "fastft/modules/norm.py:forward, and rounding and epsilon in the family file",
            f"{spec.backbone}.forward": "fastft/modules/backbone.py: kwargs reach layers, masking_utils makes masks",
            "apply_rotary_pos_emb": "fastft/ops/rope, and rope_layout in the family file",
            "rotate_half": "fastft/ops/rope, and rope_layout in the family file",
        }
        if spec.mlp is not None:
            what[f"{spec.mlp}.forward"] = "fastft/modules/mlp.py:forward"
        found |= {f"{spec.module}.{name}": check for name, check in what.items()}
    return found


FORWARDS = _forwards()


def digest(qualified: str) -> str:
    """Hash of a function's code: no comments, docstrings, annotations or layout."""
    module, name = qualified.rsplit(".", 1)
    if module.rsplit(".", 1)[1][0].isupper():  # a method
        module, owner = module.rsplit(".", 1)
        target = getattr(getattr(importlib.import_module(module), owner), name)
    else:
        target = getattr(importlib.import_module(module), name)
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(target)))
    return hashlib.sha256(normalised(source).encode()).hexdigest()[:16]


def normalised(source: str) -> str:
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        elif isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(function)  # unlike ast.dump it is the same in each version of Python


@pytest.mark.parametrize("qualified", FORWARDS)
def test_upstream_is_known(qualified):
    found = digest(qualified)
    assert found in KNOWN.get(qualified, ()), (
        f"{qualified} is not the code that was compared with fastft (hash {found}). Read what changed since the last "
        f"release that passed, check {FORWARDS[qualified]}, run the other integration tests, then add the hash here."
    )


def test_a_change_of_code_is_noticed_and_a_change_of_words_is_not():
    source = inspect.getsource(normalised)
    assert normalised(source) == normalised(source.replace("def ", "# a remark\ndef ").replace("source: str", "source"))
    assert normalised(source) != normalised(source.replace("body[1:]", "body[2:]"))


def test_nothing_that_is_listed_is_gone():
    assert set(KNOWN) == set(FORWARDS)
