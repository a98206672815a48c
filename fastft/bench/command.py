"""`fastft bench`: measurements of a model of one's own. So far there is one, `fastft bench memory`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from .memory import Timeline, Way

OPTIONS = ("off", "recompute", "selective", "offload", "auto")
DEFAULT = ("off", "recompute", "offload")
PACKAGES = ("fastft", "torch", "triton", "transformers", "peft")
TOKENS = {"cpu": 512, "cuda": 8192}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one measurement.

    Args:
        argv: the arguments after `fastft bench`; those of this process when None.

    Returns:
        The exit status: 0, 1 when a way ran out of memory, 2 without a command.

    Raises:
        FastftError: fastft refuses the model or an option, or a package is missing.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    problem = _complete(args)
    if problem:
        parser.error(problem)
    return _memory(args)


def _complete(args: argparse.Namespace) -> str:
    """Fills in the ways; what is wrong with the arguments, or ""."""
    if args.checkpointing is None:
        args.checkpointing = [*DEFAULT, *(["auto"] if args.budget is not None else [])]
    if args.budget is not None and "auto" not in args.checkpointing:
        return "--budget is what the planner of --checkpointing auto keeps to; ask for that as well"
    for path in (None if args.no_plot else args.out, args.json):
        if path is not None and not path.absolute().parent.is_dir():
            return f"{path} lies in a folder that does not exist"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastft bench", description="Measurements of a model of your own.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    memory = commands.add_parser(
        "memory",
        help="a memory timeline of one training step, as a table and a plot",
        description="Measures the bytes held over the time of one training step (forward, loss, backward; no "
        "optimizer) after steps of warm-up, on one row of random tokens. Weights are random; nothing is "
        "downloaded. Takes a GPU where there is one.",
    )
    memory.add_argument("--model", default="tiny", help='"tiny" (default), a config.json, or a folder with one')
    memory.add_argument("--layers", type=_positive, help="cut the model to this many decoder layers")
    memory.add_argument("--tokens", type=_tokens, help="of the row (default: 512 on a CPU, 8192 on a GPU)")
    memory.add_argument("--method", choices=("lora", "full"), default="lora", help="what is trained")
    memory.add_argument(
        "--checkpointing", nargs="+", choices=OPTIONS, metavar="WAY",
        help=f"one line each: off, or fastft's option, of {', '.join(OPTIONS[1:])} (default: {' '.join(DEFAULT)}, and "
        "auto with --budget)",
    )  # fmt: skip
    memory.add_argument("--budget", type=_budget, help='for --checkpointing auto: GB, or "auto"')
    memory.add_argument("--out", type=Path, default=Path("memory.png"), help="the plot (default: memory.png)")
    memory.add_argument("--no-plot", action="store_true", help="the table alone")
    memory.add_argument("--json", type=Path, help="also write every sample to this file")
    memory.add_argument("--seed", type=int, default=0)
    return parser


def _positive(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text}")
    return int(text)


def _tokens(text: str) -> int:
    return _positive(text, least=2)  # a single token has no next one, and so no loss


def _budget(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f'must be a number of GB above 0, or "auto", not {text}')
    return round(value * 1e9)


def _memory(args: argparse.Namespace) -> int:
    # Here, so that `--help` and wrong usage do not wait for torch and transformers.
    import torch

    from . import subject, timeline
    from .memory import Way, measure
    from .meters import meter_for

    if not args.no_plot:
        timeline.require_matplotlib()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    tokens = args.tokens or TOKENS[device.type]
    config = subject.build_config(args.model, args.layers)
    model = subject.build_model(config, args.method, device, args.seed)
    ways = [Way(option, args.budget if option == "auto" else None) for option in dict.fromkeys(args.checkpointing)]
    found = measure(model, ways, tokens, device, args.seed)
    title, counted = _title(args, model, found[0].layers, tokens, device), meter_for(device, ()).counted
    _print(found, title, counted)
    if not args.no_plot:
        timeline.save_plot(args.out, found, title, counted)
        print(f"plot: {args.out}")
    if args.json is not None:
        record = _record(args, ways, found, title, counted, tokens)
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print(f"samples: {args.json}")
    return 1 if any(each.failure for each in found) else 0


def _title(args: argparse.Namespace, model: Any, layers: int, tokens: int, device: torch.device) -> str:
    import torch

    name = "tiny model" if args.model == "tiny" else model.config.model_type
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    dtype = str(model.dtype).removeprefix("torch.")
    trained = "LoRA" if args.method == "lora" else "all weights"
    return f"{name}, {layers} layers, {size:,.0f} M weights ({dtype}), {trained}, a row of {tokens:,} tokens, {where}"


def _print(timelines: Sequence[Timeline], title: str, counted: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from .table import notes_of, rows_of

    console = Console()
    head, *rows = rows_of(timelines)
    table = Table(title=title, title_justify="left", caption=f"Counted: {counted}.", caption_justify="left")
    for number, column in enumerate(head):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row, end_section=row[0] in ("loss computed", "after the step, with gradients"))
    console.print(table)
    for note in notes_of(timelines):
        console.print(note, markup=False, highlight=False)


def _record(
    args: argparse.Namespace, ways: Sequence[Way], timelines: Sequence[Timeline], title: str, counted: str, tokens: int
) -> dict[str, Any]:
    return {
        "what": title,
        "counted": counted,
        "model": args.model,
        "method": args.method,
        "tokens": tokens,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "ways": [
            {**dataclasses.asdict(way), "peak": timeline.peak, **dataclasses.asdict(timeline)}
            for way, timeline in zip(ways, timelines, strict=True)
        ],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
