"""`fastft demo`: the same short fine-tuning run three ways, each in its own process, then a table and a picture."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fastft.demo.render import print_results, save_figure
from fastft.demo.results import LABELS, RunRecord

PACKAGES = ("fastft", "torch", "triton", "transformers", "trl", "peft", "accelerate")
LOG_LINES_SHOWN = 15


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Args:
        argv: the arguments after `fastft demo`; those of this process when None.

    Returns:
        The exit status: 0 when every run succeeded, 1 otherwise.
    """
    args = _parse(argv)
    console = Console()
    started = time.monotonic()
    args.output.mkdir(parents=True, exist_ok=True)
    if not args.tiny and not _prepare_weights(console, args.output):
        return 1
    runs = _train_all(console, args)
    print_results(console, runs)
    _save(console, args, runs, time.monotonic() - started)
    return 0 if all(run.failure is None for run in runs) else 1


def _train_all(console: Console, args: argparse.Namespace) -> list[RunRecord]:
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        tasks = {stack: progress.add_task(LABELS[stack], total=None, start=False, status="") for stack in args.stacks}
        for stack, task in tasks.items():
            runs.append(_train_one(stack, task, progress, args))
    return runs


def _train_one(stack: str, task: TaskID, progress: Progress, args: argparse.Namespace) -> RunRecord:
    run = RunRecord(stack)
    log_path = args.output / f"{stack}.log"
    progress.start_task(task)
    with log_path.open("w", encoding="utf-8") as log, _start(_worker_command(stack, args), log) as process:
        try:
            for event in _events(process):
                _note(event, run)
                _show(event, task, progress)
        finally:
            # After an interrupt the worker would otherwise train on with nobody listening.
            if process.poll() is None and not run.result:
                process.terminate()
    if process.returncode != 0 or not run.result:
        run.failure = f"exit status {process.returncode}; the end of {log_path}:\n{_tail(log_path)}"
        progress.update(task, status="failed")
    progress.stop_task(task)
    return run


def _note(event: dict[str, Any], run: RunRecord) -> None:
    if event["event"] == "step":
        run.losses.append(event["loss"])
        run.seconds.append(event["seconds"])
    elif event["event"] == "result":
        run.result = {key: value for key, value in event.items() if key != "event"}


def _show(event: dict[str, Any], task: TaskID, progress: Progress) -> None:
    name = progress.tasks[task].description
    if event["event"] == "stage":
        progress.update(task, status=event["text"], total=event["steps"])
    elif event["event"] == "step":
        status = f"loss {event['loss']:.4f}, {event['seconds']:.1f} s"
        progress.update(task, completed=event["step"], status=status)
        if not progress.console.is_terminal:
            # In a log file the bars appear only at the end.
            progress.console.print(f"{name}: step {event['step']}, {status}")


def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def _start(command: list[str], log: IO[str]) -> subprocess.Popen[str]:
    # Nothing is fetched: the weights are on the disk, and a look at the hub would only wait for a time-out.
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8", env=environment)


def _worker_command(stack: str, args: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "fastft.demo.worker", "--stack", stack, "--seed", str(args.seed)]
    for name in ("steps", "tokens"):
        if getattr(args, name) is not None:
            command += [f"--{name}", str(getattr(args, name))]
    return command + ["--tiny"] * args.tiny


def _prepare_weights(console: Console, output: Path) -> bool:
    """Converts the weights in a process of its own: its memory must not count as a run's."""
    log_path = output / "weights.log"
    message = "preparing the weights of SmolLM2-135M-Instruct (half a minute, the first time only)"
    with console.status(message), log_path.open("w", encoding="utf-8") as log:
        process = _start([sys.executable, "-m", "fastft.demo.weights"], log)
        process.communicate()
    if process.returncode != 0:
        console.print(f"[red]No weights for the demo.[/red] The end of {log_path}:")
        console.print(_tail(log_path), markup=False)
    return process.returncode == 0


def _save(console: Console, args: argparse.Namespace, runs: Sequence[RunRecord], seconds: float) -> None:
    if any(run.failure is None for run in runs):
        picture = args.output / "demo.png"
        save_figure(picture, runs)
        console.print(f"Picture: {picture}")
    if args.json is not None:
        versions = {name: _version(name) for name in PACKAGES}
        record = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "versions": versions,
            "seconds": seconds,
            "runs": [run.summary() for run in runs],
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        console.print(f"Numbers: {args.json}")
    console.print(f"Done in {seconds:.0f} s.")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES_SHOWN:])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fastft demo",
        description="Fine-tunes SmolLM2-135M-Instruct (LoRA, TRL's SFTTrainer) on questions about the Python standard "
        "library: stock with padding, stock with packing, and fastft with packing.",
    )
    parser.add_argument("--steps", type=int, help="optimiser steps (default: 8 on a CPU, 30 on a GPU)")
    parser.add_argument("--tokens", type=int, help="real tokens a step, about (default: 384 on a CPU, more on a GPU)")
    parser.add_argument("--stacks", nargs="+", choices=list(LABELS), default=list(LABELS), help="which runs to make")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for picture and logs")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights: a test of the wiring")
    args = parser.parse_args(argv)
    for name in ("steps", "tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, not {value}")
    return args


if __name__ == "__main__":
    sys.exit(main())
