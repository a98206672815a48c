"""Compares training stacks: each in a process of its own, in turn, several rounds; or prints what such a run stored.

    python benchmarks/compare.py --out benchmarks/results/llama.jsonl -- --model Llama-3.2-1B
    python benchmarks/compare.py --table benchmarks/results/llama.jsonl

What follows "--" goes to train_step.py as it is. The machine's speed drifts from minute to minute, so the stacks take
turns, and a table shows the median of each round besides the median of all steps: a ratio smaller than the difference
between two rounds of one stack is noise. The table is markdown and made from the stored lines alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN_STEP = ROOT / "benchmarks" / "train_step.py"
COLUMNS = ("workload", "stack", "step", "slowest and fastest round", "tokens/s", "peak memory", "against the first")
# What makes two lines comparable: they did the same work.
WORKLOAD = ("model", "layers", "method", "expert_adapters", "packing", "checkpointing", "data", "rows", "length")

Line = dict[str, Any]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", nargs="+", default=["transformers", "fastft"], help="the first is the yardstick")
    parser.add_argument("--checkpointing", nargs="+", choices=("on", "off", "plain"), default=["on"])
    parser.add_argument("--rounds", type=int, default=2)
    return parse_with_output(parser, argv)


def parse_with_output(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses what a parser knows, where the lines go or come from, and the arguments of train_step.py."""
    parser.add_argument("--out", type=Path, help="a new file for the JSON lines")
    parser.add_argument("--table", type=Path, help="measure nothing: print the table of this file")
    parser.add_argument("arguments", nargs="*", help="for train_step.py, after --")
    args = parser.parse_args(argv)
    if (args.out is None) == (args.table is None):
        parser.error("give either --out, a file to measure into, or --table, a file to print")
    if args.out is not None and args.out.exists():
        parser.error(f"{args.out} exists; lines of two runs do not compare, so give a new file or remove it")
    return args


def measure(args: argparse.Namespace) -> int:
    """Runs every stack, round by round; the number of runs that failed."""
    failed = 0
    for checkpointing in args.checkpointing:
        for number in range(1, args.rounds + 1):
            for stack in args.stacks:
                print(f"round {number}: {stack}, checkpointing {checkpointing}", file=sys.stderr, flush=True)
                options = ["--stack", stack, "--checkpointing", checkpointing, "--out", str(args.out)]
                command = [sys.executable, str(TRAIN_STEP), *args.arguments, *options]
                finished = subprocess.run(command, capture_output=True, text=True, check=False)
                if finished.returncode:
                    failed += 1
                    print(f"it failed:\n{finished.stderr[-1500:]}", file=sys.stderr, flush=True)
    return failed


def conclude(
    args: argparse.Namespace, failed: int, table: Callable[[list[Line]], str], plot: Callable[[list[Line], Path], None]
) -> int:
    """Prints the table of what was measured now or stored before, draws it if asked to; the exit status."""
    lines = read_lines(args.out or args.table)
    print(table(lines))
    if args.plot is not None:
        plot(lines, args.plot)
    return 1 if failed else 0


def read_lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def workload(line: Line) -> tuple[Any, ...]:
    return tuple(line["arguments"].get(name) for name in WORKLOAD)  # older lines lack newer options


def describe(line: Line) -> str:
    arguments = line["arguments"]
    layers = f", {arguments['layers']} layers" if arguments["layers"] else ""
    packing = "packed" if arguments["packing"] else "padded"
    method = arguments["method"] + (" on experts too" if arguments.get("expert_adapters") else "")
    return f"{arguments['model']}{layers}, {method}, {packing}, checkpointing {arguments['checkpointing']}"


def summarise(lines: list[Line]) -> list[list[str]]:
    """Rows of the table: the lines of one workload and stack are rounds of one another."""
    groups: dict[tuple[Any, ...], dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        groups[workload(line)][line["arguments"]["stack"]].append(line)
    rows = []
    for stacks in groups.values():
        yardstick = None
        for stack, rounds in stacks.items():
            step = statistics.median(ms for line in rounds for ms in line["step_ms"])
            medians = [line["step_ms_median"] for line in rounds]
            rate = statistics.median(line["real_tokens_per_s_median"] for line in rounds)
            memory = [line["peak_memory_gb"] for line in rounds if line["peak_memory_gb"] is not None]
            yardstick = yardstick or step
            rows.append([
                describe(rounds[0]), stack, f"{step:.1f} ms", f"{max(medians):.1f} to {min(medians):.1f} ms",
                f"{rate:,.0f}", f"{max(memory):.2f} GB" if memory else "not measured", f"{yardstick / step:.2f}x",
            ])  # fmt: skip
    return rows


def conditions(lines: list[Line]) -> str:
    """Hardware, versions and commit; lines that differ in them do not belong into one table."""
    found = {
        json.dumps([line["hardware"]["gpu"] or line["hardware"]["cpu"], line["versions"]], sort_keys=True)
        for line in lines
    }
    if len(found) != 1:
        raise ValueError(f"the lines are of {len(found)} different machines or versions and do not compare")
    device, versions = json.loads(found.pop())
    named = ("torch", "triton", "transformers", "trl", "peft", "liger-kernel", "unsloth")
    packages = ", ".join(f"{name} {versions[name]}" for name in named if versions.get(name))
    steps = {len(line["step_ms"]) for line in lines}
    return f"{device}; {packages}; commit {versions['commit']}; {' or '.join(map(str, sorted(steps)))} steps a round"


def table(lines: list[Line]) -> str:
    """The table in markdown, with its conditions below."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *summarise(lines)]
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", conditions(lines)])


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    failed = measure(args) if args.out is not None else 0
    path = args.out or args.table
    if path.exists():
        print(table(read_lines(path)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
