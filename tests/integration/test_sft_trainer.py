"""Trainers end to end: TRL's SFTTrainer with packing and the plain Trainer train as stock would have."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from packed_cases import attention_calls, counters, differences, packed_forwards
from sft_cases import MAX_LENGTH, STEPS, equal_training, padding_of, sft, start, texts, weights
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from fastft import patch_model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora": True},
        {"lora": True, "gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"lora": True, "gradient_accumulation_steps": 2},
        {"evaluate": True},
        {"lora": True, "packing_strategy": "bfd_split"},
        {"lora": True, "packing": False},
        {"packing": False, "padding_free": True, "max_length": None},
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()) or "full fine-tuning",
)
def test_the_training_of_stock(tmp_path, options):
    stock = sft(tmp_path / "stock", patch=False, **options)
    ours = sft(tmp_path / "ours", patch="before", **options)
    stock.train(), ours.train()
    equal_training(stock, ours)
    assert packed_forwards(ours.model) >= STEPS and attention_calls(ours.model) > 0
    seen = counters(ours.model)
    assert seen["rms_norm"] > 0 and seen["rope"] > 0
    padded = not (options.get("packing", True) or options.get("padding_free", False))
    assert seen.get("padding dropped, in tokens", 0) == (sum(map(padding_of, stock.seen)) if padded else 0)
    if options.get("evaluate"):
        losses = [[e["eval_loss"] for e in each.state.log_history if "eval_loss" in e] for each in (ours, stock)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0]


@pytest.mark.parametrize("lora", [False, True])
def test_patched_after_the_trainer_was_built(tmp_path, lora):
    stock = sft(tmp_path / "stock", patch=False, lora=lora, gradient_checkpointing=True)
    ours = sft(tmp_path / "ours", patch="after", lora=lora, gradient_checkpointing=True)
    stock.train(), ours.train()
    equal_training(stock, ours)
    assert packed_forwards(ours.model) == STEPS


def test_boundaries_lost_are_caught(tmp_path):
    """The mutant: the same training, with the documents of a row let into one another."""
    stock, ours = sft(tmp_path / "stock", patch=False), sft(tmp_path / "ours", patch="before")
    collate = ours.data_collator

    def merging(examples):
        batch = collate(examples)
        tokens = batch["input_ids"].shape[1]
        whole = torch.tensor([0, tokens], dtype=torch.int32)
        return {**batch, "cu_seq_lens_q": whole, "cu_seq_lens_k": whole, "max_length_q": tokens, "max_length_k": tokens}

    ours.data_collator = merging
    stock.train(), ours.train()
    with pytest.raises(AssertionError):
        equal_training(stock, ours)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_reaches_the_attention(tmp_path, monkeypatch, checkpointing):
    from fastft.modules import attention

    calls = []
    inner = attention._attend_packed

    def spy(shared, module, query, key, value, packed_sequences, **kwargs):
        calls.append((packed_sequences, query.shape[2], kwargs.get("attention_mask")))
        return inner(shared, module, query, key, value, packed_sequences, **kwargs)

    monkeypatch.setattr(attention, "_attend_packed", spy)
    masks = []
    monkeypatch.setattr(attention, "fastft_mask", lambda *a, **k: masks.append(1))
    attention.register()
    trainer = sft(tmp_path, patch="before", lora=True, gradient_checkpointing=checkpointing)
    trainer.train()
    monkeypatch.undo()
    attention.register()
    layers = 2
    runs = 2 if checkpointing else 1
    assert len(calls) == STEPS * layers * runs and masks == []
    by_batch = {id(packed): packed for packed, _, _ in calls}
    assert len(by_batch) == STEPS, "a layer, or a checkpoint's second run, saw other boundaries than the first"
    boundaries = []
    for batch in trainer.seen:
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        boundaries.append((*starts, batch["input_ids"].shape[1]))
        if "cu_seq_lens_q" in batch:  # since TRL 1.16
            assert tuple(batch["cu_seq_lens_q"].tolist()) == boundaries[-1]
    assert [packed.cu_seqlens_host for packed in by_batch.values()] == boundaries
    assert all(len(boundary) > 3 for boundary in boundaries), "nothing was packed"
    how = "boundaries from the collator" if "cu_seq_lens_q" in trainer.seen[0] else "positions restart"
    assert counters(trainer.model)[f"batches: packed, {how}"] == STEPS


def test_a_document_longer_than_max_length_is_cut_as_stock_does(tmp_path):
    stock, ours = sft(tmp_path / "stock", patch=False), sft(tmp_path / "ours", patch="before")
    assert ours.train_dataset[:] == stock.train_dataset[:]
    lengths = [length for row in ours.train_dataset["seq_lengths"] for length in row]
    assert max(lengths) == MAX_LENGTH
    assert max(len(ids) for ids in ours.train_dataset["input_ids"]) <= MAX_LENGTH


def test_the_signature_that_trainers_look_at_is_unchanged(tmp_path):
    model = copy.deepcopy(start()[0])
    before = inspect.signature(model.forward)
    assert inspect.signature(patch_model(model).forward) == before
    stock, ours = (sft(tmp_path / str(patch), patch=patch, lora=True) for patch in (False, "before"))
    assert ours.model_accepts_loss_kwargs == stock.model_accepts_loss_kwargs
    assert inspect.signature(ours.model.forward) == inspect.signature(stock.model.forward)
    assert ours._signature_columns == stock._signature_columns


def test_evaluation_alone(tmp_path):
    stock, ours = (sft(tmp_path / str(patch), patch=patch, evaluate=True) for patch in (False, "before"))
    got, expected = ours.evaluate(), stock.evaluate()
    assert got["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert packed_forwards(ours.model) > 0


# ------------------------------------------------------------------------------------------- the plain Trainer


def tokens(count=24):
    tokenizer = start()[1]
    ids = tokenizer(texts(count)["text"][:], truncation=True, max_length=MAX_LENGTH)["input_ids"]
    return [{"input_ids": row, "labels": list(row)} for row in ids]


def padding(examples):
    longest = max(len(example["input_ids"]) for example in examples)
    batch = {"input_ids": [], "labels": [], "attention_mask": []}
    for example in examples:
        ids, missing = example["input_ids"], longest - len(example["input_ids"])
        batch["input_ids"].append(ids + [0] * missing)
        batch["labels"].append(ids + [-100] * missing)
        batch["attention_mask"].append([1] * len(ids) + [0] * missing)
    return {name: torch.tensor(rows) for name, rows in batch.items()}


def all_labelled(examples):
    batch = padding(examples)
    return {**batch, "labels": batch["input_ids"].clone()}


COLLATORS = {
    "all labelled": lambda: all_labelled,
    "flattening": lambda: DataCollatorWithFlattening(return_tensors="pt"),
    "flattening with kwargs": lambda: DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt"),
    "padding": lambda: padding,
}


class Losses(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss.detach().clone())
        return loss


@pytest.mark.parametrize(
    ("collator", "options", "packed"),
    [
        ("flattening", {}, True),
        ("flattening with kwargs", {}, True),
        ("padding", {}, True),
        ("padding", {"label_smoothing_factor": 0.1}, False),  # the trainer keeps the labels to itself
        ("padding", {"torch_compile": True, "torch_compile_backend": "eager"}, True),
        ("all labelled", {}, False),
    ],
)
def test_plain_trainer(tmp_path, collator, options, packed):
    trainers = []
    for patched in (False, True):
        model = copy.deepcopy(start()[0])
        args = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            optim="sgd",
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=3,
            **options,
        )
        trainer = Losses(
            model=patch_model(model) if patched else model,
            args=args,
            train_dataset=tokens(),
            data_collator=COLLATORS[collator](),
        )
        trainer.at_start = {name: value.clone() for name, value in weights(trainer).items()}
        trainer.train()
        trainers.append(trainer)
    equal_training(*trainers)
    assert packed_forwards(trainers[1].model) == (2 * STEPS if packed else 0)


@pytest.mark.parametrize("lora", [False, True])
def test_a_collator_that_labels_the_padding(tmp_path, lora):
    """Stock trains on it, whatever TRL puts in the place of a model's forward."""
    trainers = []
    for patch in (False, "before", "after"):
        trainer = sft(tmp_path / str(patch), patch=patch, packing=False, lora=lora)
        trainer.data_collator = COLLATORS["all labelled"]()
        trainer.train()
        trainers.append(trainer)
    for ours in trainers[1:]:
        equal_training(trainers[0], ours)
        assert counters(ours.model)["batches: stock, an output at padding is used"] == STEPS


def test_plain_loop():
    """A loop of one's own keeps `use_cache` at its default, which makes stock let packed documents into one another."""
    rows = tokens(12)
    collate = DataCollatorWithFlattening(return_tensors="pt")
    found = []
    for patched in (False, True):
        model = copy.deepcopy(start()[0]).train()
        if patched:
            patch_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses = []
        for first in range(0, len(rows), 4):
            options = {} if patched else {"use_cache": False}
            loss = model(**collate(rows[first : first + 4]), **options).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append((torch.stack(losses), dict(model.named_parameters()), model))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    assert differences(found[1][1], found[0][1], rtol=1e-4, atol=1e-5) == []
    assert packed_forwards(found[1][2]) == 3
