"""`prepare_trainer`: the trainer's own collator stops padding, and nothing else changes."""

from __future__ import annotations

import warnings

import pytest
import torch
from packed_cases import counters
from padded_cases import DROPPED
from peft import PromptTuningConfig, get_peft_model
from sft_cases import STEPS, equal_training, sft
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
from trl import SFTTrainer

import fastft
from fastft.errors import UnsupportedModelError

FROM_COLLATOR = "batches: packed, boundaries from the collator"
LEFT_ALONE = "the trainer's collator is left alone: "


def left_alone(model: torch.nn.Module) -> str:
    return next((name.removeprefix(LEFT_ALONE) for name in counters(model) if name.startswith(LEFT_ALONE)), "")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora": True, "gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2, "evaluate": True},
        {"lora": True, "dataloader_num_workers": 1},
    ],
    ids=lambda options: " ".join(options) or "full fine-tuning",
)
def test_the_same_training_without_padding(tmp_path, options):
    stock = sft(tmp_path / "stock", patch=False, packing=False, **options)
    ours = sft(tmp_path / "ours", patch="before", packing=False, **options)
    collator = ours.data_collator
    assert fastft.prepare_trainer(fastft.prepare_trainer(ours)) is ours
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.train(), ours.train()
    equal_training(stock, ours)
    found = counters(ours.model)
    assert found[FROM_COLLATOR] == len(stock.seen) and DROPPED not in found
    assert found["the trainer's collator pads no more"] == 1
    assert ours.data_collator is collator and not collator.padding_free
    for padded, packed in zip(stock.seen, ours.seen, strict=True):
        assert torch.equal(padded["input_ids"][padded["attention_mask"] != 0], packed["input_ids"][0])
    for name in ("num_tokens", "eval_loss"):
        logged = [[entry[name] for entry in each.state.log_history if name in entry] for each in (ours, stock)]
        assert logged[0] == pytest.approx(logged[1], rel=1e-5) and (logged[0] or name == "eval_loss")
    assert "get_train_dataloader" not in vars(stock) and "get_train_dataloader" not in vars(SFTTrainer)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"packing": True}, "it makes batches without padding already"),
        (
            {"packing": True, "packing_strategy": "wrapped"},
            "packing_strategy='wrapped', whose documents see each other",
        ),
        ({"packing": False, "pad_to_multiple_of": 8}, "it pads to a multiple of 8"),
        ({"packing": False, "include_num_input_tokens_seen": "all"}, "the places of its batches are counted"),
        ({"packing": False, "neftune_noise_alpha": 0.0}, "NEFTune's noise depends on the length"),
    ],
)
def test_what_is_left_alone(tmp_path, options, reason):
    stock = sft(tmp_path / "stock", patch=False, **options)
    ours = fastft.prepare_trainer(sft(tmp_path / "ours", patch="before", **options))
    stock.train(), ours.train()
    equal_training(stock, ours)
    assert left_alone(ours.model).startswith(reason)
    assert len(ours.losses) == STEPS and "get_train_dataloader" not in vars(ours)


def test_a_second_call_prepares_anew(tmp_path):
    ours = sft(tmp_path, patch="before")
    fastft.prepare_trainer(ours, fixed_tokens=200)
    assert "get_train_dataloader" in vars(ours)
    fastft.prepare_trainer(ours)
    assert "get_train_dataloader" not in vars(ours) and left_alone(ours.model).startswith("it makes batches without")
    assert [name for name in counters(ours.model) if "trainer" in name] == [LEFT_ALONE + left_alone(ours.model)]
    ours.get_train_dataloader = type(ours).get_train_dataloader.__get__(ours)
    fastft.prepare_trainer(ours)
    assert left_alone(ours.model).startswith("somebody else")


def test_wrapped_documents_see_each_other_as_in_stock(tmp_path):
    ours = sft(tmp_path, patch="before", packing_strategy="wrapped")
    ours.train()
    assert not any(name.startswith("batches: packed") for name in counters(ours.model))


def test_a_collator_of_ones_own(tmp_path):
    ours = sft(tmp_path, patch="before", packing=False)
    padding = ours.data_collator
    ours.data_collator = lambda examples: padding(examples)
    fastft.prepare_trainer(ours).train()
    assert left_alone(ours.model) == "a function is not the one that SFTTrainer makes for text"
    assert counters(ours.model)[DROPPED] == STEPS


def test_losses_and_prompts_that_go_by_rows(tmp_path):
    ours = sft(tmp_path, patch="before", packing=False)
    ours.__class__ = type("Own", (type(ours),), {"compute_loss": lambda self, *args, **kwargs: None})
    fastft.prepare_trainer(ours)
    assert left_alone(ours.model) == "its loss is computed in a way of its own"
    ours = sft(tmp_path, patch="before", packing=False)
    ours.model = get_peft_model(ours.model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    fastft.prepare_trainer(ours)
    assert left_alone(ours.model) == "prompts are put before each row"


def test_other_trainers(tmp_path):
    ours = sft(tmp_path, patch="before", packing=False)
    trainer = Trainer(
        model=ours.model,
        args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]),
        train_dataset=ours.train_dataset,
        data_collator=DataCollatorForLanguageModeling(ours.processing_class, mlm=False),
    )
    assert fastft.prepare_trainer(trainer) is trainer
    assert left_alone(ours.model) == "a Trainer is no SFTTrainer"


def test_a_model_that_is_not_patched(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"Recording has no.*call fastft\.patch_model"):
        fastft.prepare_trainer(sft(tmp_path, patch=False, packing=False))
    with pytest.raises(UnsupportedModelError, match="packs"):
        fastft.prepare_trainer(object())
