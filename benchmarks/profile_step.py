"""Splits a training step into GEMM, attention, other kernels, copies and idle time, from a torch.profiler trace."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

# In order: the first pattern that is found in a kernel's name decides. Attention comes before GEMM because its kernels
# are built from GEMM tiles, the named operations before the generic elementwise and reduction kernels.
# TRL's chunked head names its Triton kernels just _forward_kernel and _backward_kernel.
KERNEL_GROUPS: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|attention|attn|cutlass[FB]_|sdpa|varlen"),
    ("loss", r"log_?prob|cross_entropy|nll_loss|log_?softmax|logsumexp|_ce_|^_(forward|backward)_kernel"),
    ("optimizer", r"adam|multi_tensor_apply|lpnorm|sgd"),
    ("dequantize", r"dequant|quantize"),
    ("moe", r"moe|expert|permut|counting_sort|router|topk"),
    ("rope", r"rope|rotary"),
    ("norm", r"rms_?norm|layer_?norm|_norm_(forward|backward|fwd|bwd)"),
    ("activation", r"swiglu|geglu|silu|gelu|gated_mlp|sigmoid|_glu"),
    ("lora", r"lora"),
    ("gemm", r"gemm|gemv|nvjet|cutlass|xmma|splitk|s16816|s1688|cublas|grouped_mm|matmul|_mm_kernel|dot_kernel"),
    ("softmax", r"softmax"),
    ("copy_cast", r"copy|catarray|_cast|to_bf16|to_fp32|fillfunctor|memset|memcpy"),
    ("index", r"index|gather|scatter|embedding|sort|radix|scan|cub::|histogram|bincount|nonzero|compact|unique"),
    ("reduce", r"reduce"),
    ("elementwise", r"elementwise|pointwise|triton_poi|functor"),
)
_COMPILED = tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in KERNEL_GROUPS)
_LAUNCH = re.compile(r"^(cuda|cu)LaunchKernel|^(cuda|cu)GraphLaunch|^(cuda|cu)LaunchCooperative")
_SYNC = re.compile(r"^cuda(Stream|Device|Event)Synchronize$|^cu(Stream|Ctx|Event)Synchronize$")
_MARK = "layer mark: "
COUNTS = ("launches", "device_operations", "synchronizations")
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def classify_kernel(name: str) -> str:
    """The group of a kernel by its name; "other" if no pattern is found in it."""
    for group, pattern in _COMPILED:
        if pattern.search(name):
            return group
    return "other"


def busy_time(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (begin, end) intervals: kernels on several streams count once where they overlap."""
    busy, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy


def split_trace(events: Iterable[dict[str, Any]], steps: int, wall_ms: float, top: int = 25) -> dict[str, Any]:
    """Per-step times in ms of a Chrome trace of `steps` steps that took `wall_ms` in all.

    Args:
        events: `traceEvents` of an exported torch.profiler trace; `ts` and `dur` in microseconds.
        steps: number of steps in the trace.
        wall_ms: host wall time of those steps, the device drained at both ends.
        top: number of kernel names to list.

    Returns:
        `groups_ms` (gemm, attention, ..., memcpy, memset), `busy_ms` (their union), `idle_ms` (the rest of the wall
        time), `launches`, `device_operations` and `synchronizations` a step, and `top_kernels`.
    """
    groups: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    intervals: list[tuple[float, float]] = []
    launches = synchronizations = 0
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if category in _DEVICE_CATEGORIES:
            begin, duration = float(event["ts"]), float(event["dur"])
            groups[classify_kernel(name) if category == "kernel" else category.removeprefix("gpu_")] += duration
            kernels[name][0] += duration
            kernels[name][1] += 1
            intervals.append((begin, begin + duration))
        elif category in ("cuda_runtime", "cuda_driver"):
            launches += bool(_LAUNCH.search(name))
            synchronizations += bool(_SYNC.search(name))
    busy = busy_time(intervals) / 1000
    ranked = sorted(kernels.items(), key=lambda item: -item[1][0])[:top]
    return {
        "steps": steps,
        "wall_ms": wall_ms / steps,
        "busy_ms": busy / steps,
        "idle_ms": (wall_ms - busy) / steps,
        "groups_ms": {name: total / 1000 / steps for name, total in sorted(groups.items(), key=lambda item: -item[1])},
        "launches": launches / steps,
        "device_operations": len(intervals) / steps,
        "synchronizations": synchronizations / steps,
        "top_kernels": [
            {"name": name, "group": classify_kernel(name), "ms": total / 1000 / steps, "count": count / steps}
            for name, (total, count) in ranked
        ],
    }


