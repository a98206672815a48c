"""What moe.py has measured: whether a way is right, its kernels in groups, and stored lines as tables and a plot."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpointing_results import markdown
from benchmarks.compare import conditions

Line = dict[str, Any]

# (of all elements, of the worst row) what an error may be in any case, relative to the RMS of the truth: a rounding to
# bfloat16 is off by 2^-9 in the RMS, and each way has about ten. A row that is wrong is off by about its own size.
BOUNDS = {torch.bfloat16: (2**-6, 2**-2), torch.float32: (2**-16, 2**-12)}
# Of the yardstick's own error, which is larger where many rows were added in low precision, as in gradients of biases.
ALLOWED_FACTOR = 2
PARTS = ("forward", "backward", "both")
GEMM = "grouped GEMM"
# The first pattern found in a kernel's name decides. Ours are anchored: PyTorch and CUB have gathers and scans, too.
KERNEL_GROUPS = (
    ("routing", r"^_(count|scan|place)_kernel|^_moe_router"),
    ("gather", r"^_gather_kernel"),
    ("combine", r"^_combine_kernel|^_token_gather_weighted_sum"),
    ("gate", r"^_gate_(forward|backward)_kernel"),
    # Those of PyTorch, of Triton, and of Liger, which have the gather or the gate inside.
    (GEMM, r"(?i)gemm|cutlass|nvjet|xmma|cublas|^_(matmul|outer)_kernel|^_fused_(up|down)_proj|^_moe_bwd_"),
)
OTHER = "other"


# --------------------------------------------------------------------------------------------------------- correctness


def errors(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """Of each tensor: how far it is from the truth, in all elements and in the worst row, relative to the truth's RMS.

    One wrong row of thousands hardly shows in the RMS of all; a row is what one token, or one expert's weight, gets.
    """
    return {name: _error(found[name], value) for name, value in truth.items()}


def _error(found: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    if found.shape != truth.shape:
        return {"rms": float("inf"), "worst_row": float("inf")}
    rows = (found.to(truth.dtype) - truth).flatten(1).norm(dim=1)
    size = truth.flatten(1).norm(dim=1).square().mean().sqrt().clamp(min=torch.finfo(truth.dtype).tiny)
    return {"rms": (rows.square().mean().sqrt() / size).item(), "worst_row": (rows.max() / size).item()}


def wrong(found: dict[str, Line], yardstick: dict[str, Line], dtype: torch.dtype) -> list[str]:
    """Errors that roundings do not explain; NaN is one."""
    bounds = dict(zip(("rms", "worst_row"), BOUNDS[dtype], strict=True))
    allowed = {
        (name, kind): max(bound, ALLOWED_FACTOR * yardstick[name][kind])
        for name in found
        for kind, bound in bounds.items()
    }
    return [
        f"{name} ({kind.replace('_', ' ')}) by {found[name][kind]:.1e}, allowed {bound:.1e}"
        for (name, kind), bound in allowed.items()
        if not found[name][kind] <= bound
    ]


def load_of(offsets: torch.Tensor) -> Line:
    """How unevenly rows are spread over the experts."""
    counts = offsets.diff(prepend=offsets.new_zeros(1)).float()
    return {"largest_over_mean": (counts.max() / counts.mean()).item(), "idle_experts": int((counts == 0).sum())}


# -------------------------------------------------------------------------------------------------------------- kernels


def group_of(kernel: str) -> str:
    return next((group for group, pattern in KERNEL_GROUPS if re.search(pattern, kernel)), OTHER)


def group_kernels(events: Iterable[tuple[str, float]], calls: int) -> Line:
    """Sums of (kernel's name, ms) over `calls` calls: ms a call by group, and of each kernel, the longest first."""
    groups = dict.fromkeys([GEMM, *(group for group, _ in KERNEL_GROUPS if group != GEMM), OTHER], 0.0)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, ms in events:
        groups[group_of(name)] += ms / calls
        kernels[name][0] += ms / calls
        kernels[name][1] += 1 / calls
    ranked = sorted(kernels.items(), key=lambda item: -item[1][0])
    return {
        "groups_ms": groups,
        "kernels": [{"name": name, "group": group_of(name), "ms": ms, "count": n} for name, (ms, n) in ranked],
    }


# --------------------------------------------------------------------------------------------------------------- tables


def table(lines: list[Line]) -> str:
    """The ways, where measured the kernels in groups and the orders, in markdown; their conditions below."""
    ways = [line for line in lines if line["kind"] == "way"]
    parts = [markdown(way_rows(ways), spread(ways))]
    profiled = [line for line in ways if line.get("profile")]
    if profiled:
        parts += ["Kernels of a forward and backward, and their share of the way's own grouped GEMMs:", ""]
        parts.append(markdown(profile_rows(profiled), []))
    if routing := [line for line in lines if line["kind"] == "routing"]:
        parts += ["The order of tokens by expert alone:", "", markdown(routing_rows(routing), [])]
    return "\n".join([*parts, workload(lines), circumstances(ways)])


def workload(lines: list[Line]) -> str:
    line = lines[0]
    asked, loads = line["arguments"], {x["tokens"]: x["load"] for x in lines}
    busiest = ", ".join(f"{load['largest_over_mean']:.1f}x ({n:,})" for n, load in loads.items())
    what = f"{line['top_k']} of {line['experts']}, {line['dtype']}, trained: {asked['train']}, skew {asked['skew']:g}"
    busiest = f"rows of the busiest expert over the mean (tokens): {busiest}"
    return f"{asked['model']}, the experts of one layer: {what}; {busiest}"


def circumstances(ways: list[Line]) -> str:
    """A step is a forward and backward; nothing where nothing was measured."""
    measured = [{**line, "step_ms": line["both"]["ms"]} for line in ways if "both" in line]
    return conditions(measured) if measured else ""


def way_rows(lines: list[Line]) -> list[list[str]]:
    rows = [["tokens", "way", *PARTS, "quartiles of both", "host", "share of the floor", "peak memory",
             "saved a token", "largest error", "against grouped_mm"]]  # fmt: skip
    for tokens in dict.fromkeys(line["tokens"] for line in lines):
        found = [line for line in lines if line["tokens"] == tokens]
        stock = next((x["both"]["median_ms"] for x in found if x["way"] == "grouped_mm" and "both" in x), None)
        floor = found[0]["floor"]
        if "both_ms" in floor:
            times = [milliseconds(floor[f"{part}_ms"]) for part in PARTS]
            row = [f"{tokens:,}", f"floor ({floor['tflops']:.0f} TFLOP/s)", *times]
            rows.append(fill(row, len(rows[0])))
        for line in found:
            if "both" not in line:
                rows.append(fill([f"{tokens:,}", line["way"], why_not(line)], len(rows[0])))
                continue
            both, peak, shares = line["both"], line["peak_bytes"], line["share_of_floor"]
            rows.append([
                f"{tokens:,}", line["way"], *(milliseconds(line[part]["median_ms"]) for part in PARTS),
                f"{both['lower_ms']:.2f} to {both['upper_ms']:.2f} ms", milliseconds(both["host_ms"]),
                f"{shares['both']:.0%}" if shares else "", "not measured" if peak is None else f"{peak / 1e9:.2f} GB",
                f"{line['saved_bytes_per_token'] / 1024:.1f} KiB",
                f"{max(kinds['rms'] for kinds in line['errors'].values()):.1e}",
                f"{stock / both['median_ms']:.2f}x" if stock else "",
            ])  # fmt: skip
    return rows


def milliseconds(value: float) -> str:
    return f"{value:.2f} ms" if value >= 1 else f"{value:.3f} ms"


def why_not(line: Line) -> str:
    return line["failure"] if "failure" in line else f"not here: {line['unavailable']}"


def fill(row: list[str], columns: int) -> list[str]:
    return row + [""] * (columns - len(row))


def spread(lines: list[Line]) -> list[str]:
    """The widest quartiles: ways that are closer than this do not differ."""
    apart = [line["both"]["upper_ms"] / line["both"]["lower_ms"] - 1 for line in lines if "both" in line]
    return [f"quartiles of one way's forward and backward: at most {max(apart):.1%} apart", ""] if apart else []


def profile_rows(lines: list[Line]) -> list[list[str]]:
    groups = list(lines[0]["profile"]["groups_ms"])
    rows = [["tokens", "way", *groups]]
    for line in lines:
        times = line["profile"]["groups_ms"]
        gemm = times[GEMM]
        shares = [f" ({times[name] / gemm:.0%})" if gemm and name != GEMM else "" for name in groups]
        cells = [milliseconds(times[name]) + share for name, share in zip(groups, shares, strict=True)]
        rows.append([f"{line['tokens']:,}", line["way"], *cells])
    return rows


def routing_rows(lines: list[Line]) -> list[list[str]]:
    rows = [["tokens", "order", "time", "quartiles", "host", "of the floor of both"]]
    for line in lines:
        row = [f"{line['tokens']:,}", line["way"]]
        if "order" not in line:
            rows.append(fill([*row, why_not(line)], len(rows[0])))
            continue
        timing, floor = line["order"], line["floor"].get("both_ms")
        quartiles = f"{timing['lower_ms']:.3f} to {timing['upper_ms']:.3f} ms"
        share = f"{timing['median_ms'] / floor:.1%}" if floor else ""
        rows.append([*row, milliseconds(timing["median_ms"]), quartiles, milliseconds(timing["host_ms"]), share])
    return rows


def plot(lines: list[Line], path: Path) -> None:
    """Forward and backward over the number of tokens, beside the floor; what each way saves of a token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = [line for line in lines if line["kind"] == "way"]
    measured = [line for line in ways if "both" in line]
    figure, (times, saved) = pyplot.subplots(1, 2, figsize=(11, 4.5), width_ratios=(3, 2))
    names = list(dict.fromkeys(line["way"] for line in measured))
    for number, name in enumerate(names):
        found = [line for line in measured if line["way"] == name]
        milliseconds_of = [line["both"]["median_ms"] for line in found]
        times.plot([line["tokens"] for line in found], milliseconds_of, "o-", color=f"C{number}", label=name)
        saved.bar(name, found[-1]["saved_bytes_per_token"] / 1024, color=f"C{number}")
    floors = {line["tokens"]: line["floor"]["both_ms"] for line in ways if "both_ms" in line["floor"]}
    if floors:
        times.plot(list(floors), list(floors.values()), "k--", label="grouped GEMMs alone")
    times.set_xscale("log", base=2)
    times.set_yscale("log")
    tokens = sorted({line["tokens"] for line in ways})
    times.set_xticks(tokens, [f"{number:,}" for number in tokens])
    times.set_xlabel("tokens")
    times.set_ylabel("forward and backward, ms")
    times.grid(alpha=0.3)
    if times.lines:
        times.legend()
    saved.set_ylabel("saved for backward, KiB a token")
    saved.grid(alpha=0.3, axis="y")
    asked = ways[0]["arguments"]
    figure.suptitle(f"{asked['model']}, the experts of one layer, trained: {asked['train']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
