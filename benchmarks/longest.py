"""The longest row that trains, for each way to treat activations until backward (checkpointing_ways.py).

    python benchmarks/longest.py --model Qwen3-8B --memory-gb 40 --out longest.jsonl
    python benchmarks/longest.py --table longest.jsonl

The step is that of checkpointing.py. Peaks of two lengths are extrapolated to the memory there is, and a few lengths
around the prediction are tried, one step each. --memory-gb makes the GPU smaller; steps of a row that fills a large GPU
take minutes. Run it with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, as one would for such rows.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root has to be importable, this folder need not be
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.checkpointing import attempt, make_batch, measure_each, milliseconds, peak_memory_gb, run_step
from benchmarks.checkpointing_results import circumstances, gigabytes, markdown
from benchmarks.checkpointing_ways import WAYS, Line, Setup, Unavailable, Way, add_workload, build, prepare
from benchmarks.compare import parse_with_output, read_lines
from benchmarks.meters import synchronize
from fastft.memory.host import host_memory_available

DEFAULT = ("stock checkpointing", "stock offload", "fastft offload")
GRAIN = 1024  # of the lengths that are tried
WALK = 0.05
DEVICE_SHARE = 0.98  # of the memory that the first try may fill: the allocator cannot use all of it
HOST_SHARE = 0.6  # of the free host memory that a try may take; a process that takes too much is killed


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser, documents=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(DEFAULT))
    parser.add_argument("--memory-gb", type=float, help="as if the GPU had so much")
    parser.add_argument("--probes", type=int, nargs=2, default=(8192, 16384), help="lengths to extrapolate from")
    parser.add_argument("--tries", type=int, default=4, help="lengths to try around the prediction")
    parser.add_argument("--seconds", type=float, default=150, help="a try that would end later is not started")
    args = parse_with_output(parser, argv)
    if args.arguments:
        parser.error("there is no train_step.py to pass arguments to")
    if args.out and any(WAYS[name].budget for name in args.ways):
        parser.error("the planner spends the memory it is given, so its peaks do not extrapolate; see --ways")
    return args


def longest(setup: Setup, name: str) -> Line:
    """The longest row that a way trains, with all tries.

    Raises:
        Unavailable: without a GPU there is no memory to fill.
    """
    args, start = setup.args, time.perf_counter()
    if setup.device.type != "cuda":
        raise Unavailable("the longest row needs a GPU")
    context = prepare(setup, WAYS[name], None)
    room = memory_room(args.memory_gb, setup.device)
    one_step(setup, context, min(args.probes))  # compiles
    probes = [one_step(setup, context, tokens) for tokens in args.probes]
    if any("failure" in probe for probe in probes):
        raise Unavailable(f"a row of {max(args.probes)} tokens does not fit; give shorter --probes")
    host = host_limit(setup, WAYS[name], host_memory_available())
    predicted = min(grained(predict_length(probes, DEVICE_SHARE * room)), host)
    tries: list[Line] = []
    limit = "device memory"
    while (tokens := next_length(tries, predicted, host)) is not None:
        if len(tries) == args.tries:
            limit = "tries" if all("failure" not in each for each in tries) else limit
            break
        if time.perf_counter() - start + predict_seconds(probes, tokens) > args.seconds:
            limit = f"time: {tokens:,} tokens need some {predict_seconds(probes, tokens):.0f} s"
            break
        tries.append(one_step(setup, context, tokens))
    best = max((each for each in [*probes, *tries] if "failure" not in each), key=lambda each: each["tokens"])
    return {
        "longest_tokens": best["tokens"],
        "predicted_tokens": predicted,
        "limit": "host memory" if best["tokens"] == host else limit,
        "step_ms": [best["step_ms"]],
        "peak_memory_gb": best["peak_memory_gb"],
        "memory_gb": room / 1e9,
        "host_limit_tokens": host,
        "probes": probes,
        "tries": tries,
    }


def one_step(setup: Setup, context: contextlib.AbstractContextManager[Any], tokens: int) -> Line:
    """One step of a row of so many tokens, as a try: its time and peak, or a failure."""

    def step() -> Line:
        marks, _, _ = run_step(setup, make_batch(setup, tokens), context)
        synchronize(setup.device)
        return {"step_ms": milliseconds(marks[0], marks[-1]), "peak_memory_gb": peak_memory_gb(setup.device)}

    return {"tokens": tokens, **attempt(setup, step)}


def memory_room(given_gb: float | None, device: torch.device) -> float:
    """Bytes that this process may use, made fewer if asked for."""
    free, total = torch.cuda.mem_get_info(device)
    if given_gb is None:
        return free + torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, given_gb * 1e9 / total), device)
    return given_gb * 1e9


def host_limit(setup: Setup, way: Way, available: int) -> int:
    """Tokens whose layer inputs the host can take, as the way rounds their blocks."""
    room, token = HOST_SHARE * available, setup.input_bytes
    if way.stock == "offload":  # PyTorch's pinned memory comes in powers of two
        return int(2 ** math.floor(math.log2(room / setup.layers)) / token) // GRAIN * GRAIN
    return int(room / (setup.layers * token)) // GRAIN * GRAIN if way.option == "offload" else sys.maxsize


def grained(tokens: float) -> int:
    return max(GRAIN, round(tokens / GRAIN) * GRAIN)


def predict_length(probes: list[Line], room: float) -> float:
    """Where the straight line through two peaks reaches the room, in bytes."""
    (short, low), (long, high) = sorted((probe["tokens"], 1e9 * probe["peak_memory_gb"]) for probe in probes)
    slope = (high - low) / (long - short)
    return short + (room - low) / slope


def predict_seconds(probes: list[Line], tokens: int) -> float:
    """A linear and a quadratic part, the attention's, through two times."""
    (short, fast), (long, slow) = sorted((probe["tokens"], probe["step_ms"] / 1000) for probe in probes)
    quadratic = max(0.0, (slow / long - fast / short) / (long - short))
    return tokens * (slow / long + quadratic * (tokens - long))


