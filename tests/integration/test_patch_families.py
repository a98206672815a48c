"""Models that no family file names: packing and attention where their code allows it, an honest reason otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patch_cases import LENGTHS, attention_calls, counters, left_padded, rows, snapshot
from tiny_models import packed_batch, tiny_config, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, PreTrainedModel

import fastft
from fastft import structure
from fastft.code_reading import uses_keywords, words_of
from fastft.errors import PackingError, UnsupportedOptionError
from fastft.families import llama

_GPT2 = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "n_positions": 128,
    "resid_pdrop": 0,
    "embd_pdrop": 0,
    "attn_pdrop": 0,
}
_PACKED: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 3},
    "gemma3_text": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": 3},
    "gpt2": _GPT2,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
_NOT_PACKED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({}, "MambaModel does not take its attention from transformers' AttentionInterface"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "does not take its attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "mixes tokens besides attention"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "mixes tokens besides attention"),
    "bert": ({"is_decoder": True}, "does not make its mask with transformers' create_causal_mask"),
    "stablelm": ({}, "StableLmDecoderLayer.forward hands no keyword arguments on"),
    "doge": ({}, "not all attention in DogeModel is causal self-attention"),
}


def _stock_logits(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(ids, use_cache=False).logits for ids in input_ids.split(LENGTHS, dim=1)], dim=1)


@pytest.mark.parametrize("family", _PACKED)
def test_sequences_of_a_packed_batch_are_kept_apart(family: str) -> None:
    model = tiny_model(family, **_PACKED[family]).eval()
    batch = packed_batch(LENGTHS)
    expected = _stock_logits(model, batch["input_ids"])
    with torch.no_grad():
        leaky = model(batch["input_ids"], use_cache=False).logits
    assert (leaky - expected).abs().max() > 1e-4  # sequences that see each other would be noticed
    padded = model(**left_padded()).logits
    tokens = model.generate(**left_padded(), max_new_tokens=4, do_sample=False)
    fastft.patch_model(model, experts=False)  # which round otherwise
    actual = model(batch["input_ids"], position_ids=batch["position_ids"])
    torch.testing.assert_close(actual.logits, expected, atol=1e-5, rtol=1e-4)
    actual.logits.sum().backward()
    assert sum(count for name, count in counters(model).items() if name.startswith("attention")) == 2
    assert torch.equal(model(**left_padded()).logits, padded)
    assert torch.equal(model.generate(**left_padded(), max_new_tokens=4, do_sample=False), tokens)


@pytest.mark.parametrize("family", _PACKED)
def test_an_unknown_family_gets_what_transformers_interfaces_offer(family: str) -> None:
    model = tiny_model(family, **_PACKED[family])
    before = snapshot(model)
    fastft.patch_model(model)
    report = fastft.report(model)
    offered = {"packing", "attention", "loss", "walks"} | (
        {"experts"} if "num_experts_per_tok" in _PACKED[family] else set()
    )
    assert {item.op for item in report.replaced} == offered
    assert {item.op for item in report.skipped} == {"rope", "rms_norm", "add_rms_norm", "gated_mlp", "lora"}
    name = type(model).__name__
    assert {item.reason for item in report.skipped} == {f"{name} belongs to no family that fastft knows"}
    assert all("family unknown" in item.reason for item in report.replaced if item.op == "attention")
    assert not any("forward" in module.__dict__ for module in model.modules())
    fastft.unpatch_model(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("family", _NOT_PACKED)
def test_a_model_that_cannot_be_packed_is_left_alone_with_the_reason(family: str) -> None:
    config, reason = _NOT_PACKED[family]
    model = tiny_model(family, **config)
    before, expected = snapshot(model), model.eval()(rows()).logits
    fastft.patch_model(model)
    report = fastft.report(model)
    assert not report.replaced
    reasons = {item.op: item.reason for item in report.skipped}
    assert reasons.keys() == {"packing", "attention", "rope", "rms_norm", "add_rms_norm", "gated_mlp", "lora"}
    assert reason in reasons["attention"] and reasons["packing"].startswith(f"{reasons['attention']}; ")
    assert torch.equal(model(rows()).logits, expected)
    model.train()(rows()).logits.sum().backward()
    fastft.unpatch_model(model)
    assert snapshot(model) == before


def test_an_encoder_decoder_is_left_alone() -> None:
    config = tiny_config("t5", d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, decoder_start_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    before = snapshot(model)
    fastft.patch_model(model)
    assert snapshot(model) == before
    reasons = {item.op: item.reason for item in fastft.report(model).skipped}
    assert reasons["packing"] == "encoder-decoder models are not packed"
    model(input_ids=rows(), labels=rows()).loss.backward()


@pytest.mark.parametrize("option", [{"rope": "reference"}, {"rms_norm": "triton"}, {"lora": "fused"}])
def test_an_explicit_option_on_an_unknown_family_raises(option: dict[str, str]) -> None:
    model = tiny_model("phi3")
    (op,) = option
    message = f"{op}='.*' cannot be honoured: Phi3ForCausalLM belongs to no family .*; use {op}='auto' or {op}=False"
    with pytest.raises(UnsupportedOptionError, match=message):
        fastft.patch_model(model, **option)
    with pytest.raises(UnsupportedOptionError, match="attention='sdpa' cannot be honoured for backbone"):
        fastft.patch_model(tiny_model("mamba"), attention="sdpa")


def test_a_subclass_of_a_known_backbone_is_an_unknown_family() -> None:
    """It may compute otherwise; its stock layers are known, and patched as such."""
    model = tiny_model("llama")
    known = type(model.model)
    model.model.__class__ = type("OwnModel", (known,), {"__module__": __name__})
    expected = _stock_logits(model, packed_batch(LENGTHS)["input_ids"])
    fastft.patch_model(model)
    replaced = [(item.op, item.fqn) for item in fastft.report(model).replaced]
    assert len(replaced) == len(set(replaced)) and ("rope", "model.layers.0.self_attn") in replaced
    batch = packed_batch(LENGTHS)
    logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert attention_calls(model) == counters(model)["rope"] == 2


def test_a_foreign_attention_in_a_known_backbone() -> None:
    """One that asks the AttentionInterface is served; one that does not would mix the sequences of a packed batch."""
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    own = type(attention)
    attention.__class__ = type("OwnAttention", (own,), {})
    batch = packed_batch(LENGTHS)
    expected = _stock_logits(model, batch["input_ids"])
    fastft.patch_model(model)
    logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert attention_calls(model) == 2 and counters(model)["rope"] == 1
    fastft.unpatch_model(model)

    attention.__class__ = type(
        "OwnAttention", (own,), {"forward": lambda self, hidden_states, **kwargs: (hidden_states, None)}
    )
    fastft.patch_model(model)
    reasons = {item.op: item.reason for item in fastft.report(model).skipped}
    assert reasons["attention"].startswith("layers.0 (LlamaDecoderLayer) has no attention")
    assert reasons["packing"] == f"{reasons['attention']}; a packed batch is refused"
    with pytest.raises(PackingError, match="several documents"):
        model(**batch)
    model(rows(), labels=rows()).loss.backward()
    assert counters(model)["rms_norm"] == 5


def test_a_base_model_without_head() -> None:
    model = tiny_model("qwen3").model
    fastft.patch_model(model)
    assert [item.fqn for item in fastft.report(model).replaced if item.op == "packing"] == [""]
    batch = packed_batch(LENGTHS)
    model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).last_hidden_state.sum().backward()
    assert attention_calls(model) == 2


def test_a_known_attention_outside_a_known_backbone_keeps_its_attention() -> None:
    model = tiny_model("mamba")
    model.extra = tiny_model("llama").model.layers[0].self_attn
    fastft.patch_model(model)
    skipped = {(item.fqn, item.op): item.reason for item in fastft.report(model).skipped}
    assert skipped["extra", "attention"] == "not below a backbone that fastft packs"
    assert {item.op for item in fastft.report(model).replaced} == {"rope", "loss", "walks"}


@pytest.mark.parametrize("text", ["llama", "qwen2", "gemma3_text"])
def test_a_vision_language_model_is_patched_in_its_language_model_only(text: str) -> None:
    text_config = tiny_config(text).to_dict()
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 8, "patch_size": 4}
    config = tiny_config(
        "llava", text_config=text_config, vision_config=vision, image_token_index=96, image_seq_length=4
    )
    model = AutoModelForImageTextToText.from_config(config)
    pictured = {"input_ids": torch.tensor([[5, 96, 96, 96, 96, 7]]), "pixel_values": torch.randn(1, 3, 8, 8)}
    pictured_logits = model(**pictured).logits  # transformers' own hooks appear at the first call
    batch = packed_batch(LENGTHS)
    batch["input_ids"] = batch["input_ids"].clamp(max=95)
    expected = _stock_logits(model, batch["input_ids"])
    before = snapshot(model)
    fastft.patch_model(model)
    packed = [item.fqn for item in fastft.report(model).replaced if item.op in ("packing", "attention")]
    assert packed[0] == "model.language_model" and len(packed) == 3
    assert all(fqn.startswith("model.language_model") for fqn in packed)
    assert model.config.text_config._attn_implementation == "fastft"
    assert model.config._attn_implementation == model.config.vision_config._attn_implementation == "sdpa"
    logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert attention_calls(model) == 2
    model.config.text_config.use_cache = False
    torch.testing.assert_close(model(**pictured).logits, pictured_logits)
    fastft.unpatch_model(model)
    assert config.text_config.use_cache is False and model.config is config
    config.text_config.use_cache = True
    after = snapshot(model)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == set()


# ------------------------------------------------------------------------------------------------------ structure


def test_words_look_below_decorators_and_into_inner_functions() -> None:
    def create_causal_mask() -> None: ...

    def forward(self, **kwargs):
        return [create_causal_mask() for _ in kwargs], {"or_mask_function": 1}, dict(sliding_window=2)

    words = words_of(torch.no_grad()(forward))
    assert {"or_mask_function", "sliding_window"} <= words
    assert words_of(len) == frozenset()


def test_keywords_that_are_taken_and_dropped_do_not_count() -> None:
    def hands_on(self, x, **kwargs):
        return x(**kwargs)

    def drops(self, x, **kwargs):
        return x()

    def takes_none(self, x):
        return x()

    assert uses_keywords(hands_on)
    assert not uses_keywords(drops) and not uses_keywords(takes_none)


def test_a_layer_without_attention_is_found() -> None:
    model = tiny_model("phi3")
    assert structure.why_not_packable(model.model) == ""
    model.model.layers.append(nn.Linear(32, 32))
    assert "layers.2 (Linear) has no attention" in structure.why_not_packable(model.model)


def test_a_recurrent_part_of_a_layer_is_found_by_its_name() -> None:
    model = tiny_model("phi3")
    model.model.layers[1].recurrent_mixer = nn.Linear(32, 32)
    assert "layers.1.recurrent_mixer (Linear) mixes tokens" in structure.why_not_packable(model.model)


def test_an_attention_with_parameters_that_are_not_known_is_not_bound() -> None:
    attention = tiny_model("llama").model.layers[0].self_attn
    assert structure.why_not_bindable(attention, "attention", llama.SPEC) == ""

    def forward(self, hidden_states, attention_mask=None, extra_bias=None, **kwargs): ...

    attention.__class__ = type("LlamaAttention", (type(attention),), {"forward": forward})
    assert "'extra_bias'" in structure.why_not_bindable(attention, "attention", llama.SPEC)


def test_a_remote_code_model_built_like_llama_is_packed() -> None:
    """A class that transformers does not ship, whose source cannot be read either."""
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaModel

    model: Any = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.__class__ = type("OtherForCausalLM", (LlamaForCausalLM,), {"__module__": "remote"})
    model.model.__class__ = type("OtherModel", (LlamaModel,), {"__module__": "remote"})
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("OtherAttention", (LlamaAttention,), {"__module__": "remote"})
    fastft.patch_model(model)
    batch = packed_batch(LENGTHS)
    expected = _stock_logits(fastft.unpatch_model(model), batch["input_ids"])
    fastft.patch_model(model)
    logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert attention_calls(model) == 2 and "rope" not in counters(model)
