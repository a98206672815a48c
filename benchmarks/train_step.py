"""Measures one training stack on one model: one process a run, one JSON line on stdout.

    python benchmarks/train_step.py --stack transformers --model Llama-3.2-1B --checkpointing off --profile

The model has the true shapes and random weights, training goes through TRL's SFTTrainer, and every number is of this
run: real tokens (padding not counted) a second, step times with the device drained at both ends, peak memory, time to
the first step.
"""

from __future__ import annotations

import time

PROCESS_START = time.perf_counter()

import argparse  # noqa: E402
import contextlib  # noqa: E402
import gc  # noqa: E402
import importlib.metadata  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import shutil  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: the repository root has to be importable, this folder need not be
    sys.path[0] = str(ROOT)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# With more GPUs in sight the Trainer would wrap the model in DataParallel.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")

import torch  # noqa: E402

from benchmarks import models, stacks, text  # noqa: E402

EXIT_UNAVAILABLE = 3
# Arguments of the trainer that decide how much a step does.
SAME_WORK = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "optim")
PROFILED_STEPS = 3
WATCHED_STEPS = 2
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "bitsandbytes",
    "liger-kernel",
    "unsloth",
    "fastft",
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", choices=stacks.NEEDED_PACKAGES, required=True)
    parser.add_argument("--model", choices=models.PRESETS, required=True)
    parser.add_argument("--layers", type=int, help="cut the model to this many decoder layers")
    parser.add_argument("--method", choices=("full", "lora", "qlora"), default="lora")
    parser.add_argument("--expert-adapters", action="store_true", help="LoRA on the experts of sparse layers as well")
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--checkpointing", choices=("on", "off", "plain"), default="on", help="plain: Unsloth without its offload"
    )
    parser.add_argument("--attention", choices=("flash_attention_2", "sdpa", "eager"), help="of the stock model")
    parser.add_argument("--data", type=Path, help="JSON list of instruction/input/output (default: docstrings)")
    parser.add_argument("--tokenizer", choices=("auto", "smollm2", "local"), default="auto")
    parser.add_argument("--rows", type=int, default=2, help="rows of a batch")
    parser.add_argument("--length", type=int, default=4096, help="most tokens of a row")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--patch-options", default="", help='for --stack fastft, e.g. "rope=False lora=False"')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help=f"profile {PROFILED_STEPS} more steps, time the GEMMs")
    parser.add_argument("--trace", type=Path, help="with --profile: keep the trace of the profiled steps in this file")
    parser.add_argument(
        "--syncs", action="store_true", help=f"count, in {WATCHED_STEPS} more steps, what waits for the GPU"
    )
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    args = parser.parse_args(argv)
    if min(args.rows, args.length, args.steps) < 1 or args.warmup < 1:
        parser.error("--rows, --length, --steps and --warmup must be at least 1 (the first step holds compilation)")
    if args.expert_adapters and (args.method == "full" or args.stack == "unsloth"):
        parser.error("--expert-adapters is for LoRA with PEFT's target_parameters")
    return args


def build_trainer(
    args: argparse.Namespace, built: stacks.Built, tokenizer: Any, dataset: Any, steps: int, folder: str
) -> Any:
    """TRL's SFTTrainer without what does not belong to a step (saving, reporting, progress bars)."""
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": args.rows,
        # Not every stack leaves the default of 1 alone.
        "gradient_accumulation_steps": 1,
        "max_length": args.length,
        "packing": args.packing,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "optim": "adamw_torch_fused" if on_gpu else "adamw_torch",
        "learning_rate": 2e-5 if args.method == "full" else 2e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": args.seed,
        "gradient_checkpointing": args.checkpointing != "off",
        **built.trainer_arguments,
    }
    if args.stack == "unsloth" and args.checkpointing != "off":
        # Its own checkpointing was chosen when the model was loaded, and its documentation leaves this argument out.
        del options["gradient_checkpointing"]
    trainer = SFTTrainer(
        model=built.model,
        args=SFTConfig(**options),
        train_dataset=dataset,
        processing_class=tokenizer,
        **({"peft_config": built.peft_config} if built.peft_config is not None else {}),
    )
    trainer.remove_callback(PrinterCallback)
    check_same_work(options, trainer.args)
    return trainer


