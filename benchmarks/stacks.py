"""The stacks under comparison: each builds a model and an `SFTTrainer` the way its own documentation says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import PRESETS, build_config, build_model

LORA_RANK = 16
EXPERT_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA_ALPHA = 16
NEEDED_PACKAGES: dict[str, tuple[str, ...]] = {
    "transformers": (),
    "liger": ("liger_kernel",),
    "unsloth": ("unsloth",),
    "fastft": ("fastft",),
}


class StackUnavailable(Exception):
    """The stack, or a package that the asked-for method needs, is not installed here."""


@dataclass
class Built:
    """A model ready for training and what the trainer needs besides it."""

    model: Any
    peft_config: Any = None
    trainer_arguments: dict[str, Any] = field(default_factory=dict)
    attention: str = ""
    # Time spent on writing a random checkpoint, which no user has to do.
    checkpoint_seconds: float = 0.0
    # Read after training: what the stack says about itself.
    report: Callable[[], dict[str, Any] | None] = lambda: None


def check_available(stack: str, method: str) -> None:
    """Raises StackUnavailable with what is missing and how to get it."""
    packages = NEEDED_PACKAGES[stack] + (("bitsandbytes",) if method == "qlora" else ())
    for package in packages + ("trl",) + (() if method == "full" else ("peft",)):
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise StackUnavailable(
                f"--stack {stack} --method {method} needs the package {name}, which is not installed here: "
                f"pip install {name}, or choose another stack."
            )
    if stack in ("liger", "unsloth") and not torch.cuda.is_available():
        raise StackUnavailable(f"--stack {stack} needs a GPU, PyTorch sees none here: choose transformers or fastft.")
    if method == "qlora" and not torch.cuda.is_available():
        raise StackUnavailable("--method qlora is measured on a GPU and PyTorch sees none here: choose lora or full.")


def import_first(stack: str) -> None:
    """Unsloth asks to be imported before transformers, TRL and PEFT."""
    if stack == "unsloth":
        import unsloth  # noqa: F401


def choose_attention(stack: str, model: str, asked: str | None, device: torch.device, patch_options: str = "") -> str:
    """The attention implementation a run starts from: what was asked, else the best the stack can import.

    fastft starts from what a user without flash-attn has (SDPA), since it brings its own attention; with packing=False
    it leaves attention to the model, which then gets the best as the stock model does.
    """
    able = PRESETS[model].stock_attention
    if asked is not None:
        return asked
    own = stack == "fastft" and _patch_options(patch_options).get("packing") is not False
    flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None and not own
    preferred = "flash_attention_2" if flash else "sdpa"
    return preferred if preferred in able else able[0]


def build(args: Any, device: torch.device, tokenizer: Any) -> Built:
    """The model of `args` on `device`, prepared by `args.stack`."""
    if args.stack == "unsloth":
        return _build_unsloth(args, tokenizer)
    attention = choose_attention(args.stack, args.model, args.attention, device, args.patch_options)
    checkpoint_seconds = 0.0
    if args.method == "qlora":
        model, checkpoint_seconds = _load_four_bit(args, attention)
    else:
        model = build_model(build_config(args.model, args.layers), attention, device, args.seed)
    built = Built(model, _lora_config(args), attention=attention, checkpoint_seconds=checkpoint_seconds)
    if args.stack == "liger":
        built.trainer_arguments["use_liger_kernel"] = True
    if args.stack == "fastft":
        import fastft

        # fastft makes its public names on first use, so only the running module has them.
        library: Any = fastft
        library.patch_model(model, **_patch_options(args.patch_options))
        built.report = lambda: summarise_report(library.report(model))
    return built


def _patch_options(text: str) -> dict[str, Any]:
    pairs = (pair.split("=", 1) for pair in text.split())
    return {name: False if value == "False" else value for name, value in pairs}


def summarise_report(report: Any) -> dict[str, Any]:
    """Counts of a fastft report: operations replaced and skipped (by operation), launches, and its printed text."""

    def by_op(items: Any) -> dict[str, int]:
        counts: dict[str, int] = {}
        for item in items or ():
            counts[str(getattr(item, "op", item))] = counts.get(str(getattr(item, "op", item)), 0) + 1
        return counts

    launches = getattr(report, "counters", None) or {}
    return {
        "replaced": by_op(getattr(report, "replaced", None)),
        "skipped": by_op(getattr(report, "skipped", None)),
        "counters": {str(name): int(count) for name, count in launches.items()},
        "text": str(report),
    }


def _lora_config(args: Any) -> Any:
    if args.method == "full":
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        lora_dropout=0.0,
        bias="none",
        target_modules=PRESETS[args.model].lora_targets,
        target_parameters=EXPERT_PARAMETERS if getattr(args, "expert_adapters", False) else None,
        task_type="CAUSAL_LM",
    )


def write_checkpoint(args: Any, folder: str) -> float:
    """Saves the random model in another process (its seconds are returned): this one's GPU memory stays untouched."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.models", args.model, "--save", folder, "--seed", str(args.seed)]
    if args.layers is not None:
        command += ["--layers", str(args.layers)]
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    subprocess.run(command, check=True, cwd=root, env={**os.environ, "PYTHONPATH": path}, stdout=sys.stderr)
    return time.perf_counter() - begin


def _load_four_bit(args: Any, attention: str) -> tuple[Any, float]:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        seconds = write_checkpoint(args, folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=quantisation,
            dtype=torch.bfloat16,
            attn_implementation=attention,
            device_map={"": 0},
        )
    return model, seconds


def _build_unsloth(args: Any, tokenizer: Any) -> Built:
    from unsloth import FastLanguageModel

    checkpointing = {"on": "unsloth", "plain": True, "off": False}[args.checkpointing]
    with tempfile.TemporaryDirectory() as folder:
        seconds = write_checkpoint(args, folder)
        tokenizer.save_pretrained(folder)
        model, _ = FastLanguageModel.from_pretrained(
            model_name=folder,
            max_seq_length=args.length,
            dtype=torch.bfloat16,
            load_in_4bit=args.method == "qlora",
            full_finetuning=args.method == "full",
            use_gradient_checkpointing=checkpointing,
        )
    if args.method != "full":
        model = FastLanguageModel.get_peft_model(
            model,
            r=LORA_RANK,
            lora_alpha=LORA_ALPHA,
            lora_dropout=0,
            bias="none",
            target_modules=PRESETS[args.model].lora_targets,
            use_gradient_checkpointing=checkpointing,
            random_state=args.seed,
            max_seq_length=args.length,
        )
    return Built(model, attention="unsloth", checkpoint_seconds=seconds)
