"""SFTTrainer on a tiny model, recording what it was fed and its losses; and what equal training means."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from datasets import Dataset
from packed_cases import differences
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from fastft import patch_model
from fastft.demo.tiny import tiny_model

MAX_LENGTH = 48
STEPS = 3


@cache
def start():
    """The model and tokenizer that each run copies, with weights large enough for a leak to show."""
    model, tokenizer = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model, tokenizer


def texts(count=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    words = ("the", "model", "reads", "a", "short", "text", "and", "learns", "to", "write", "its", "next", "word")
    lengths = torch.randint(3, 14, (count,), generator=generator).tolist()
    lengths[0] = 400  # longer than max_length
    rows = [torch.randint(0, len(words), (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"text": [" ".join(words[i] for i in row) for row in rows]})


def lora_config():
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)


class Recording(SFTTrainer):
    """Keeps the loss of every micro-batch and what the collator had handed over."""

    def training_step(self, model, inputs, *args, **kwargs):
        seen = self.__dict__.setdefault("seen", [])
        seen.append({key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()})
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss.detach().clone())
        return loss


def sft(tmp_path, *, patch, lora=False, evaluate=False, **options):
    model, tokenizer = copy.deepcopy(start()[0]), start()[1]
    if patch == "before":
        patch_model(model)
    defaults = {
        "output_dir": str(tmp_path),
        "max_length": MAX_LENGTH,
        "packing": True,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "sgd",
        "disable_tqdm": True,
        "seed": 3,
    }
    if evaluate:
        options |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    torch.manual_seed(5)  # the adapter's weights
    trainer = Recording(
        model=model,
        args=SFTConfig(**defaults | options),
        train_dataset=texts(),
        eval_dataset=texts(12, seed=1) if evaluate else None,
        processing_class=tokenizer,
        peft_config=lora_config() if lora else None,
    )
    if patch == "after":
        patch_model(trainer.model)
    trainer.at_start = {name: value.clone() for name, value in weights(trainer).items()}
    return trainer


def padding_of(batch):
    return int((batch["attention_mask"] == 0).sum())


def weights(trainer):
    return {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}


def equal_training(stock, ours):
    """Both have trained: the same losses, the same trainable weights within fp32 rounding, and they moved."""
    assert len(ours.losses) == len(stock.losses) > 0
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(stock.losses), rtol=1e-5, atol=1e-6)
    assert differences(weights(ours), weights(stock), rtol=1e-4, atol=1e-5) == []
    assert all(not torch.equal(value, ours.at_start[name]) for name, value in weights(ours).items())
    logged = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (ours, stock)]
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)
