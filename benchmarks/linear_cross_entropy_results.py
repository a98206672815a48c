"""What linear_cross_entropy.py has measured: whether a way is right, and stored lines as a table and a plot."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpointing_results import markdown
from benchmarks.compare import conditions
from benchmarks.moe_results import fill, milliseconds, why_not

Line = dict[str, Any]

# (of all elements, of the worst row) what an error of a gradient may be, relative to the RMS of the truth. In 16 bits a
# gradient may be summed over a thousand tiles or chunks and rounded at each; fp32 may be multiplied as TF32. A row that
# is wrong is off by about its own size.
_HALF = (2**-4, 2**-1)
BOUNDS = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: (2**-8, 2**-4)}
# Of the loss, relative: a mean over tokens, in which most of the logits' roundings cancel.
LOSS_BOUNDS = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float32: 2**-10}
NAMES = {"floor": "products and one pass alone", "fastft-none": "fastft, a gradient a token"}


def wrong(line: Line, exact_loss: float, dtype: torch.dtype) -> list[str]:
    """Errors that summing in a dtype does not explain; NaN is one."""
    apart, allowed = abs(line["loss"] - exact_loss), LOSS_BOUNDS[dtype] * abs(exact_loss)
    reasons = [] if apart <= allowed else [f"loss {line['loss']:.6g}, exactly {exact_loss:.6g}"]
    bounds = dict(zip(("rms", "worst_row"), BOUNDS[dtype], strict=True))
    for name, kinds in line["errors"].items():
        reasons += [
            f"gradient of {name} ({kind.replace('_', ' ')}) by {kinds[kind]:.1e}, allowed {bound:.1e}"
            for kind, bound in bounds.items()
            if not kinds[kind] <= bound
        ]
    return reasons


# ---------------------------------------------------------------------------------------------------------------- table


def table(lines: list[Line]) -> str:
    """A row a way and number of tokens in markdown, what was computed and where below."""
    below = [*floors(lines), *spread(lines), workload(lines[0]), circumstances(lines)]
    return markdown(rows_of(lines), below)


def rows_of(lines: list[Line]) -> list[list[str]]:
    rows = [["tokens", "way", "forward and backward", "quartiles", "host", "share of the floor", "peak memory", "loss",
             "hidden's gradient: error, worst row", "weight's"]]  # fmt: skip
    for line in lines:
        start = [f"{line['tokens']:,}", label_of(line["way"])]
        if "both" not in line:
            rows.append(fill([*start, why_not(line)], len(rows[0])))
            continue
        both = line["both"]
        quartiles = f"{milliseconds(both['lower_ms'])} to {milliseconds(both['upper_ms'])}"
        row = [*start, milliseconds(both["median_ms"]), quartiles, milliseconds(both["host_ms"])]
        rows.append(row + outcome(line) if "loss" in line else fill(row, len(rows[0])))
    return rows


def label_of(way: str) -> str:
    return NAMES.get(way, way)


def outcome(line: Line) -> list[str]:
    """The cells that the floor does not have."""
    share, peak, errors = line["share_of_floor"], line["peak_bytes"], line["errors"]
    return [
        "" if share is None else f"{share:.0%}",
        "not measured" if peak is None else f"{peak / 2**30:.2f} GiB",
        f"{line['loss']:.5f}",
        *(error(errors[name]) if name in errors else "" for name in ("hidden", "weight")),
    ]


def error(kinds: Line) -> str:
    return f"{kinds['rms']:.1e}, {kinds['worst_row']:.1e}"


def floors(lines: list[Line]) -> list[str]:
    """What the floor consists of."""
    found = []
    for line in lines:
        if "parts_ms" in line:
            parts = " + ".join(f"{name} {milliseconds(ms)}" for name, ms in line["parts_ms"].items())
            rates = f"products at {line['tflops']:.0f} TFLOP/s, the pass at {line['gb_per_s']:.0f} GB/s"
            found.append(f"floor of {line['tokens']:,} tokens, each step alone: {parts}; {rates}")
    return found


def spread(lines: list[Line]) -> list[str]:
    """The widest quartiles: ways that are closer than this do not differ."""
    apart = [line["both"]["upper_ms"] / line["both"]["lower_ms"] - 1 for line in lines if "both" in line]
    return [f"quartiles of one way: at most {max(apart):.1%} apart"] if apart else []


def workload(line: Line) -> str:
    asked = line["arguments"]
    softcap = f", softcap {asked['softcap']:g}" if asked["softcap"] else ""
    return (
        f"{asked['hidden']:,} x {asked['vocab']:,}, {asked['dtype']}, {asked['head']} head, {asked['ignored']:.0%} of "
        f"the targets ignored{softcap}; errors are relative to the exact gradient's RMS"
    )


def circumstances(lines: list[Line]) -> str:
    """Nothing where nothing was measured."""
    measured = [{**line, "step_ms": line["both"]["ms"]} for line in lines if "both" in line]
    if not measured:
        return ""
    cut = lines[0]["versions"].get("cut-cross-entropy")
    return conditions(measured) + (f"; cut-cross-entropy {cut}" if cut else "")


# ----------------------------------------------------------------------------------------------------------------- plot


def plot(lines: list[Line], path: Path) -> None:
    """Time and memory over the number of tokens; only said where matplotlib is missing, for the lines are stored."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path} is not drawn: matplotlib is not installed here (pip install matplotlib)", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    measured = [line for line in lines if "both" in line]
    for number, name in enumerate(dict.fromkeys(line["way"] for line in measured)):
        style = {"color": "k", "linestyle": "--"} if name == "floor" else {"color": f"C{number}", "marker": "o"}
        found = [line for line in measured if line["way"] == name]
        label = label_of(name)
        times.plot([x["tokens"] for x in found], [x["both"]["median_ms"] for x in found], label=label, **style)
        held = [(x["tokens"], x["peak_bytes"] / 2**30) for x in found if x.get("peak_bytes") is not None]
        if held:
            memory.plot(*zip(*held, strict=True), label=label, **style)
    times.set_ylabel("forward and backward, ms")
    memory.set_ylabel("peak memory over the operands, GiB")
    for axes in (times, memory):
        finish(axes, sorted({line["tokens"] for line in lines}))
    figure.suptitle(workload(lines[0]).partition(";")[0], fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def finish(axes: Any, tokens: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{number:,}" for number in tokens])
    axes.set_xlabel("tokens")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.set_yscale("log")
        axes.legend(fontsize=8)
