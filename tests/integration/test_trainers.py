"""TRL's trainers on padded batches: the same losses, metrics and weights as stock, computed without the padding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from packed_cases import attention_calls, counters, differences
from padded_cases import DROPPED, one_sequence
from peft import LoraConfig
from sft_cases import start
from tiny_models import tiny_model as tiny_moe
from torch import nn
from transformers import AutoModelForSequenceClassification

from fastft import patch_model

WORDS = ["the", "model", "reads", "a", "short", "text", "and", "learns", "to", "write", "its", "next", "word"]
STEPS = 3


def texts(seed: int, count: int = 24) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 14, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, 13, (n,), generator=generator).tolist()) for n in lengths]


def preferences() -> Dataset:
    return Dataset.from_dict({"prompt": texts(1), "chosen": texts(2), "rejected": texts(3)})


def judgements() -> Dataset:
    return Dataset.from_dict({"prompt": texts(1), "completion": texts(2), "label": [i % 2 == 0 for i in range(24)]})


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": texts(1)})


def conversations() -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts(1)]})


def variety(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def causal_lm(folder: Path) -> nn.Module:
    """A copy that names a folder with its weights: some trainers load their reference from there."""
    model, tokenizer = copy.deepcopy(start()[0]), start()[1]
    if not (folder / "config.json").exists():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


def mixture(folder: Path) -> nn.Module:
    """Of which TRL records the router logits, for the balancing loss."""
    del folder
    config = copy.deepcopy(start()[0].config)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.2}
    return tiny_moe("qwen3_moe", vocab_size=config.vocab_size, router_aux_loss_coef=0.5, **experts)


def texts_alone() -> Dataset:
    return Dataset.from_dict({"text": texts(1)})


def reward_model(folder: Path) -> nn.Module:
    del folder
    config = copy.deepcopy(start()[0].config)
    config.num_labels = 1
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    model.model.load_state_dict(start()[0].model.state_dict())
    return model


def teacher() -> nn.Module:
    model = copy.deepcopy(start()[0])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


_SAMPLED = {"num_generations": 2, "max_completion_length": 8, "beta": 0.1}
_ADAPTER = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
# name -> trainer, config, dataset, fields of the config, arguments of the trainer
CASES: dict[str, tuple[Any, Any, Callable[[], Dataset], dict[str, Any], dict[str, Any]]] = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, preferences, {"max_length": 64}, {}),
    "dpo, lora": (trl.DPOTrainer, trl.DPOConfig, preferences, {"max_length": 64}, {"peft_config": _ADAPTER}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, judgements, {"max_length": 64}, {}),
    "sft, experts": (trl.SFTTrainer, trl.SFTConfig, texts_alone, {"max_length": 64}, {}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, preferences, {"max_length": 64}, {}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, prompts, _SAMPLED | {"num_iterations": 2}, {"reward_funcs": variety}),
    "grpo, lora": (
        trl.GRPOTrainer, trl.GRPOConfig, prompts, _SAMPLED, {"reward_funcs": variety, "peft_config": _ADAPTER},
    ),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, prompts, _SAMPLED, {"reward_funcs": variety}),
    "distillation": (
        trl.DistillationTrainer, trl.DistillationConfig, conversations, {"max_completion_length": 8}, {"teacher": True},
    ),
}  # fmt: skip


def run(name: str, folder: Path, patched: bool) -> Any:
    trainer_class, config_class, dataset, fields, arguments = CASES[name]
    made = {"reward": reward_model, "sft, experts": mixture}.get(name, causal_lm)
    model = made(folder / "weights")
    arguments = dict(arguments)
    distilled = arguments.pop("teacher", False)
    if distilled:
        arguments["teacher_model"] = teacher()
    if patched:  # a distillation trainer calls the model without labels, and uses no output at padding
        patch_model(model, unpad=True if distilled else "auto")
    if patched and distilled:
        patch_model(arguments["teacher_model"], unpad=True)
    config = config_class(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=STEPS, learning_rate=1e-2,
        lr_scheduler_type="constant", optim="sgd", bf16=False, use_cpu=True, report_to=[], logging_steps=1,
        save_strategy="no", disable_tqdm=True, seed=3, gradient_checkpointing=False, **fields,
    )  # fmt: skip
    torch.manual_seed(5)  # the adapter's weights
    trainer = trainer_class(model=model, args=config, train_dataset=dataset(), processing_class=start()[1], **arguments)
    trainer.at_start = trained_weights(trainer)
    trainer.train()
    return trainer


def trained_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def metrics(trainer: Any) -> list[dict[str, float]]:
    clocks = ("runtime", "per_second", "time")
    return [
        {name: float(value) for name, value in entry.items() if not any(clock in name for clock in clocks)}
        for entry in trainer.state.log_history
    ]


def unequal(ours: Any, stock: Any) -> list[str]:
    found = differences(trained_weights(ours), trained_weights(stock), rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(metrics(ours), metrics(stock), strict=True):
        assert mine.keys() == theirs.keys()
        if abs(theirs.get("rewards/margins", 1.0)) < 1e-6:  # before the first step the signs of nothing are counted
            theirs = {name: value for name, value in theirs.items() if name != "rewards/accuracies"}
        found += [name for name, value in theirs.items() if mine[name] != pytest.approx(value, rel=1e-3, abs=3e-6)]
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_on_padded_batches_is_that_of_stock(name: str, tmp_path: Path) -> None:
    stock, ours = (run(name, tmp_path, patched) for patched in (False, True))
    assert unequal(ours, stock) == []
    moved = [name for name, value in trained_weights(ours).items() if not torch.equal(value, ours.at_start[name])]
    assert len(moved) > len(ours.at_start) / 2
    found = counters(ours.model)
    assert (name == "sft, experts") == any("aux_loss" in entry for entry in metrics(ours))
    assert found[DROPPED] >= STEPS and found["padding dropped, in tokens"] > 0 and attention_calls(ours.model) > 0
    assert ("lora" in name) == (found.get("loss", 0) >= STEPS)  # the other heads are trained
    if name == "distillation":
        assert counters(ours.teacher_model)[DROPPED] == STEPS


@pytest.mark.parametrize("name", ["distillation", "dpo", "reward", "sft, experts"])
def test_rows_that_see_each_other_would_be_noticed(name: str, tmp_path: Path) -> None:
    stock = run(name, tmp_path, False)
    with one_sequence():
        ours = run(name, tmp_path, True)
    assert unequal(ours, stock) != []
