"""The demo's output for people: a table on the terminal and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastft.demo.results import RunRecord, find, largest_loss_difference, replaced_lines, skipped_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

# Okabe-Ito: distinguishable with the common forms of colour blindness.
COLOURS = {"padded": "#999999", "packed": "#E69F00", "fastft": "#0072B2"}
GIB = 1024**3


def print_results(console: Console, runs: Sequence[RunRecord]) -> None:
    """Prints what was measured, the losses step by step and what fastft did to the model."""
    console.print(_measured(runs))
    console.print(
        "tokens/s: padding not counted; the median step, without the first (warm-up). loss: of the first and the last "
        "step. difference: the largest of any step's loss to stock packed, which sees the same batches (the padded run "
        "batches the same documents in another way).",
        style="dim",
    )
    console.print(_losses(runs))
    fastft = find(runs, "fastft")
    if fastft is not None:
        _print_report(console, fastft.result["report"])
        if fastft.result["device"].startswith("CPU"):
            console.print(
                "On a CPU fastft runs plain torch code: this run shows that the losses agree. The kernels, and their "
                "speed, need a GPU.",
                style="dim",
            )
    for run in runs:
        if run.failure is not None:
            console.print(f"[red]{run.label} failed:[/red]")
            console.print(run.failure, markup=False)


def save_figure(path: Path, runs: Sequence[RunRecord]) -> None:
    """Saves loss curves, throughput and peak memory of the successful runs as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [run for run in runs if run.failure is None]
    figure, (loss, speed, memory) = pyplot.subplots(
        1, 3, figsize=(13, 4.6), gridspec_kw={"width_ratios": [1.7, 1, 1]}, layout="constrained"
    )
    _draw_losses(loss, done)
    tokens_per_second = [run.real_tokens_per_second for run in done]
    _draw_bars(speed, done, tokens_per_second, "real tokens / s (padding not counted)", "{:,.0f}")
    speed.set_title("Throughput, median step", fontsize=11)
    memory_gib = [None if run.peak_memory_bytes is None else run.peak_memory_bytes / GIB for run in done]
    _draw_bars(memory, done, memory_gib, "GiB", "{:.2f}")
    memory.set_title("Peak memory", fontsize=11)
    figure.suptitle(_headline(done), fontsize=12)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _measured(runs: Sequence[RunRecord]) -> Any:
    from rich.table import Table

    table = Table(title=_headline([run for run in runs if run.failure is None]), title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("tokens/s", "padding", "peak memory", "loss", "difference"):
        table.add_column(column, justify="right")
    baseline = find(runs, "packed")
    for run in runs:
        if run.failure is not None:
            table.add_row(run.label, "failed", "", "", "", "")
            continue
        table.add_row(
            run.label,
            _formatted(run.real_tokens_per_second, "{:,.0f}"),
            _formatted(run.padding_share, "{:.0%}"),
            _formatted(run.peak_memory_bytes, "{:.2f} GiB", scale=1 / GIB),
            f"{run.losses[0]:.2f} to {run.losses[-1]:.2f}",
            _difference(run, baseline),
        )
    return table


def _losses(runs: Sequence[RunRecord], most_rows: int = 12) -> Any:
    from rich.table import Table

    done = [run for run in runs if run.failure is None]
    baseline, fastft = find(runs, "packed"), find(runs, "fastft")
    compared = baseline is not None and fastft is not None and largest_loss_difference(fastft, baseline) is not None
    table = Table(title="Loss per step", title_justify="left")
    table.add_column("step", justify="right")
    for run in done:
        table.add_column(run.label, justify="right")
    if compared:
        table.add_column("fastft - stock", justify="right")
    steps = max((len(run.losses) for run in done), default=0)
    # A long run is thinned out evenly; the last step always shows.
    stride = -(-steps // most_rows) if steps else 1
    for step in sorted({*range(0, steps, stride), steps - 1} - {-1}):
        cells = [f"{run.losses[step]:.6f}" if step < len(run.losses) else "" for run in done]
        if compared and fastft is not None and baseline is not None:
            cells.append(f"{fastft.losses[step] - baseline.losses[step]:+.1e}")
        table.add_row(str(step + 1), *cells)
    return table


def _print_report(console: Console, report: dict[str, Any]) -> None:
    console.print("What fastft replaced:", style="bold")
    for line in replaced_lines(report) or ["nothing"]:
        console.print(f"  {line}", markup=False, highlight=False)
    skipped = skipped_lines(report)
    if skipped:
        console.print("What it left as it was, and why:", style="bold")
        for line in skipped:
            console.print(f"  {line}", markup=False, highlight=False)
    if report["counters"]:
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(report["counters"].items()))
        console.print("How often it ran: ", style="bold", end="")
        console.print(counts, markup=False, highlight=False)


def _draw_losses(axes: Axes, runs: Sequence[RunRecord]) -> None:
    from matplotlib.ticker import MaxNLocator

    for run in runs:
        # Dashes over a wider line: two equal curves can both be seen.
        dashed = run.stack == "fastft"
        axes.plot(
            range(1, len(run.losses) + 1),
            run.losses,
            color=COLOURS[run.stack],
            linewidth=2 if dashed else 4 if run.stack == "packed" else 2,
            linestyle=(0, (4, 3)) if dashed else "-",
            marker="o" if len(run.losses) <= 12 else None,
            markersize=4,
            label=run.label + (" (other batches)" if run.stack == "padded" else ""),
        )
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("training loss (nats / token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    fastft = find(runs, "fastft")
    difference = largest_loss_difference(fastft, find(runs, "packed")) if fastft is not None else None
    title = "Loss" if difference is None else f"Loss (fastft to stock packed: at most {difference:.1e} apart)"
    axes.set_title(title, fontsize=11)


def _draw_bars(axes: Axes, runs: Sequence[RunRecord], values: Sequence[float | None], unit: str, text: str) -> None:
    heights = [value or 0.0 for value in values]
    bars = axes.bar(range(len(runs)), heights, color=[COLOURS[run.stack] for run in runs], width=0.65)
    axes.bar_label(bars, labels=[_formatted(value, text) for value in values], padding=3)
    axes.set_xticks(range(len(runs)), [run.label.replace(" ", "\n") for run in runs], fontsize=9)
    axes.set_ylabel(unit)
    axes.set_ylim(0, max([*heights, 1e-9]) * 1.15)
    axes.spines[["top", "right"]].set_visible(False)


def _headline(runs: Sequence[RunRecord]) -> str:
    if not runs:
        return "fastft demo"
    result = runs[0].result
    sizes = f"{result['steps']} steps of about {result['tokens_per_step']:,} real tokens"
    return f"{result['model']}, LoRA r={result['lora_rank']}, {sizes}, {result['dtype']}, {result['device']}"


def _difference(run: RunRecord, baseline: RunRecord | None) -> str:
    if run is baseline:
        return "baseline"
    difference = largest_loss_difference(run, baseline)
    return "-" if difference is None else f"{difference:.1e}"


def _formatted(value: float | None, text: str, scale: float = 1.0) -> str:
    return "-" if value is None else text.format(value * scale)
