"""What checkpointing.py has stored, as a table in markdown and as a plot; longest.py's table shares parts of it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.checkpointing_ways import WAYS, YARDSTICK, Line
from benchmarks.compare import conditions


def table(lines: list[Line]) -> str:
    """The table in markdown, with its conditions below."""
    return markdown(step_rows(lines), [*spread(lines), *circumstances(lines)])


def markdown(rows: list[list[str]], below: list[str]) -> str:
    text = ["| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]]
    return "\n".join([*text, "", *below])


def circumstances(lines: list[Line]) -> list[str]:
    """What was trained, and where, if anything was."""
    measured = [line for line in lines if "failure" not in line]
    return [workload(lines[0]), conditions(measured) if measured else ""]


def workload(line: Line) -> str:
    asked = line["arguments"]
    layers = f", {asked['layers']} layers" if asked["layers"] else ""
    tokens = f"{asked['tokens']:,} tokens in " if "tokens" in asked else ""
    return f"{asked['model']}{layers}, {asked['method']}, a row of {tokens}{asked['documents']} document(s)"


def step_rows(lines: list[Line]) -> list[list[str]]:
    by_way = {line["way"]: line for line in reversed(lines) if "failure" not in line}  # of two rounds the first
    stock = by_way.get("stock checkpointing")
    rows = [["way", "step", "forward", "backward", "peak memory", "left by the forward", "host memory",
             "copies hidden", "loss, gradients", "against stock checkpointing"]]  # fmt: skip
    for line in lines:
        name = line["way"] if line["round"] == 1 else f"{line['way']}, again"
        if "failure" in line:
            rows.append([name, line["failure"], *[""] * (len(rows[0]) - 2)])
            continue
        if isinstance(line["budget"], int):
            name += f": {line['budget'] / 1e9:.2f} GB"
        hidden = hidden_share(line, by_way.get(WAYS[line["way"]].plain or ""))
        host_gb = max(line["resident_growth_gb"], line["pinned_gb"] or 0)
        rows.append([
            name, f"{line['step_ms_median']:.1f} ms", f"{line['forward_ms_median']:.1f} ms",
            f"{line['backward_ms_median']:.1f} ms", gigabytes(line["peak_memory_gb"]),
            gigabytes(line["memory_after_forward_gb"]), gigabytes(host_gb),
            "" if hidden is None else f"{hidden:.0%}", agreement(line, by_way.get(YARDSTICK)),
            f"{stock['step_ms_median'] / line['step_ms_median']:.2f}x" if stock else "",
        ])  # fmt: skip
    return rows


def gigabytes(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} GB"


def hidden_share(line: Line, plain: Line | None) -> float | None:
    """Of the time that the copies there and back would take alone, what the step is not longer by."""
    bandwidth = line["bandwidth_gb_s"]
    if plain is None or not bandwidth or not line["offloaded_bytes"]:
        return None
    copies_ms = sum(line["offloaded_bytes"] / 1e6 / bandwidth[way] for way in ("to_host", "to_device"))
    return 1 - (line["step_ms_median"] - plain["step_ms_median"]) / copies_ms


def agreement(line: Line, yardstick: Line | None) -> str:
    if yardstick is None or line is yardstick:
        return "" if yardstick is None else "the yardstick"
    values = [(line[key], yardstick[key]) for key in ("loss", "gradient_sum")]
    if all(ours == theirs for ours, theirs in values):
        return "equal"
    return "differ by " + ", ".join(f"{abs(ours - theirs) / abs(theirs):.1e}" for ours, theirs in values)


def spread(lines: list[Line]) -> list[str]:
    """How far apart the two rounds of the yardstick are."""
    medians = [line["step_ms_median"] for line in lines if line["way"] == YARDSTICK and "step_ms_median" in line]
    if len(medians) < 2:
        return []
    apart = max(medians) / min(medians) - 1
    return [f"{YARDSTICK}, first and last: {' and '.join(f'{ms:.1f} ms' for ms in medians)}, {apart:.1%} apart"]


def plot(lines: list[Line], path: Path) -> None:
    """Step time over peak memory, a mark for each way; nothing of ways without one of the two."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for line in lines:
        if "step_ms_median" not in line or line["peak_memory_gb"] is None or line["round"] > 1:
            continue
        number = list(WAYS).index(line["way"])
        place = (line["peak_memory_gb"], line["step_ms_median"])
        axes.plot(*place, "o", color=f"C{number}", markersize=14, alpha=0.7, label=f"{number + 1}  {line['way']}")
        # Not in the middle, and on another side than the next way's: two that are much alike cover each other.
        side = ("left", "right", "center")[number % 3]
        axes.annotate(str(number + 1), place, ha=side, va="center", fontsize=9)
    axes.set_xlabel("peak memory, GB")
    axes.set_ylabel("time of a step, ms")
    axes.set_title(workload(lines[0]), fontsize=10)
    axes.grid(alpha=0.3)
    axes.margins(0.1)
    if axes.lines:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