class StepProfiler:
    """Profiles the device between `start()` and `stop()`, both called with the device drained."""

    def __init__(self, steps: int) -> None:
        import torch

        self.steps = steps
        # Device activities bring the launch calls along; recording the host's operators too would slow the host down.
        activity = torch.profiler.ProfilerActivity
        self._activities = [activity.CUDA] if torch.cuda.is_available() else [activity.CPU]
        self._profiler: Any = None
        self._begin = 0.0
        self.wall_ms = 0.0

    def start(self) -> None:
        import torch

        self._profiler = torch.profiler.profile(activities=self._activities)
        self._profiler.start()
        self._begin = time.perf_counter()

    def stop(self) -> None:
        self.wall_ms = 1000 * (time.perf_counter() - self._begin)
        self._profiler.stop()

    def split(self, trace: Path | None = None) -> dict[str, Any]:
        """The split of the profiled steps (see `split_trace`); `trace` keeps the Chrome trace in that file."""
        return split_trace(_events_of(self._profiler, trace), self.steps, self.wall_ms)


def layer_launches(model: Any, run: Callable[[], Any]) -> dict[str, float | None]:
    """Kernels that a decoder layer launches, forward and backward: the median over layers, None where none is seen.

    Args:
        model: with decoder layers, told by the name of their class.
        run: one forward and backward of it. A layer's second forward under checkpointing counts as backward.
    """
    import torch

    layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    begun: set[int] = set()

    def mark(name: str) -> None:
        with torch.profiler.record_function(_MARK + name):
            pass

    def begin(place: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        if place in begun:
            return
        begun.add(place)
        mark(f"forward {place}")
        if hidden_states.requires_grad:
            hidden_states.register_hook(lambda grad: mark(f"backward {place}"))

    handles = [
        layer.register_forward_pre_hook(partial(begin, place), with_kwargs=True) for place, layer in enumerate(layers)
    ]
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    return count_layer_launches(_events_of(profiler))


def count_layer_launches(events: Iterable[dict[str, Any]]) -> dict[str, float | None]:
    """See `layer_launches`, of whose marks these are the `traceEvents`: from mark to mark on the marks' own thread."""
    marks: dict[str, list[tuple[float, Any]]] = {"forward": [], "backward": []}
    launches: list[tuple[float, Any]] = []
    for event in events:
        name = str(event.get("name", ""))
        if name.startswith(_MARK) and event.get("cat") == "user_annotation":
            marks[name.removeprefix(_MARK).split()[0]].append((float(event["ts"]), event["tid"]))
        elif event.get("cat") in ("cuda_runtime", "cuda_driver") and _LAUNCH.search(name):
            launches.append((float(event["ts"]), event["tid"]))
    found: dict[str, float | None] = {}
    for direction, places in marks.items():
        places.sort()
        spans = [
            sum(begin <= ts < end and tid == thread for ts, thread in launches)
            for (begin, tid), (end, _) in itertools.pairwise(places)
        ]
        found[direction] = statistics.median(spans) if launches and spans else None
    return found


def _events_of(profiler: Any, trace: Path | None = None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def print_split(result: dict[str, Any], stream: Any = sys.stderr) -> None:
    """The split and the GEMM floor of a result as tables."""
    split, floor = result["profile"], result.get("gemm_floor")
    median = result["step_ms_median"]

    def line(name: str, ms: float, note: str = "") -> None:
        print(f"  {name:<34}{ms:10.2f} ms {100 * ms / median:6.1f} %  {note}", file=stream)

    print(f"\none step ({result['arguments']['stack']}, {result['arguments']['model']})", file=stream)
    line("step, not profiled (median)", median)
    line("step, profiled", split["wall_ms"], "the profiler slows the host down")
    for name, ms in split["groups_ms"].items():
        line(f"  {name}", ms)
    line("GPU busy (union)", split["busy_ms"])
    line("GPU idle, profiled", split["idle_ms"])
    line("GPU idle, not profiled", split["idle_unprofiled_ms"], "median step - busy")
    counts = (f"{name.replace('_', ' ')} {split[name]:.0f}" for name in COUNTS)
    print(f"  {', '.join(counts)} a step", file=stream)
    a_layer = split.get("layer_launches") or {}
    if a_layer.get("forward") is not None:
        print(f"  kernels a layer: {a_layer['forward']:.0f} forward, {a_layer['backward']:.0f} backward", file=stream)
    if floor:
        print(f"GEMM floor for {floor['tokens']} tokens", file=stream)
        for name, ms in floor["parts_ms"].items():
            line(f"  {name}", ms, f"{floor['parts_tflop'][name]:.2f} TFLOP")
        line("floor (no recompute)", floor["floor_ms"], f"{floor['tflops']:.0f} TFLOP/s")
        line("step / floor", median, f"{median / floor['floor_ms']:.2f} x")
    print(f"top {len(split['top_kernels'])} kernels (a step)", file=stream)
    for kernel in split["top_kernels"]:
        name = f"{kernel['group']:<12}{kernel['name'][:110]}"
        print(f"  {kernel['ms']:8.2f} ms {kernel['count']:7.0f} x {name}", file=stream)