def next_length(tries: list[Line], predicted: int, most: int) -> int | None:
    """Tries walk from the prediction until one fits and one does not, and then halve what is between."""
    fits = max((each["tokens"] for each in tries if "failure" not in each), default=None)
    fails = min((each["tokens"] for each in tries if "failure" in each), default=None)
    if fits is None:
        found = predicted if fails is None else grained(fails * (1 - WALK))
    elif fails is None:
        found = min(grained(fits * (1 + WALK)), most)
    else:
        found = grained((fits + fails) / 2)
    return None if found in (fits, fails) else found


# ----------------------------------------------------------------------------------------------------------- results


def table(lines: list[Line]) -> str:
    """The table in markdown, with its conditions below."""
    return markdown(longest_rows(lines), circumstances(lines))


def longest_rows(lines: list[Line]) -> list[list[str]]:
    rows = [["way", "longest row", "its step", "its peak", "limited by", "predicted", "tries", "against the first"]]
    first = None
    for line in lines:
        if "failure" in line:
            rows.append([line["way"], line["failure"], *[""] * (len(rows[0]) - 2)])
            continue
        first = first or line["longest_tokens"]
        tries = "; ".join(f"{each['tokens']:,} {each.get('failure', 'fits')}" for each in line["tries"])
        rows.append([
            line["way"], f"{line['longest_tokens']:,}", f"{line['step_ms'][0] / 1000:.1f} s",
            f"{gigabytes(line['peak_memory_gb'])} of {line['memory_gb']:.1f}", line["limit"],
            f"{line['predicted_tokens']:,}", tries, f"{line['longest_tokens'] / first:.2f}x",
        ])  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    failed = 0
    if args.out is not None:
        setup = build(args)
        failed = measure_each(setup, [(name, 1) for name in args.ways], partial(longest, setup))
    print(table(read_lines(args.out or args.table)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
