"""Generation with a patched model: the same tokens as stock, however the cache and the batch look."""

from __future__ import annotations

import copy

import pytest
import torch
from packed_cases import attention_calls, counters, inputs, pair
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, packed_batch, tiny_model

from fastft import patch_model
from fastft.modules.attention import AttentionName

NEW = 8
MODES = {
    "greedy": {"do_sample": False},
    "beam": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
}


def generate(model, ids, **kwargs):
    torch.manual_seed(7)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, **kwargs}
    return model.eval().generate(ids, **options)


def prompts(rows=3, length=9):
    ids = packed_batch([length] * rows)["input_ids"].view(rows, length)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[-1, :1] = 0
    return ids.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_as_stock(family, mode):
    stock, model = pair(family)
    ids, mask = prompts()
    got, expected = (generate(each, ids, attention_mask=mask, **MODES[mode]) for each in (model, stock))
    assert torch.equal(got, expected)
    assert got.shape == (3, 9 + NEW)
    # a prompt without padding, long enough to leave the window of mistral
    one = ids[1:2]
    assert torch.equal(generate(model, one, **MODES[mode]), generate(stock, one, **MODES[mode]))
    assert counters(model)["rms_norm"] > 0 and attention_calls(model) == 0


def test_the_tokens_depend_on_the_padding_mask():
    """The mutant of the tests above: a lost mask changes the tokens."""
    _, model = pair("llama")
    ids, mask = prompts()
    with_mask = generate(model, ids, attention_mask=mask, do_sample=False)
    assert not torch.equal(with_mask, generate(model, ids, attention_mask=torch.ones_like(mask), do_sample=False))


def test_the_tokens_depend_on_the_window():
    narrow, wide = pair("mistral")[1], patch_model(tiny_model("mistral", initializer_range=0.2, sliding_window=None))
    ids, _ = prompts()
    assert not torch.equal(generate(narrow, ids, do_sample=False), generate(wide, ids, do_sample=False))


def test_assisted_decoding():
    stock, model = pair("llama")
    draft = tiny_model("llama", seed=1, num_hidden_layers=1)
    ids, _ = prompts(rows=1)
    expected = generate(stock, ids, do_sample=False)
    for assistant in (draft, patch_model(copy.deepcopy(draft))):
        assistant.eval()
        assert torch.equal(generate(model, ids, do_sample=False, assistant_model=assistant), expected)
    assert torch.equal(generate(model, ids, do_sample=False, prompt_lookup_num_tokens=2), expected)


@pytest.mark.parametrize("order", ["adapter first", "patch first"])
def test_after_training_steps_with_an_adapter(order):
    stock = tiny_model("qwen3", initializer_range=0.2)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = copy.deepcopy(stock)
    models = []
    for each, patched in ((stock, False), (model, True)):
        if patched and order == "patch first":
            patch_model(each)
        torch.manual_seed(3)
        each = get_peft_model(each, config)
        if patched and order == "adapter first":
            patch_model(each)
        models.append(each)
    ids, mask = prompts()
    batch = inputs((5, 9, 12), "position_ids")
    for _ in range(2):
        for each in models:
            each.train()
            optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.3)
            each(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        got, expected = (generate(each, ids, attention_mask=mask, do_sample=False) for each in reversed(models))
        assert torch.equal(got, expected)
    assert attention_calls(models[1]) > 0
    with models[0].disable_adapter(), models[1].disable_adapter():
        plain = [generate(each, ids, attention_mask=mask, do_sample=False) for each in models]
    assert torch.equal(*plain) and not torch.equal(plain[0], got)


def test_a_cache_of_the_callers_own_continues():
    stock, model = pair("mistral")
    ids, _ = prompts(rows=1)
    results = []
    for each in (stock, model):
        each.eval()
        with torch.no_grad():
            out = each(input_ids=ids, use_cache=True)
            for token in (11, 12, 13):
                out = each(input_ids=torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        results.append(out.logits)
    assert torch.equal(*results)


def test_a_decoding_loop_in_training_mode_has_its_cache():
    tokens = []
    for model in pair("llama"):
        ids, found = packed_batch([9])["input_ids"], []
        with torch.no_grad():
            out = model.train()(input_ids=ids)
            for _ in range(6):
                found.append(out.logits[:, -1:].argmax(-1))
                out = model(input_ids=found[-1], past_key_values=out.past_key_values)
        tokens.append(torch.cat(found, 1))
    assert torch.equal(*tokens)


def test_a_cache_asked_for_in_training_is_returned():
    stock, model = pair("llama")
    ids = packed_batch([9])["input_ids"]
    got, expected = (each.train()(input_ids=ids, use_cache=True) for each in (model, stock))
    assert torch.equal(got.logits, expected.logits) and got.past_key_values.get_seq_length() == 9
    asked = [each.train()(input_ids=ids, output_attentions=True, use_cache=False).attentions for each in (model, stock)]
    assert (asked[0] is None) == (asked[1] is None)


def test_flash_attention_of_before_sees_its_own_name(monkeypatch):
    """It asks the config which implementation it is; `fastft` is none that it knows."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def flash(module, query, *args, **kwargs):
        seen.append(module.config._attn_implementation)
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash)
    _, model = pair("llama")
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == "fastft":
            module.config._attn_implementation_internal = AttentionName("flash_attention_2")
    with torch.no_grad():
        model.eval()(input_ids=packed_batch([9])["input_ids"])
    assert seen == ["flash_attention_2"] * 2
