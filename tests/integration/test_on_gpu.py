"""Whole models on a GPU, with the kernels that run there: documents kept apart, and errors within stock's own."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from packed_cases import WAYS, attention_calls, counters, evaluate, inputs, leaks, packed_forwards, separately
from padded_cases import DROPPED, one_sequence, padded, train_once
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, packed_batch, tiny_model
from trl import SFTConfig, SFTTrainer

import fastft
from fastft import patch_model
from fastft.demo.tiny import VOCABULARY
from fastft.demo.tiny import tiny_model as demo_model

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
ENGINES = {"rope": "triton", "rms_norm": "triton", "attention": "fa2"}
# Below 128 tokens FlashAttention-2's backward adds up no partial sums, so that it repeats itself bit by bit.
LENGTHS = (40, 75, 1, 96, 44)
MERGED = (40, 172, 44)  # two boundaries lost
LAYERS = 2
STEPS = 3
SIZE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,  # large enough for attention to tell one token from another
}
# Where stock's error is luck: half a percent of a tensor's size, above one rounding of bf16.
FLOOR = 5e-3


def small_model(family, dtype=torch.float32, **config):
    window = {"sliding_window": 24} if family == "mistral" else {}
    return tiny_model(family, **SIZE, **window, **config).to(DEVICE, dtype)


def pair(family, dtype=torch.float32):
    """(exact, stock, patched): the first in fp32 with the very same weights."""
    stock = small_model(family, dtype)
    return copy.deepcopy(stock).float(), stock, patch_model(copy.deepcopy(stock))


def on_device(batch):
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def packed(way="position_ids", **options):
    return on_device(inputs(LENGTHS, way, **options))


def errors(found, exact):
    """Root mean square error of every tensor, relative to the size of the exact one."""
    result = {}
    for name, value in exact.items():
        truth, got = value.double().cpu(), found[name].double().cpu()
        if value.dim() and truth.norm() > 1e-6:
            result[name] = ((got - truth).norm() / truth.norm()).item()
    return result


def close_to_stock(ours, stock, exact):
    """At most twice the error that stock makes on the same batch, and a rounding."""
    assert all(torch.isfinite(value).all() for value in ours.values())
    got, allowed = errors(ours, exact), errors(stock, exact)
    assert len(got) > 10
    too_large = {name: (got[name], allowed[name]) for name in got if got[name] > 2 * allowed[name] + FLOOR}
    assert too_large == {}


def without_scalars(found):
    return {name: value for name, value in found.items() if name not in ("loss", "losses")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_as_if_alone(family, dtype):
    exact, stock, model = pair(family, dtype)
    truth = without_scalars(separately(exact, packed(), LENGTHS))
    theirs = evaluate(stock, packed(), LENGTHS, use_cache=False)
    for way in WAYS:
        close_to_stock(evaluate(model, packed(way), LENGTHS), theirs, truth)
    assert packed_forwards(model) == len(WAYS)
    with pytest.raises(AssertionError):  # the mutant
        close_to_stock(evaluate(model, packed(told=MERGED), LENGTHS), theirs, truth)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_document_changes_no_other_bit(family, rows):
    _, _, model = pair(family, torch.bfloat16)
    assert leaks(model, packed(rows=rows), LENGTHS) == []
    assert leaks(model, packed(rows=rows, told=MERGED), LENGTHS) != []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_of_a_gpu_ran(family):
    _, _, model = pair(family, torch.bfloat16)
    model(**packed())
    replaced = {item.op: item.impl for item in fastft.report(model).replaced}
    assert {op: replaced[op] for op in ENGINES} == ENGINES
    norms = 2 * LAYERS + 1 + (2 * LAYERS if family == "qwen3" else 0)
    at_once = {"q and k normalised and rotated in one kernel": LAYERS} if family == "qwen3" else {}
    assert counters(model) == at_once | {
        "rms_norm": norms,
        "add_rms_norm": LAYERS,
        "gated_mlp": LAYERS,
        "rope": LAYERS,
        f"attention: {ENGINES['attention']}": LAYERS,
        "batches: packed, positions restart": 1,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_rows(family):
    exact, stock, model = pair(family, torch.bfloat16)
    batch = on_device({"input_ids": packed_batch([200])["input_ids"].view(2, 100)})
    exact, theirs, ours = (
        without_scalars(evaluate(each, batch, (100,), use_cache=False)) for each in (exact, stock, model)
    )
    close_to_stock(ours, theirs, exact)
    assert attention_calls(model) == counters(model)["rope"] == LAYERS


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_dropped(family, side):
    models = pair(family, torch.bfloat16)
    batch = on_device(padded(side, LENGTHS))
    exact, theirs, ours = (without_scalars(train_once(each, batch)) for each in models)
    close_to_stock(ours, theirs, exact)
    assert counters(models[2])[DROPPED] == 1
    with one_sequence(), pytest.raises(AssertionError):  # the mutant
        close_to_stock(
            without_scalars(train_once(models[2], {**batch, "attention_mask": batch["attention_mask"].clone()})),
            theirs,
            exact,
        )


def test_a_padded_batch_is_waited_for_once(recwarn):
    _, _, model = pair("llama", torch.bfloat16)
    batch = on_device(padded("right", LENGTHS))
    model(**batch).loss.backward()  # compiles the kernels
    fresh = {**batch, "attention_mask": batch["attention_mask"].clone()}
    recwarn.clear()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        model(**fresh).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in recwarn if "called a synchronizing" in str(warning.message)]) == 1


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_under_autocast(family, checkpointing):
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)
    stock = get_peft_model(small_model(family), config).train()
    stock.get_input_embeddings().requires_grad_(True)  # evaluate() compares the gradient there as well
    model = patch_model(copy.deepcopy(stock), checkpointing="recompute")  # every layer runs twice
    truth = without_scalars(separately(stock, packed(), LENGTHS))
    if checkpointing:
        for each in (stock, model):
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        theirs = evaluate(stock, packed(), LENGTHS, use_cache=False)
        ours = evaluate(model, packed(), LENGTHS)
        mutant = evaluate(model, packed(told=MERGED), LENGTHS)
    assert any("lora_A" in name for name in ours)
    close_to_stock(ours, theirs, truth)
    with pytest.raises(AssertionError):
        close_to_stock(mutant, theirs, truth)
    runs = 2 if checkpointing else 1  # of two batches
    assert counters(model)[f"attention: {ENGINES['attention']}"] == 2 * LAYERS * runs
    assert counters(model)["lora"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_as_stock(family):
    """In fp32: between two tokens that are as good in bf16, a rounding decides."""
    _, stock, model = pair(family)
    ids = packed_batch([60])["input_ids"].view(3, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    batch = on_device({"input_ids": ids, "attention_mask": mask})
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    got, expected = (each.eval().generate(**batch, **options) for each in (model, stock))
    assert torch.equal(got, expected)
    assert model.to(torch.bfloat16).generate(**batch, **options).shape == (3, 32)
    assert counters(model)["rms_norm"] > 0


def test_a_model_moved_to_the_gpu_and_back():
    _, _, model = pair("llama", torch.bfloat16)
    batch, engine = packed(), f"attention: {ENGINES['attention']}"
    on_host = {name: value.cpu() for name, value in batch.items()}
    first = model.cpu()(**on_host).logits
    before = counters(model)
    on_gpu = model.to(DEVICE)(**batch).logits
    assert counters(model)[engine] == before.get(engine, 0) + LAYERS
    assert {item.impl for item in fastft.report(model).replaced if item.op == "rope"} == {ENGINES["rope"]}
    assert torch.equal(model.cpu()(**on_host).logits, first)
    assert counters(model)["attention: sdpa"] >= 2 * LAYERS
    assert ((on_gpu.cpu() - first).double().norm() / first.double().norm()).item() < 0.05


# ---------------------------------------------------------------------------------------------------- SFTTrainer


class Losses(SFTTrainer):
    """Keeps the loss of every training step."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss.detach().float().cpu())
        return loss


