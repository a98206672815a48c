"""The guard on models that fastft does not serve: nothing packed goes through mixed, and nothing else is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from decoder_families import tiny_decoder, why_stock
from packed_cases import CONFIG, LENGTHS, counters, differences, evaluate, inputs, leaks, separately
from padded_cases import padded
from tiny_models import packed_batch, tiny_config
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    DebertaV2ForMaskedLM,
    DynamicCache,
    OpenAIGPTLMHeadModel,
    XLMWithLMHeadModel,
)

from fastft import patch_model, report
from fastft.errors import PackingError

OWN_CODE = ["gptj", "nemotron", "stablelm"]
MEET = "would see each other"


def both(family):
    stock = tiny_decoder(family)
    return stock, patch_model(copy.deepcopy(stock), lora=False)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("way", ["position_ids", "position_ids and a mask of ones", "cu_seq_lens", "cu_seq_lens alone"])
@pytest.mark.parametrize("family", OWN_CODE)
def test_the_models_own_code_gets_what_it_needs(family, way, rows):
    stock, model = both(family)
    batch = inputs(LENGTHS, way.removesuffix(" alone"), rows=rows)
    if "alone" in way:
        del batch["position_ids"]
    assert leaks(model, batch, LENGTHS, rounding=1e-6) == []
    expected = separately(stock, batch, LENGTHS)
    assert differences(evaluate(model, batch, LENGTHS), expected, rtol=1e-4, atol=1e-5) == []
    assert counters(model)["batches: packed, kept apart by the model's own code"] == 3


def test_arguments_by_position():
    _, model = both("gptj")
    batch = inputs(LENGTHS, "position_ids")
    expected = model.transformer(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    given = (batch["input_ids"], None, None, None, batch["position_ids"], None, True)
    assert torch.equal(model.transformer(*given).last_hidden_state, expected.last_hidden_state)


def test_boundaries_that_contradict_the_batch():
    _, model = both("stablelm")
    _, refused = both("bloom")
    batch = inputs(LENGTHS, "cu_seq_lens")
    for boundaries in ([0, 5, 34], [0, 34]):
        other = torch.tensor(boundaries, dtype=torch.int32)
        wrong = {"cu_seq_lens_q": other, "cu_seq_lens_k": other, "max_length_q": 34, "max_length_k": 34}
        if len(boundaries) == 3:
            with pytest.raises(PackingError, match="tell of different documents"):
                model(**{**batch, **wrong})
        with pytest.raises(PackingError, match=f"{MEET}|tell of different documents"):
            refused(**{**batch, **wrong})
    with pytest.raises(PackingError, match="must be tensors, got list"):
        refused(**{**batch, "cu_seq_lens_q": [0, 5, 34], "cu_seq_lens_k": [0, 5, 34]})


@pytest.mark.parametrize("family", ["llama", "lfm2", "stablelm"])
def test_an_index_of_documents_without_their_positions(family):
    _, model = both(family)
    batch = {"input_ids": packed_batch([12])["input_ids"], "seq_idx": torch.tensor([[0] * 5 + [1] * 7])}
    with pytest.raises(PackingError, match="seq_idx came without position_ids"):
        model(**batch)


@pytest.mark.parametrize("positions", [True, False])
def test_masks_beside_boundaries(positions):
    """Padding leaves no room for boundaries; a prepared mask says who sees whom, and the model's own code obeys it."""
    stock, model = both("stablelm")
    batch = inputs(LENGTHS, "cu_seq_lens")
    if not positions:
        del batch["position_ids"]
    hiding = torch.ones_like(batch["input_ids"])
    hiding[0, -2:] = 0
    with pytest.raises(PackingError, match="an attention_mask that hides tokens"):
        model(**batch, attention_mask=hiding)
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    prepared = (documents[:, None] == documents)[None, None]
    assert torch.equal(model(**batch, attention_mask=prepared).logits, stock(**batch, attention_mask=prepared).logits)


@pytest.mark.parametrize("family", ["bloom", "stablelm", "llama"])
def test_boundaries_beside_a_cache(family):
    _, model = both(family)
    with pytest.raises(PackingError, match="cu_seq_lens_q cannot be honoured"):
        model(**inputs(LENGTHS, "cu_seq_lens"), past_key_values=DynamicCache(config=model.config))


@pytest.mark.parametrize("name", ["MambaModel", "OpenAIGPTLMHeadModel"])
def test_decoders_under_other_names(name):
    if name == "MambaModel":
        model = tiny_decoder("mamba").base_model
    else:
        config = AutoConfig.for_model("openai-gpt", vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        model = OpenAIGPTLMHeadModel(config)
    patch_model(model)
    with pytest.raises(PackingError, match=MEET):
        model(**inputs(LENGTHS, "position_ids"))


def test_refusals_are_counted():
    _, model = both("bloom")
    with pytest.raises(PackingError, match=MEET):
        model(**inputs(LENGTHS, "position_ids"))
    assert counters(model) == {"batches: packed, refused": 1}


def test_another_attention_after_patching():
    stock, model = both("stablelm")
    model.set_attn_implementation("eager")
    batch = inputs(LENGTHS, "position_ids")
    with pytest.raises(PackingError, match="was set to 'eager' after patching"):
        model(**batch)
    patch_model(model, lora=False)
    expected = separately(stock, batch, LENGTHS)
    assert differences(evaluate(model, batch, LENGTHS), expected, rtol=1e-4, atol=1e-5) == []


def with_four_axes():
    """As vision-language models hand positions on to their text model: those of the text come first."""
    batch = inputs(LENGTHS, "position_ids")
    return {**batch, "position_ids": batch["position_ids"][None].expand(4, -1, -1)}


def test_positions_of_four_axes_in_a_hybrid_model():
    _, model = both("qwen3_next")
    with pytest.raises(PackingError, match=MEET):
        model(**with_four_axes())


def test_positions_of_four_axes_in_a_served_model():
    sizes = tiny_config("llama", **CONFIG).to_dict()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    text = {name: sizes[name] for name in (*names, "num_key_value_heads", "initializer_range")}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config={**text, "rope_parameters": rope}, vision_config=vision, image_token_id=90,
        video_token_id=91, vision_start_token_id=92, vision_end_token_id=93,
    )  # fmt: skip
    model = patch_model(AutoModelForImageTextToText.from_config(config).train(), lora=False)
    assert leaks(model, with_four_axes(), LENGTHS) == []
    assert counters(model)["batches: packed, positions restart"] == 2
    mutant = inputs(LENGTHS, "position_ids", told=(5, 22, 7))
    mutant["position_ids"] = mutant["position_ids"][None].expand(4, -1, -1)
    assert leaks(model, mutant, LENGTHS) != []


