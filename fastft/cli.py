"""The command line: `info` says what this machine can run, `demo` fine-tunes a small model, `bench` measures one.

Usage: `fastft info [--device cuda:0] [--json]`, `fastft demo [arguments of the demo]` or `fastft bench memory [...]`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import FastftError

if TYPE_CHECKING:
    from rich.console import Console

    from .capability import GPUCapability

_REPORTED_PACKAGES = ("fastft", "torch", "triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes")
_MIB = 1024**2


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; those of this process when None.

    Returns:
        The exit status: 0, 1 when fastft refused (the reason is on stderr), 2 for wrong usage.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["demo"]:  # before argparse, so that even `--help` and unknown options are the demo's own
        return _demo(arguments[1:])
    try:
        if arguments[:1] == ["bench"]:  # likewise
            return _bench(arguments[1:])
        parsed = _parser().parse_args(arguments)
        return _info(parsed.device, as_json=parsed.json)
    except FastftError as error:
        print(f"fastft: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastft", description="Faster, smaller fine-tuning of Hugging Face models.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="what each device can run, and why")
    info.add_argument("--device", help="one device, such as cpu or cuda:0; every visible GPU by default")
    info.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("demo", help="a short fine-tuning run; its options: fastft demo --help", add_help=False)
    commands.add_parser("bench", help="measurements of a model; their options: fastft bench --help", add_help=False)
    return parser


def _demo(arguments: list[str]) -> int:
    # Its own function, and by name: the demo brings transformers, which `fastft info` must not load.
    status = importlib.import_module("fastft.demo.run").main(arguments)
    return int(status or 0)


def _bench(arguments: list[str]) -> int:
    return int(importlib.import_module("fastft.bench.command").main(arguments))


def _info(device: str | None, as_json: bool) -> int:
    capabilities = _capabilities(device)
    versions = _versions()
    if as_json:
        print(json.dumps({"versions": versions, "devices": [_record(each) for each in capabilities]}, indent=2))
        return 0
    from rich.console import Console

    console = Console()
    for capability in capabilities:
        _print_device(console, capability)
    _print_versions(console, versions, capabilities[0].software.packages_found)
    return 0


def _capabilities(device: str | None) -> list[GPUCapability]:
    """The device asked for; otherwise every GPU that torch sees, or the CPU with the reason why there is none."""
    import torch

    from .capability import probe

    if device is not None:
        return [probe(device)]
    best = probe()
    if best.device.kind == "cpu":
        return [best]
    return [probe(index) for index in range(torch.cuda.device_count())]


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _REPORTED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _record(capability: GPUCapability) -> dict[str, Any]:
    device = capability.device
    return {
        "device": _device_name(capability),
        "name": device.name,
        "kind": device.kind,
        "architecture": device.architecture,
        "sm_count": device.sm_count,
        "warp_size": device.warp_size,
        "total_memory_bytes": device.total_memory,
        "shared_memory_per_block_bytes": device.shared_memory_per_block,
        "l2_bytes": device.l2_bytes,
        "notices": list(capability.notices),
        "packages_found": list(capability.software.packages_found),
        "verdicts": {
            name: {"available": verdict.available, "reason": verdict.reason}
            for name, verdict in capability.verdicts().items()
        },
    }


def _device_name(capability: GPUCapability) -> str:
    kind = {"hip": "cuda"}.get(capability.device.kind, capability.device.kind)  # torch calls ROCm devices cuda too
    return kind if kind == "cpu" else f"{kind}:{capability.device.index}"


def _print_device(console: Console, capability: GPUCapability) -> None:
    from rich.markup import escape
    from rich.table import Table

    device = capability.device
    title = " ".join(part for part in (_device_name(capability), device.name, f"({device.architecture})") if part)
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for column in ("what", "", "why"):
        table.add_column(column, overflow="fold")
    for name, answer, reason in capability.summary():
        style = "green" if answer == "yes" else "yellow"
        table.add_row(name.replace("_", " "), f"[{style}]{answer}[/{style}]", escape(reason))
    console.print(table)
    if device.total_memory:
        console.print(
            f"{device.total_memory / _MIB:,.0f} MiB memory, {device.l2_bytes / _MIB:,.0f} MiB L2, "
            f"{device.shared_memory_per_block / 1024:,.0f} KiB shared memory a block, "
            f"{device.sm_count} SMs, warps of {device.warp_size}"
        )
    for notice in capability.notices:
        console.print(f"[yellow]note:[/yellow] {escape(notice)}")


def _print_versions(console: Console, versions: dict[str, str | None], packages_found: Sequence[str]) -> None:
    console.print("versions: " + ", ".join(f"{name} {version or '(absent)'}" for name, version in versions.items()))
    console.print("attention and quantisation packages found: " + (", ".join(packages_found) or "none"))


if __name__ == "__main__":
    raise SystemExit(main())
