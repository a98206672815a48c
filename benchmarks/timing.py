"""How the benchmarks of single ops time a call: on the GPU's own clock, with cold caches, beside a measured copy.

A call is timed between two CUDA events. Before each round the GPU is put to sleep, so that the host has queued the
whole round when the first call starts: events then enclose the kernels, not the time Python needs to launch them. That
time is reported on its own. The calls of a round work on different buffers, together larger than four times the L2.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "transformers", "fastft")
L2_MULTIPLE = 4
WARMUP_ROUNDS = 3
MIN_CALLS = 60
COPY_BYTES = 2**30
# torch.cuda._sleep counts clock cycles; GPUs run at most about this fast, so the sleep is never too short.
CYCLES_PER_SECOND = 2.5e9


@dataclass(frozen=True, slots=True)
class Timing:
    """GPU time of one call, median and quartiles, and the host's time to launch it."""

    median_us: float
    lower_us: float
    upper_us: float
    host_us: float


def require_gpu(program: str) -> torch.device:
    """The current GPU, or the end of the program with a sentence that says why."""
    if not torch.cuda.is_available():
        sys.exit(f"{program}: needs a CUDA GPU, and torch finds none; times of the Triton interpreter mean nothing")
    return torch.device("cuda", torch.cuda.current_device())


def rotations(bytes_per_set: int, device: torch.device) -> int:
    """How many sets of buffers a round needs so that none is still in the L2 cache when its turn comes again."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, math.ceil(L2_MULTIPLE * l2_bytes / bytes_per_set) + 1)


def time_calls(calls: Sequence[Callable[[], Any]]) -> Timing:
    """Time calls that do the same work on different buffers; what a call returns is kept until its next turn."""
    kept: list[Any] = [None] * len(calls)
    host_seconds = 0.0
    for _ in range(WARMUP_ROUNDS):
        start = time.perf_counter()
        for number, call in enumerate(calls):
            kept[number] = call()
        host_seconds = time.perf_counter() - start
        torch.cuda.synchronize()
    gpu_us: list[float] = []
    host_us: list[float] = []
    while len(gpu_us) < MIN_CALLS:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        torch.cuda._sleep(int((2 * host_seconds + 1e-3) * CYCLES_PER_SECOND))
        start = time.perf_counter()
        for number, call in enumerate(calls):
            events[number][0].record()
            kept[number] = call()
            events[number][1].record()
        host_us.append((time.perf_counter() - start) * 1e6 / len(calls))
        torch.cuda.synchronize()
        gpu_us += [first.elapsed_time(last) * 1e3 for first, last in events]
    lower, median, upper = statistics.quantiles(gpu_us, n=4)
    return Timing(median, lower, upper, statistics.median(host_us))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read plus written, of the device copying between two buffers far larger than its caches."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_calls([lambda: target.copy_(source), lambda: source.copy_(target)])
    return 2 * COPY_BYTES / (timing.median_us * 1e-6)


def print_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the columns of the rows, right-aligned, floats with one decimal."""
    cells = [[f"{v:.1f}" if isinstance(v := row.get(name, ""), float) else str(v) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in [list(columns), *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def write_record(path: str | None, benchmark: str, device: torch.device, bandwidth: float, rows: Sequence[Any]) -> None:
    """Write the results with the hardware, the versions and the commit they belong to; nothing without a path."""
    if path is None:
        return
    properties = torch.cuda.get_device_properties(device)
    record = {
        "benchmark": benchmark,
        "device": properties.name,
        "arch": f"sm{properties.major}{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "copy_bandwidth_bytes_per_second": bandwidth,
        "versions": {"python": platform.python_version(), **_package_versions()},
        "commit": _commit(),
        "results": list(rows),
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _package_versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _commit() -> str:
    """The commit; FASTFT_COMMIT names it where the files were copied without their repository."""
    if given := os.environ.get("FASTFT_COMMIT"):
        return given
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """Fills the list with "file:line" of each Python line that waited for the device, once the block has ended.

    PyTorch's synchronization debug mode warns of every wait that it knows of.
    """
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits += [f"{_origin(x.filename)}:{x.lineno}" for x in caught if "called a synchronizing" in str(x.message)]


def _origin(filename: str) -> str:
    """The file as its package names it: below the longest folder that modules are imported from."""
    roots = [root for root in sys.path if root and filename.startswith(root.rstrip("/") + "/")]
    return str(Path(filename).relative_to(max(roots, key=len))) if roots else filename