def trained(folder, model, tokenizer, checkpointing):
    generator = torch.Generator().manual_seed(0)
    words = ("the", "model", "reads", "a", "short", "text", "and", "learns", "to", "write", "its", "next", "word")
    rows = [torch.randint(0, len(words), (3 + i % 11,), generator=generator).tolist() for i in range(60)]
    args = SFTConfig(
        output_dir=str(folder),
        max_length=64,
        packing=True,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        gradient_checkpointing=checkpointing,
        bf16=True,
        use_cpu=DEVICE.type == "cpu",
        report_to=[],
        save_strategy="no",
        optim="sgd",
        disable_tqdm=True,
        seed=3,
    )
    if args.n_gpu > 1:
        args._n_gpu = 1  # on a host with several, Trainer would wrap the model in nn.DataParallel
    torch.manual_seed(5)  # the adapter's weights
    trainer = Losses(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict({"text": [" ".join(words[i] for i in row) for row in rows]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sft_trainer(tmp_path, checkpointing):
    tokenizer = demo_model()[1]
    stock = small_model("llama", vocab_size=VOCABULARY, attn_implementation="sdpa")
    model = patch_model(copy.deepcopy(stock), checkpointing="recompute")  # every layer runs twice
    theirs = trained(tmp_path / "stock", stock, tokenizer, checkpointing)
    ours = trained(tmp_path / "ours", model, tokenizer, checkpointing)
    assert len(ours.losses) == STEPS
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(theirs.losses), rtol=0.01, atol=0.0)
    assert packed_forwards(ours.model) == STEPS
    runs = 2 if checkpointing else 1
    assert counters(ours.model)[f"attention: {ENGINES['attention']}"] == STEPS * LAYERS * runs
