"""The packing benchmark: its mixes of lengths, its table with failed runs, and a run of its own on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import packing  # noqa: E402

ROWS = [{"instruction": "x", "input": "", "output": " ".join(f"w{i}" for i in range(300))} for _ in range(20)]


def line(way: str, rate: float, **fields) -> dict:
    return {
        "way": way, "mix": "20/80", "batch": 4, "real_tokens_per_s_median": rate, "peak_memory_gb": 2.0,
        "tokens_per_step": [30, 20], "places_per_step": [40, 60], "step_ms": [1.0, 2.0],
        "hardware": {"gpu": "NVIDIA H200", "cpu": "x86_64"}, "versions": {"torch": "2.11.0", "commit": "abc1234"},
        **fields,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "long"), [("20/80", 200), ("50/50", 500)])
def test_mixes_have_long_and_short_samples(name: str, long: int) -> None:
    samples = packing.mix(ROWS, name, length=2048)
    words = [len(sample["output"].split()) for sample in samples]
    assert words.count(int(2048 * packing.WORDS_PER_TOKEN)) == long and words.count(packing.SHORT_WORDS) == 1000 - long
    assert samples == packing.mix(ROWS, name, length=2048) != packing.mix(ROWS, name, length=2048, seed=1)
    assert packing.mix(ROWS, "as it is", 2048) is ROWS
    with pytest.raises(ValueError, match="unknown mix '30/70'"):
        packing.mix(ROWS, "30/70", 2048)


def test_a_failed_run_is_a_row_without_numbers() -> None:
    lines = [line("stock, padded", 100.0), line("fastft, packed", 250.0, batch=4)]
    lines.insert(1, {"way": "fastft, packing=False", "mix": "20/80", "batch": 4, "failure": "out of memory"})
    assert packing.summarise(lines) == [
        ["20/80", "4", "stock, padded", "100", "50%", "2.0 GB", "1.00x"],
        ["20/80", "4", "fastft, packing=False", "out of memory", "", "", ""],
        ["20/80", "4", "fastft, packed", "250", "50%", "2.0 GB", "2.50x"],
    ]
    assert packing.table(lines).splitlines()[-1] == "NVIDIA H200; torch 2.11.0; commit abc1234; 2 steps a round"
    assert "out of memory" in packing.table(lines[1:2])  # nothing measured, so no conditions


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    packing.plot([line("stock, padded", 100.0), line("fastft, packed", 250.0)], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def benchmark(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "packing.py"), "--out", str(out), "--mixes", "as it is"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


def test_a_run_that_fails_is_recorded_and_shows_in_the_exit_status(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    arguments = ("--rows", "1", "2", "--ways", "stock, padded", "--", "--model", "no such model")
    finished = benchmark(out, *arguments)
    assert finished.returncode == 1 and "invalid choice" in finished.stderr
    assert [line["failure"] for line in packing.read_lines(out)] == ["exit status 2"] * 2
    again = benchmark(out, *arguments)
    assert again.returncode == 2 and "give a new file" in again.stderr


def test_a_process_that_dies_leaves_a_line_for_each_point(tmp_path: Path) -> None:
    out, points = tmp_path / "lines.jsonl", [("20/80", 4, tmp_path), ("20/80", 8, tmp_path)]
    packing.append(out, line("fastft, packed", 250.0))
    packing.note_missing("fastft, packed", points, out, -9)
    packing.note_missing("stock, padded", points[:1], out, -9)
    found = [(each["way"], each["batch"], each.get("failure")) for each in packing.read_lines(out)]
    assert found == [
        ("fastft, packed", 4, None), ("fastft, packed", 8, "exit status -9"), ("stock, padded", 4, "exit status -9"),
    ]  # fmt: skip
