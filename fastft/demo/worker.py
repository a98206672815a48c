"""One training run of the demo in a process of its own, so that patches and peak memory of two runs never mix.

`python -m fastft.demo.worker --stack fastft` prints one JSON object a line: `stage` while it prepares, `step` after
each optimiser step, `result` at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from fastft.demo.data import as_messages, docstring_pairs
from fastft.demo.models import load_model

if TYPE_CHECKING:
    import torch

STACKS = ("padded", "packed", "fastft")
LEARNING_RATE = 2e-3
LORA_RANK = 8
# Of the padded run, the one that has to fit: 102 GiB with 8,192 real tokens, 82% of its batch padding (H200).
PADDED_BYTES_A_TOKEN = 13 * 2**20


class CountingCollator:
    """Passes batches on from the trainer's collator and notes how many tokens each has, and which."""

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        self.collate = collate
        self.batches: list[dict[str, Any]] = []

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collate(examples)
        ids = batch["input_ids"]
        mask = batch.get("attention_mask")
        self.batches.append(
            {
                "real_tokens": int(ids.numel() if mask is None else mask.sum()),
                "tokens": ids.numel(),
                "digest": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16],
            }
        )
        return batch


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says; every line on standard output is an event of its own."""
    args = _parse(argv)
    events = _claim_stdout()

    def emit(event: str, **values: Any) -> None:
        print(json.dumps({"event": event, **values}), file=events, flush=True)

    emit("result", **run(args, emit))
    return 0


def run(args: argparse.Namespace, emit: Callable[..., None]) -> dict[str, Any]:
    """Builds model, data and trainer, trains `args.steps` steps and returns what was measured."""
    import torch
    from transformers import set_seed

    _quiet_libraries()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _fill_in_sizes(args, device)

    def stage(text: str) -> None:
        emit("stage", text=text, steps=args.steps)

    stage("loading the model")
    model, tokenizer = _model_and_tokenizer(args, device)
    if args.stack == "fastft":
        stage("patching the model")
        # The two lines this is all about.
        import fastft

        fastft.patch_model(model)
    stage("preparing the data")
    # After patching, so that the adapters start from the same numbers in all three runs.
    set_seed(args.seed)
    # Nothing is saved, but the trainer wants a folder.
    with tempfile.TemporaryDirectory(prefix="fastft-demo-") as folder:
        trainer, collator = _trainer(args, model, tokenizer, device, emit, folder)
        adapters = _digest_of_adapters(trainer.model)
        stage("training")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    return {
        "stack": args.stack,
        "model": "tiny random Llama" if args.tiny else "SmolLM2-135M-Instruct",
        "lora_rank": LORA_RANK,
        "steps": args.steps,
        "tokens_per_step": args.tokens,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "peak_memory_bytes": _peak_memory(device),
        "adapter_digest": adapters,
        "batches": collator.batches[: args.steps],
        "report": _report(model) if args.stack == "fastft" else None,
    }


def _fill_in_sizes(args: argparse.Namespace, device: torch.device) -> None:
    """Sizes for the machine: three runs within five minutes on two CPU cores, steps worth their launches on a GPU."""
    if device.type == "cpu":
        steps, tokens = 8, 384
    else:
        import torch

        steps, tokens = 30, _tokens_that_fit(torch.cuda.get_device_properties(device).total_memory)
    args.steps = args.steps or steps
    args.tokens = args.tokens or tokens


def _tokens_that_fit(memory_bytes: int) -> int:
    """Real tokens of a step: the largest power of two whose padded run takes at most three quarters of the memory."""
    fitting = memory_bytes * 3 // (4 * PADDED_BYTES_A_TOKEN)
    return int(min(8192, max(256, 2 ** (max(fitting, 1).bit_length() - 1))))


def _trainer(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    device: torch.device,
    emit: Callable[..., None],
    folder: str,
) -> tuple[Any, CountingCollator]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, ProgressCallback
    from trl import SFTConfig, SFTTrainer

    pairs = docstring_pairs(args.pairs, args.seed)
    dataset = Dataset.from_list([{"messages": as_messages(pair)} for pair in pairs])
    packing = args.stack != "padded"
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    config = SFTConfig(
        output_dir=folder,
        save_strategy="no",
        report_to="none",
        packing=packing,
        max_length=args.tokens,
        per_device_train_batch_size=1 if packing else _padded_batch_size(pairs, tokenizer, args.tokens),
        max_steps=args.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=bf16,
        fp16=device.type == "cuda" and not bf16,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        logging_steps=1,
        disable_tqdm=True,
        seed=args.seed,
    )
    adapters = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=adapters,
        callbacks=[_step_events(emit, device)],
    )
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    collator = CountingCollator(trainer.data_collator)
    trainer.data_collator = collator
    return trainer, collator


def _step_events(emit: Callable[..., None], device: torch.device) -> Any:
    import torch
    from transformers import TrainerCallback

    class StepEvents(TrainerCallback):
        """Reports the loss as the trainer logs it, with the wall time since the step before."""

        started = 0.0

        def _now(self) -> float:
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = self._now()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kw: Any) -> None:
            if logs and "loss" in logs:
                now = self._now()
                emit("step", step=state.global_step, loss=logs["loss"], seconds=now - self.started)
                self.started = now

    return StepEvents()


def _padded_batch_size(pairs: list[dict[str, str]], tokenizer: Any, tokens: int) -> int:
    """As many documents as hold about `tokens` real tokens: then both kinds of run take equal steps."""
    lengths = [len(tokenizer.apply_chat_template(as_messages(pair), return_dict=True)["input_ids"]) for pair in pairs]
    return max(1, round(tokens * len(lengths) / sum(min(length, tokens) for length in lengths)))


def _model_and_tokenizer(args: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    import torch

    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if bf16 else torch.float32
    model, tokenizer = load_model("tiny" if args.tiny else "smollm2", dtype, args.seed)
    return model.to(device), tokenizer


def _digest_of_adapters(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            digest.update(name.encode() + parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _report(model: torch.nn.Module) -> dict[str, Any]:
    import fastft

    report = fastft.report(model)
    return {
        "replaced": [{"fqn": r.fqn, "op": r.op, "impl": r.impl, "reason": r.reason} for r in report.replaced],
        "skipped": [{"fqn": s.fqn, "op": s.op, "reason": s.reason} for s in report.skipped],
        "counters": dict(report.counters),
    }


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _quiet_libraries() -> None:
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def _claim_stdout() -> TextIO:
    """Standard output for events alone: whatever libraries print goes to standard error instead."""
    sys.stdout.flush()
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fastft.demo.worker", description=__doc__)
    parser.add_argument("--stack", choices=STACKS, required=True)
    parser.add_argument("--steps", type=int, help="optimiser steps (default: 8 on a CPU, 30 on a GPU)")
    parser.add_argument("--tokens", type=int, help="real tokens a step, about (default: 384 on a CPU, more on a GPU)")
    parser.add_argument("--pairs", type=int, default=1000, help="question and answer pairs in the data set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights instead of SmolLM2")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
