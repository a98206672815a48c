"""The search for the longest row: on made-up machines, and its table."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import longest  # noqa: E402
from benchmarks.checkpointing_ways import WAYS, Unavailable  # noqa: E402
from benchmarks.compare import read_lines  # noqa: E402


def search(monkeypatch, capacity: int, *, host: int = sys.maxsize, second_per_token: float = 0.0, **options) -> dict:
    """`longest` on a machine that trains `capacity` tokens and says so by a straight line that is a little off."""
    args = SimpleNamespace(**{"memory_gb": None, "probes": (8192, 16384), "tries": 4, "seconds": 150.0, **options})

    def one_step(setup, context, tokens: int) -> dict:
        if tokens > min(capacity, host):
            return {"tokens": tokens, "failure": "out of memory"}
        return {
            "tokens": tokens, "peak_memory_gb": 10 + tokens / 10_000, "step_ms": 1000 * second_per_token * tokens,
        }  # fmt: skip

    monkeypatch.setattr(longest, "prepare", lambda setup, way, budget: None)
    monkeypatch.setattr(longest, "one_step", one_step)
    monkeypatch.setattr(longest, "memory_room", lambda given, device: 20e9)
    monkeypatch.setattr(longest, "host_limit", lambda setup, way, available: host)
    setup = SimpleNamespace(args=args, device=torch.device("cuda"))
    return longest.longest(setup, "fastft offload")


@pytest.mark.parametrize("capacity", [70_000, 91_000, 96_256, 99_000, 120_000])
def test_the_search_ends_below_what_fits_and_near_it(monkeypatch, capacity: int) -> None:
    found = search(monkeypatch, capacity, tries=9)
    assert found["predicted_tokens"] == 96_256  # 0.98 * 20 GB, on whole 1024
    assert capacity - 1024 < found["longest_tokens"] <= capacity and found["limit"] == "device memory"
    assert len({each["tokens"] for each in found["tries"]}) == len(found["tries"]) <= 9


def test_the_search_stops_at_the_number_of_tries_the_time_and_the_host(monkeypatch) -> None:
    found = search(monkeypatch, 10**9, tries=2)
    assert len(found["tries"]) == 2 and found["limit"] == "tries"
    found = search(monkeypatch, 91_000, second_per_token=0.01, seconds=500.0)
    assert found["tries"] == [] and found["longest_tokens"] == 16384
    assert found["limit"] == "time: 96,256 tokens need some 963 s"
    found = search(monkeypatch, 91_000, host=50 * 1024)
    assert [each["tokens"] for each in found["tries"]] == [51200] and found["limit"] == "host memory"
    with pytest.raises(Unavailable, match="shorter --probes"):
        search(monkeypatch, 10_000)


def test_the_host_takes_so_many_tokens() -> None:
    setup = SimpleNamespace(layers=4, input_bytes=1000)
    room = int(10 * 2**30 / longest.HOST_SHARE)  # 2.5 GiB a layer
    assert longest.host_limit(setup, WAYS["stock offload"], room) == 2**31 // 1000 // 1024 * 1024
    assert longest.host_limit(setup, WAYS["fastft offload"], room) == int(2.5 * 2**30) // 1000 // 1024 * 1024
    assert longest.host_limit(setup, WAYS["stock checkpointing"], room) == sys.maxsize


def test_attention_makes_long_steps_longer_than_their_length_says() -> None:
    probes = [{"tokens": n, "step_ms": 1000 * (1e-4 * n + 1e-8 * n * n)} for n in (8192, 16384)]
    assert longest.predict_seconds(probes, 100_000) == pytest.approx(110.0)
    probes = [{"tokens": 8192, "step_ms": 900.0}, {"tokens": 16384, "step_ms": 1000.0}]  # the host's time, no parabola
    assert longest.predict_seconds(probes, 32768) == pytest.approx(2.0)


def line(way: str, step: float | None, peak: float | None = None, **fields) -> dict:
    facts = {
        "hardware": {"gpu": "NVIDIA H200", "cpu": "x86_64"}, "versions": {"torch": "2.11.0", "commit": "abc1234"},
        "way": way, "round": 1, "arguments": {"model": "Qwen3-8B", "layers": 8, "method": "lora", "documents": 1},
    }  # fmt: skip
    return {**facts, "failure": "out of memory"} if step is None else {
        **facts, "step_ms": [step], "peak_memory_gb": peak, **fields
    }  # fmt: skip


def test_the_table_of_the_longest_rows() -> None:
    tries = [{"tokens": 40960, "failure": "out of memory"}, {"tokens": 38912}]
    fields = {"memory_gb": 40.0, "predicted_tokens": 40960, "limit": "device memory", "tries": tries}
    lines = [
        line("stock checkpointing", 9000.0, 39.5, longest_tokens=38912, **fields), line("stock offload", None),
        line("fastft offload", 20000.0, 39.0, longest_tokens=77824, **fields),
    ]  # fmt: skip
    printed = longest.table(lines)
    expected = (
        "| 38,912 | 9.0 s | 39.50 GB of 40.0 | device memory | 40,960 | 40,960 out of memory; 38,912 fits | 1.00x |"
    )
    assert expected in printed
    assert "| stock offload | out of memory |" in printed and "| 2.00x |" in printed


def test_without_a_gpu_there_is_no_longest_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "lines.jsonl"
    arguments = ["--model", "tiny", "--ways", "fastft offload", "--out", str(out)]
    assert longest.main(arguments) == 1
    (found,) = read_lines(out)
    assert found["failure"] == "the longest row needs a GPU" and "tokens" not in found["arguments"]
    assert "tiny, lora, a row of 1 document(s)" in capsys.readouterr().out


def test_options_that_make_no_sense_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in (
        (["--ways", "planner, free memory"], "do not extrapolate"),
        (["--", "--stack", "fastft"], "no train_step.py"),
    ):
        with pytest.raises(SystemExit):
            longest.parse_arguments(["--out", str(tmp_path / "new"), *arguments])
        assert reason in capsys.readouterr().err
