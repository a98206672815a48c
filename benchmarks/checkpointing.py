"""What to do with activations until backward: keep, recompute, send to the host. Time and memory of each way.

    python benchmarks/checkpointing.py --out ckpt.jsonl --model Qwen3-8B --layers 8 --tokens 16384
    python benchmarks/checkpointing.py --table ckpt.jsonl --plot ckpt.png

All ways run in one process, on one model, with fastft's kernels on every side: they differ in nothing but where
activations wait. A step is the forward of the backbone on one packed row, the loss, backward, and gradients dropped; a
GPU trains under bfloat16 autocast, as the Trainer does. The head and its loss are computed in pieces of --head-rows
rows, each recomputed in backward and never offloaded, so that logits of a large vocabulary do not hide what the layers
need; this is the same for every way. Weights never change, so all ways must find the same loss and gradients. A step's
time is between two events of the GPU and contains what the host makes it wait for. "fastft recompute" is measured
first and last: differences as small as between these two are noise.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

if not __package__:  # run as a script: the repository root has to be importable, this folder need not be
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from benchmarks import stacks
from benchmarks.checkpointing_results import plot, table
from benchmarks.checkpointing_ways import (
    WAYS,
    YARDSTICK,
    Line,
    Setup,
    Unavailable,
    Way,
    add_workload,
    build,
    library,
    prepare,
)
from benchmarks.compare import conclude, parse_with_output
from benchmarks.meters import synchronize
from benchmarks.packing import append
from fastft.errors import UnsupportedOptionError

IGNORED = -100  # no token follows the last one of a document
COPIED_BYTES = 2**28


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser, documents=4)
    parser.add_argument("--tokens", type=int, default=16384, help="of the row")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--budget-gb", type=float, help="memory budget of the planner in place of measured peaks")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--plot", type=Path, help="draw step time over peak memory into this file")
    args = parse_with_output(parser, argv)
    if args.arguments or min(args.steps, args.warmup) < 1:
        parser.error("--steps and --warmup must be at least 1, and there is no train_step.py to pass arguments to")
    return args


# --------------------------------------------------------------------------------------------------------- the step


def make_batch(setup: Setup, tokens: int) -> dict[str, torch.Tensor]:
    """Random tokens in documents of one length, the last one perhaps shorter, as one packed row."""
    generator = torch.Generator().manual_seed(setup.args.seed)
    ids = torch.randint(setup.causal.config.vocab_size, (1, tokens), generator=generator)
    positions = torch.arange(tokens)[None] % -(-tokens // setup.args.documents)
    labels = torch.where(positions.roll(-1) == 0, IGNORED, ids.roll(-1))
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {name: tensor.to(setup.device) for name, tensor in batch.items()}


def head_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, rows: int) -> torch.Tensor:
    """Mean cross entropy of the next token; only `rows` rows of logits exist at a time."""

    def piece(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(part, weight).float(), wanted, ignore_index=IGNORED, reduction="sum")

    # Hooks that do nothing, as TRL has them at the head: its offloading would take the pieces, too.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        pairs = zip(hidden[0].split(rows), labels[0].split(rows), strict=True)
        losses = [checkpoint(piece, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    return torch.stack(losses).sum() / (labels != IGNORED).sum()


def run_step(
    setup: Setup, batch: dict[str, torch.Tensor], context: contextlib.AbstractContextManager[Any]
) -> tuple[list[Any], int, torch.Tensor]:
    """One step without dropping the gradients: marks of begin, loss and end; bytes that the forward left; the loss."""
    gpu = setup.device.type == "cuda"
    before, begin = memory_allocated(setup.device), mark(setup.device)
    with context:
        with torch.autocast("cuda", torch.bfloat16) if gpu else contextlib.nullcontext():
            output = setup.causal.base_model(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
            )
            weight = setup.causal.get_output_embeddings().weight
            loss = head_loss(output.last_hidden_state, weight, batch["labels"], setup.args.head_rows)
        del output
        middle, left = mark(setup.device), memory_allocated(setup.device) - before
        loss.backward()
    if setup.optimizer is not None:
        setup.optimizer.step()
    return [begin, middle, mark(setup.device)], left, loss.detach()


def mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(first: Any, last: Any) -> float:
    return 1000 * (last - first) if isinstance(first, float) else first.elapsed_time(last)


# ------------------------------------------------------------------------------------------------------------ memory


def memory_allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_memory_gb(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None


def release(setup: Setup) -> None:
    """Drops what a way has left, on the device and, where PyTorch offers it, of its pinned memory."""
    setup.model.zero_grad(set_to_none=True)
    gc.collect()
    if setup.device.type == "cuda":
        torch.cuda.synchronize(setup.device)
        torch.cuda.empty_cache()
        getattr(torch.accelerator, "empty_host_cache", lambda: None)()
        torch.cuda.reset_peak_memory_stats(setup.device)
        getattr(torch.cuda, "reset_peak_host_memory_stats", lambda: None)()


def resident_gb() -> float:
    """Of this process; memory that a driver allocates may be missing."""
    import psutil  # type: ignore[import-untyped]

    return psutil.Process().memory_info().rss / 1e9


def pinned_gb(device: torch.device) -> float | None:
    """Most that was in use of PyTorch's own pinned memory, as it rounds blocks up; fastft's is not of it."""
    if device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    return torch.cuda.host_memory_stats().get("active_bytes.peak", 0) / 1e9


def offloaded_bytes(model: Any) -> int:
    """What fastft has sent to the host since it was patched."""
    return library().report(model).counters.get("bytes offloaded", 0)


def pinned_bandwidth(device: torch.device) -> dict[str, float] | None:
    """GB/s of one large copy to pinned memory and back, with nothing else to do."""
    if device.type != "cuda":
        return None
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    found = {}
    for name, target, source in (("to_host", host, there), ("to_device", there, host)):
        times = []
        for _ in range(6):
            begin = mark(device)
            target.copy_(source, non_blocking=True)
            end = mark(device)
            synchronize(device)
            times.append(milliseconds(begin, end))
        found[name] = COPIED_BYTES / statistics.median(times[1:]) / 1e6
    return found


# ------------------------------------------------------------------------------------------------ the time of a step


def order_of(ways: list[str], has_budget: bool) -> list[tuple[str, int]]:
    """(way, round): the yardstick first and last, and a peak is measured before the way that needs it."""
    needed = [] if has_budget else [name for way in ways for name in WAYS[way].budget or () if name in WAYS]
    first, last = ([YARDSTICK], [(YARDSTICK, 2)]) if YARDSTICK in ways else ([], [])
    return [(name, 1) for name in dict.fromkeys([*first, *needed, *ways])] + last


def budget_of(way: Way, peaks: dict[str, float | None], given_gb: float | None) -> int | Literal["auto"] | None:
    """Bytes for the planner.

    Raises:
        Unavailable: they depend on a peak that nobody knows.
    """
    if way.budget is None or way.budget == "auto":
        return way.budget
    if given_gb is not None:
        return round(given_gb * 1e9)
    found = [peak for peak in map(peaks.get, way.budget) if peak is not None]
    if len(found) < len(way.budget):
        raise Unavailable(f"the peak of {' or '.join(way.budget)} was not measured; give --budget-gb")
    return round(statistics.mean(found) * 1e9)


def measure(setup: Setup, name: str, peaks: dict[str, float | None], bandwidth: dict[str, float] | None) -> Line:
    """Steps of one way."""
    args, device, way = setup.args, setup.device, WAYS[name]
    budget = budget_of(way, peaks, args.budget_gb)
    context = prepare(setup, way, budget)
    batch, resident = make_batch(setup, args.tokens), resident_gb()
    steps: list[list[Any]] = []
    left = 0
    for number in range(args.warmup + args.steps):
        # The planner reads the peak in its first two steps: it must not be that of the way before.
        if number in (0, args.warmup) and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        marks, left, _ = run_step(setup, batch, context)
        synchronize(device)
        setup.model.zero_grad(set_to_none=True)
        steps.append(marks)
    peak, sent = peak_memory_gb(device), offloaded_bytes(setup.model)
    _, _, loss = run_step(setup, batch, context)  # to look at: the measured ones drop their gradients
    sent = offloaded_bytes(setup.model) - sent
    if way.stock in ("offload", "TRL"):
        sent = setup.layers * args.tokens * setup.input_bytes
    step_ms, forward_ms, backward_ms = (
        [milliseconds(marks[a], marks[b]) for marks in steps[args.warmup :]] for a, b in ((0, 2), (0, 1), (1, 2))
    )
    report = library().report(setup.model)
    return {
        "step_ms": step_ms,
        "step_ms_median": statistics.median(step_ms),
        "step_ms_min": min(step_ms),
        "forward_ms_median": statistics.median(forward_ms),
        "backward_ms_median": statistics.median(backward_ms),
        "peak_memory_gb": peak,
        "memory_after_forward_gb": left / 1e9 if device.type == "cuda" else None,
        "resident_growth_gb": resident_gb() - resident,
        "pinned_gb": pinned_gb(device),
        "offloaded_bytes": sent,
        "bandwidth_gb_s": bandwidth,
        "budget": budget,
        "loss": loss.item(),
        "gradient_sum": gradient_sum(setup.model),
        "stack_report": stacks.summarise_report(report),
        "measured_by_the_planner": report.memory.measured._asdict() if report.memory is not None else None,
    }


def gradient_sum(model: Any) -> float:
    """Of all absolute values, in float64."""
    found = [p.grad.abs().sum(dtype=torch.float64) for p in model.parameters() if p.grad is not None]
    return torch.stack(found).sum().item()


def attempt(setup: Setup, action: Callable[[], Line]) -> Line:
    """What an action measures, or why it measured nothing; the model is as before."""
    try:
        return action()
    except (Unavailable, UnsupportedOptionError) as error:
        return {"failure": str(error)}
    except RuntimeError as error:  # of the device, or of pinned memory, for which PyTorch has no class of its own
        if "out of memory" not in str(error):
            raise
        return {"failure": "out of memory"}
    finally:
        release(setup)


def measure_each(setup: Setup, runs: list[tuple[str, int]], action: Callable[[str], Line]) -> int:
    """Measures (way, round) after (way, round) and appends their lines; the number of those that failed."""
    failed = 0
    for name, number in runs:
        print(f"{name}, round {number}", file=sys.stderr, flush=True)
        release(setup)
        line = attempt(setup, partial(action, name))
        failed += "failure" in line
        append(setup.args.out, {"way": name, "round": number, **line, **setup.facts})
    return failed


def measure_all(args: argparse.Namespace) -> int:
    """Measures every way; the number of those that failed."""
    setup = build(args)
    runs = order_of(args.ways, args.budget_gb is not None)
    # Copying takes time and host memory, and only these are compared with it.
    bandwidth = pinned_bandwidth(setup.device) if any(WAYS[name].plain for name, _ in runs) else None
    peaks: dict[str, float | None] = {}

    def action(name: str) -> Line:
        line = measure(setup, name, peaks, bandwidth)
        peaks.setdefault(name, line["peak_memory_gb"])
        return line

    return measure_each(setup, runs, action)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return conclude(args, measure_all(args) if args.out is not None else 0, table, plot)


if __name__ == "__main__":
    sys.exit(main())
