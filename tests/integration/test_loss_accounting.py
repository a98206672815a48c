"""The same samples give one loss and one gradient, however they are cut into batches, micro-batches and processes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_cases import attention_calls, counters, differences
from tiny_models import VOCAB, tiny_model
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from fastft import patch_model

ROOT = Path(__file__).parents[2]
LENGTHS = (3, 17, 9, 1, 12, 5, 20, 8)


def samples() -> list[dict[str, list[int]]]:
    """Eight of them, with prompts of other lengths in front of their targets, and one without any target."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        labels = [-100 if place < number else token for place, token in enumerate(ids)]
        found.append({"input_ids": ids, "labels": labels})
    return found


def pad(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(example["input_ids"]) for example in examples)
    ids, mask, labels = (torch.full((len(examples), longest), fill) for fill in (0, 0, -100))
    for row, example in enumerate(examples):
        length = len(example["input_ids"])
        ids[row, :length], mask[row, :length] = torch.tensor(example["input_ids"]), 1
        labels[row, :length] = torch.tensor(example["labels"])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def pad_with_a_tail(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {
        name: nn.functional.pad(x, (0, 6), value=-100 if name == "labels" else 0) for name, x in pad(examples).items()
    }


COLLATORS = {
    "padded": lambda: pad,
    "padded with a tail": lambda: pad_with_a_tail,
    "packed": lambda: DataCollatorWithFlattening(return_flash_attn_kwargs=True),
}
IN_TWO_PROCESSES = ("padded", "packed")


class Recording(Trainer):
    """Keeps the gradient that a step applies, and makes each process see its share in order."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def create_optimizer(self, *args: Any) -> Any:
        made = super().create_optimizer(*args)
        made.register_step_pre_hook(lambda *_: self.note())
        return made

    def note(self) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


def step(folder: Path, model: nn.Module, batch_size: int, accumulation: int, collator: str) -> tuple[float, dict]:
    """The logged loss and the gradient of one step over all eight samples."""
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation,
        max_steps=1, learning_rate=1e-2, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, use_cpu=True,
        report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        average_tokens_across_devices=True,
    )  # fmt: skip
    trainer = Recording(model=model, args=args, train_dataset=samples(), data_collator=COLLATORS[collator]())
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, trainer.gradients


def whole(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """The sum of the samples' own losses over the number of all targets; the first token of a sample is none."""
    total, targets = torch.zeros(()), 0
    for sample in samples():
        labels = torch.tensor(sample["labels"][1:])
        if not (labels != -100).any():
            continue
        logits = model(input_ids=torch.tensor([sample["input_ids"]]), use_cache=False).logits[0, :-1]
        total = total + nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        targets += int((labels != -100).sum())
    (total / targets).backward()
    return float(total / targets), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (1, 8), (4, 2), (3, 3)])
def test_however_the_samples_are_cut(tmp_path: Path, batch_size: int, accumulation: int, collator: str) -> None:
    stock = tiny_model("llama", initializer_range=0.2)
    model = patch_model(copy.deepcopy(stock))
    loss, gradients = step(tmp_path, model, batch_size, accumulation, collator)
    expected_loss, expected = whole(stock)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert differences(gradients, expected) == []
    if collator != "packed" and batch_size > 1:
        assert counters(model)["batches: packed, padding dropped"] == accumulation


def test_a_token_too_many_would_be_noticed(tmp_path: Path) -> None:
    """The mutant: a label on a sample's first token, which only the sample before it could predict."""
    stock = tiny_model("llama", initializer_range=0.2)

    def flatten(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(examples)
        batch["labels"][0, LENGTHS[0]] = 5
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COLLATORS, "packed", lambda: flatten)
        loss, gradients = step(tmp_path, patch_model(copy.deepcopy(stock)), 8, 1, "packed")
    expected_loss, expected = whole(stock)
    assert loss != pytest.approx(expected_loss, rel=1e-4) and differences(gradients, expected) != []


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes found with each collator, started once for all: to import what they need takes longer."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = subprocess.run(
        [*launcher, __file__, str(folder), *IN_TWO_PROCESSES],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    return folder


@pytest.mark.parametrize("collator", IN_TWO_PROCESSES)
def test_two_processes(two_processes: Path, collator: str) -> None:
    stock = tiny_model("llama", initializer_range=0.2)
    found = torch.load(two_processes / f"{collator}.pt")
    expected_loss, expected = whole(stock)
    assert found["loss"] == pytest.approx(expected_loss, rel=1e-4)
    assert differences(found["gradients"], expected) == []
    assert found["attention_calls"] == 2 * 2  # layers, micro-batches


def main(folder: str, *collators: str) -> None:
    """One of the two processes: two micro-batches of two samples each, with each of the collators."""
    for collator in collators:
        model = patch_model(tiny_model("llama", initializer_range=0.2))
        loss, gradients = step(Path(folder) / collator, model, 2, 2, collator)
        if torch.distributed.get_rank() == 0:
            found = {"loss": loss, "attention_calls": attention_calls(model)}
            torch.save(
                {**found, "gradients": {n.removeprefix("module."): g for n, g in gradients.items()}},
                Path(folder) / f"{collator}.pt",
            )
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may outlive a process group that is taken down, and abort the process


if __name__ == "__main__":
    main(*sys.argv[1:])