def check_same_work(asked: dict[str, Any], arguments: Any) -> None:
    """Raises RuntimeError where a stack has changed what a step does: its numbers would not compare."""
    changed = {name: getattr(arguments, name) for name in SAME_WORK if getattr(arguments, name) != asked[name]}
    if changed:
        asked_for = {name: asked[name] for name in changed}
        raise RuntimeError(f"the stack trains with {changed} where {asked_for} was asked for: not the same work")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains and measures; the whole JSON line as a dictionary."""
    from benchmarks.meters import CountingCollator, StepMeter, SynchronizationCounter
    from benchmarks.profile_step import StepProfiler, print_split

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    profiled = PROFILED_STEPS if args.profile else 0
    timed = args.warmup + args.steps + profiled
    watched = WATCHED_STEPS if args.syncs and device.type == "cuda" else 0
    steps = timed + watched
    config = models.build_config(args.model, args.layers)
    rows = text.load_rows(args.data, args.seed)
    tokenizer, tokenizer_name = text.build_tokenizer(rows, config.vocab_size, args.tokenizer)
    dataset, text_facts = text.build_dataset(
        rows,
        tokenizer,
        batches=steps + 2,
        rows_per_batch=args.rows,
        length=args.length,
        packing=args.packing,
        seed=args.seed,
    )
    built = stacks.build(args, device, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(args, built, tokenizer, dataset, steps, folder)
        counter = CountingCollator(trainer.data_collator, tokenizer.pad_token_id)
        trainer.data_collator = counter
        profiler = StepProfiler(profiled) if profiled else None
        meter = StepMeter(device, profiler, args.warmup + args.steps)
        trainer.add_callback(meter)
        synchronizations = SynchronizationCounter(timed) if watched else None
        if synchronizations is not None:
            trainer.add_callback(synchronizations)
        meter.start()
        trainer.train()
    result = {
        **measurements(args, meter, counter, device),
        "first_step_s_from_start": meter.first_step_end - PROCESS_START - built.checkpoint_seconds,
        "checkpoint_written_s": built.checkpoint_seconds,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "attention": built.attention,
        "experts": getattr(built.model.config, "_experts_implementation", None),
        "tokenizer": tokenizer_name,
        "text": text_facts,
        "data": args.data.name if args.data else "docstrings",
        "synchronizations": synchronizations.per_step() if synchronizations is not None else None,
        "stack_report": built.report(),
        "hardware": hardware(),
        "versions": versions(),
        "arguments": {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()},
    }
    if profiler is not None:
        result["profile"] = profiler.split(args.trace)
        result["profile"]["layer_launches"] = launches_a_layer(trainer)  # another profile, which ends the first one
        # The floor's operands need the memory that the model and its optimizer hold.
        del trainer, built
        add_floor(result, config, args, device)
        print_split(result)
    return result


def measurements(args: argparse.Namespace, meter: Any, counter: Any, device: torch.device) -> dict[str, Any]:
    """Everything that was timed or counted, over the measured steps (warm-up and profiled steps excluded)."""
    measured = slice(args.warmup, args.warmup + args.steps)
    periods = [1000 * seconds for seconds in meter.periods[measured]]
    computes = [1000 * seconds for seconds in meter.computes[measured]]
    tokens = counter.real_tokens[measured]
    gpu = device.type == "cuda"
    return {
        "real_tokens_per_s": 1000 * sum(tokens) / sum(periods),
        "real_tokens_per_s_median": statistics.median(1000 * n / ms for n, ms in zip(tokens, periods, strict=True)),
        "step_ms_median": statistics.median(periods),
        "step_ms_min": min(periods),
        "step_ms": periods,
        "compute_ms_median": statistics.median(computes),
        "tokens_per_step": tokens,
        "tokens_per_step_median": statistics.median(tokens),
        "places_per_step": counter.places[measured],
        "documents_per_step": counter.documents[measured],
        "peak_memory_gb": torch.cuda.max_memory_allocated(device) / 1e9 if gpu else None,
        "peak_reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9 if gpu else None,
        "first_step_s": meter.first_step_end - meter.train_called,
        "losses": meter.losses,
        "gradient_norms": meter.gradient_norms,
    }


def launches_a_layer(trainer: Any) -> dict[str, float | None]:
    """Of one more batch, after training: the profiler of the host's calls would have slowed the measured steps."""
    from benchmarks.profile_step import layer_launches

    batch = next(iter(trainer.get_train_dataloader()))

    def run() -> None:
        loss = trainer.compute_loss(trainer.model_wrapped, batch)
        trainer.accelerator.backward(loss)

    trainer.model.train()
    found = layer_launches(trainer.model, run)
    trainer.model.zero_grad()
    return found


def add_floor(result: dict[str, Any], config: Any, args: argparse.Namespace, device: torch.device) -> None:
    """Adds what is idle by "profile" and, on a GPU, "gemm_floor" to a result."""
    from benchmarks.gemm_floor import measure_floor

    result["profile"]["idle_unprofiled_ms"] = result["step_ms_median"] - result["profile"]["busy_ms"]
    if not result["profile"]["groups_ms"]:
        print("the trace holds no GPU activity: no GPU here, or the profiler may not trace it", file=sys.stderr)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        tokens = round(result["tokens_per_step_median"])
        try:
            result["gemm_floor"] = measure_floor(
                config,
                tokens,
                train_weights=args.method == "full",
                checkpointing=args.checkpointing != "off",
                device=device,
            )
            result["step_over_floor"] = result["step_ms_median"] / result["gemm_floor"]["floor_ms"]
        except torch.cuda.OutOfMemoryError as error:
            print(f"the GEMM floor does not fit beside what is left of the model: {error}", file=sys.stderr)
            result["gemm_floor"] = None


def hardware() -> dict[str, Any]:
    """The GPU with its driver, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return {"gpu": None, "driver": None, "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    driver = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        driver = answer.stdout.strip() or None
    facts = torch.cuda.get_device_properties(0)
    return {
        "gpu": facts.name,
        "driver": driver,
        "cuda": torch.version.cuda,
        "memory_gb": facts.total_memory / 1e9,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def versions() -> dict[str, Any]:
    """Versions of the packages that matter (None: not installed) and the commit of this repository, if it is one."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    commit = os.environ.get("FASTFT_COMMIT")
    if commit is None and shutil.which("git"):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = answer.stdout.strip() or None
    found["commit"] = commit
    return found


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        stacks.check_available(args.stack, args.method)
    except stacks.StackUnavailable as error:
        print(error, file=sys.stderr)
        return EXIT_UNAVAILABLE
    # The libraries print banners and logs; stdout carries the JSON line only.
    with contextlib.redirect_stdout(sys.stderr):
        stacks.import_first(args.stack)
        result = run(args)
    line = json.dumps(result)
    print(line)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