# ------------------------------------------------------------------------------------------------ let through


def test_encoders_may_start_their_positions_again():
    """XLM does for the translation of a sentence, which is to see the original."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    xlm = AutoConfig.for_model("xlm", vocab_size=97, emb_dim=32, n_layers=2, n_heads=4)
    deberta = AutoConfig.for_model("deberta-v2", intermediate_size=48, **sizes)
    bert = AutoConfig.for_model("bert", intermediate_size=48, **sizes)
    given = {"input_ids": packed_batch([12])["input_ids"], "position_ids": torch.arange(6).repeat(2)[None]}
    megatron = AutoConfig.for_model("megatron-bert", intermediate_size=48, **sizes)
    made = [XLMWithLMHeadModel(xlm), DebertaV2ForMaskedLM(deberta)]
    made += [AutoModelForMaskedLM.from_config(config) for config in (bert, megatron)]
    for stock in made:
        stock.eval()
        model = patch_model(copy.deepcopy(stock))
        assert torch.equal(model(**given).logits, stock(**given).logits)
        assert "refused" not in str(report(model))


@pytest.mark.parametrize("family", ["bloom", "gptj", "lfm2", "llama", "stablelm"])
def test_one_graph_in_evaluation(family):
    stock, model = both(family)
    ids = packed_batch([12])["input_ids"]
    torch._dynamo.reset()
    compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(input_ids=ids, use_cache=False).logits, stock.eval()(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ["bloom", "lfm2", "llama", "stablelm"])
def test_shapes_alone(family):
    _, model = both(family)
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(1, 12, dtype=torch.long)
        positions, mask = torch.arange(12)[None], torch.ones_like(ids)
        given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
        assert model.eval()(**given).logits.shape == (1, 12, 97)


@pytest.mark.parametrize("family", ["bloom", "lfm2", "qwen3_next", "nemotron"])
def test_generation_passes_the_guard(family):
    stock = tiny_decoder(family).eval()
    model = patch_model(copy.deepcopy(stock), lora=False)
    batch = padded("left")
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**given, **options), stock.generate(**given, **options))


def test_the_guard_lets_one_document_and_separate_rows_through():
    stock = tiny_decoder("lfm2")
    model = patch_model(copy.deepcopy(stock), lora=False)
    ids = packed_batch([12])["input_ids"]
    whole = torch.tensor([0, 12], dtype=torch.int32)
    ends = torch.tensor([0, 12, 12, 12], dtype=torch.int32)  # padded to a constant count
    lengths = {"cu_seq_lens_q": whole, "cu_seq_lens_k": whole, "max_length_q": 12, "max_length_k": 12}
    positions = torch.arange(12)[None]
    padded_ends = {**lengths, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    assert torch.equal(model(ids, position_ids=positions, **padded_ends).logits, stock(ids).logits)
    for given in ({"position_ids": positions}, {"position_ids": positions, **lengths}, {"position_ids": positions + 3}):
        assert torch.equal(model(input_ids=ids, **given).logits, stock(input_ids=ids, **given).logits)
    rows = {"input_ids": ids.view(2, 6), "position_ids": torch.arange(6).expand(2, -1)}
    assert torch.equal(model(**rows).logits, stock(**rows).logits)
    with pytest.raises(PackingError, match="fastft does not serve this model"):
        model(**inputs(LENGTHS, "packed_sequences"))


def test_the_guard_refuses_what_a_head_hands_on_by_position():
    model = patch_model(tiny_decoder("lfm2"), lora=False)
    batch = inputs(LENGTHS, "position_ids")
    with pytest.raises(PackingError, match="would see each other"):
        model(batch["input_ids"], None, batch["position_ids"])
    with pytest.raises(PackingError, match="would see each other"):
        model.model(batch["input_ids"], None, batch["position_ids"])


@pytest.mark.parametrize("family", ["bloom", "jamba", "stablelm"])
def test_a_copy_keeps_its_guard(family):
    model = copy.deepcopy(patch_model(tiny_decoder(family), lora=False))
    assert why_stock(model)
    batch = inputs(LENGTHS, "position_ids")
    if family == "stablelm":
        model(**batch)
        assert counters(model)["batches: packed, kept apart by the model's own code"] == 1
    else:
        with pytest.raises(PackingError, match="would see each other"):
            model(**batch)
