"""Padded, padding-free and packed training on one script: real tokens a second, share of tokens, memory.

    python benchmarks/packing.py --out packing.jsonl --data alpaca.json -- --model Llama-3.2-1B --steps 8
    python benchmarks/packing.py --table packing.jsonl --plot packing.png

Every way is measured in a process of its own, by train_step.py; what follows "--" goes to it as it is. The mixes are
made of the same text: "20/80" has 20 long samples, nearly as long as a row may be, to 80 short ones. The gain of
packing is the last way over the second, which has the same kernels and keeps its padding; the whole is the last over
the first.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root has to be importable, this folder need not be
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks import train_step
from benchmarks.compare import conclude, conditions, parse_with_output, read_lines
from benchmarks.text import load_rows

WAYS: dict[str, list[str]] = {
    "stock, padded": ["--stack", "transformers", "--no-packing"],
    "fastft, packing=False": ["--stack", "fastft", "--no-packing", "--patch-options", "packing=False"],
    "fastft, padding dropped": ["--stack", "fastft", "--no-packing"],
    "fastft, packed": ["--stack", "fastft", "--packing"],
}
MIXES = ("as it is", "20/80", "50/50")
COLUMNS = ("lengths", "batch", "way", "real tokens/s", "tokens of the batch", "peak memory", "against the first")
WORDS_PER_TOKEN = 0.7  # of English, on the safe side: a long sample must not be cut
SHORT_WORDS = 40
SAMPLES = 1000

Line = dict[str, Any]
Point = tuple[str, int, Path]  # mix, rows of a batch, file of samples


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="draw the throughput into this file")
    parser.add_argument("--data", type=Path, help="JSON list of instruction/input/output (default: docstrings)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="batch sizes")
    parser.add_argument("--length", type=int, default=2048, help="most tokens of a row")
    return parse_with_output(parser, argv)


# ------------------------------------------------------------------------------------------------------- samples


def mix(rows: list[dict[str, str]], name: str, length: int, seed: int = 0) -> list[dict[str, str]]:
    """Samples of long and short texts in the ratio of the name ("20/80"), or the rows as they are."""
    if name not in MIXES:
        raise ValueError(f"unknown mix {name!r}; choose one of {', '.join(MIXES)}")
    if name == "as it is":
        return rows
    rng, long_percent = random.Random(seed), int(name.split("/")[0])
    words = [word for row in rows for word in row["output"].split()]
    long_words = int(length * WORDS_PER_TOKEN)
    samples = []
    for number in range(SAMPLES):
        count = long_words if number % 100 < long_percent else SHORT_WORDS
        start = rng.randrange(max(1, len(words) - count))
        samples.append({"instruction": "Go on.", "input": "", "output": " ".join(words[start : start + count])})
    rng.shuffle(samples)
    return samples


# --------------------------------------------------------------------------------------------------------- runs


def measure(args: argparse.Namespace) -> int:
    """Runs every point and appends its line; the number of runs that failed."""
    rows = load_rows(args.data, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        points: list[Point] = []
        for name in args.mixes:
            data = Path(folder) / f"{name.replace('/', '-').replace(' ', '-')}.json"
            data.write_text(json.dumps(mix(rows, name, args.length)), encoding="utf-8")
            points += [(name, batch, data) for batch in args.rows]
        for way in args.ways:
            process = multiprocessing.get_context("spawn").Process(
                target=run_points, args=(way, points, [*args.arguments, "--length", str(args.length)], args.out)
            )
            process.start()
            process.join()
            note_missing(way, points, args.out, process.exitcode)
    return sum("failure" in line for line in read_lines(args.out))


def run_points(way: str, points: list[Point], arguments: list[str], out: Path) -> None:
    """All points of one way, in this process, each with a model and a trainer of its own."""
    for name, batch, data in points:
        print(f"{name}, batch {batch}: {way}", file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(sys.stderr):
            line = run([*arguments, "--data", str(data), "--rows", str(batch), *WAYS[way]])
        append(out, {"way": way, "mix": name, "batch": batch, **line})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run(options: list[str]) -> Line:
    """What train_step.py measures, or why it measured nothing."""
    try:
        line = train_step.run(train_step.parse_arguments(options))
    except torch.cuda.OutOfMemoryError:
        return {"failure": "out of memory"}
    except SystemExit as error:
        return {"failure": f"exit status {error.code}"}
    del line["first_step_s_from_start"]  # of the process, which may have measured other points before
    return line


def note_missing(way: str, points: list[Point], out: Path, exit_status: int | None) -> None:
    """A process that died has left points without a line."""
    lines = read_lines(out) if out.exists() else []
    done = {(line["mix"], line["batch"]) for line in lines if line["way"] == way}
    for name, batch, _ in points:
        if (name, batch) not in done:
            append(out, {"way": way, "mix": name, "batch": batch, "failure": f"exit status {exit_status}"})


def append(out: Path, line: Line) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


# ------------------------------------------------------------------------------------------------------- results


def points(lines: list[Line]) -> Iterator[list[Line]]:
    """The lines of each mix and batch size, in the order of the ways."""
    keys = dict.fromkeys((line["mix"], line["batch"]) for line in lines)
    for key in keys:
        yield [line for line in lines if (line["mix"], line["batch"]) == key]


def summarise(lines: list[Line]) -> list[list[str]]:
    rows = []
    for point in points(lines):
        yardstick = None
        for line in point:
            where = [line["mix"], str(line["batch"]), line["way"]]
            if "failure" in line:
                rows.append([*where, line["failure"], "", "", ""])
                continue
            rate, memory = line["real_tokens_per_s_median"], line["peak_memory_gb"]
            share = sum(line["tokens_per_step"]) / sum(line["places_per_step"])
            yardstick = yardstick or rate
            rows.append([
                *where, f"{rate:,.0f}", f"{share:.0%}", f"{memory:.1f} GB" if memory else "not measured",
                f"{rate / yardstick:.2f}x",
            ])  # fmt: skip
    return rows


def table(lines: list[Line]) -> str:
    """The table in markdown, with its conditions below."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *summarise(lines)]
    measured = [line for line in lines if "failure" not in line]
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", conditions(measured) if measured else ""])


def plot(lines: list[Line], path: Path) -> None:
    """Real tokens a second over the batch size: a panel for each mix, a line for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mixes = list(dict.fromkeys(line["mix"] for line in lines))
    figure, axes = pyplot.subplots(1, len(mixes), figsize=(4.5 * len(mixes), 4), squeeze=False, sharey=True)
    for panel, name in zip(axes[0], mixes, strict=True):
        for way in dict.fromkeys(line["way"] for line in lines):
            found = [x for x in lines if x["mix"] == name and x["way"] == way and "failure" not in x]
            panel.plot([x["batch"] for x in found], [x["real_tokens_per_s_median"] for x in found], "o-", label=way)
        panel.set_title(f"lengths: {name}")
        panel.set_xlabel("batch size (rows)")
        batches = sorted({line["batch"] for line in lines})
        panel.set_xscale("log", base=2)
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("real tokens / s (padding not counted)")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return conclude(args, measure(args) if args.out is not None else 0, table, plot)


if __name__ == "__main__":
    sys.exit(main())
