"""The comparison of stacks: what is run in which order, and a table that comes from stored lines alone."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import compare  # noqa: E402


def line(stack: str, step_ms: list[float], checkpointing: str = "on", memory: float | None = 4.0) -> dict:
    arguments = {
        "stack": stack, "model": "Llama-3.2-1B", "layers": None, "method": "lora", "packing": True,
        "checkpointing": checkpointing, "data": "rows.json", "rows": 2, "length": 4096,
    }  # fmt: skip
    return {
        "arguments": arguments,
        "step_ms": step_ms,
        "step_ms_median": sorted(step_ms)[len(step_ms) // 2],
        "real_tokens_per_s_median": 8192000 / sorted(step_ms)[len(step_ms) // 2],
        "peak_memory_gb": memory,
        "hardware": {"gpu": "NVIDIA H200", "cpu": "x86_64"},
        "versions": {"torch": "2.11.0", "unsloth": None, "commit": "abc1234"},
    }


def test_rounds_of_a_stack_are_one_row_beside_the_first():
    lines = [
        line("transformers", [300.0, 310.0, 290.0], memory=4.5),
        line("fastft", [200.0, 210.0, 190.0]),
        line("transformers", [280.0, 320.0, 270.0], memory=4.75),
        line("fastft", [150.0, 205.0, 160.0]),
        line("transformers", [200.0] * 3, checkpointing="off", memory=18.0),
        line("fastft", [100.0] * 3, checkpointing="off", memory=15.0),
    ]
    rows = compare.summarise(lines)
    assert [row[1:] for row in rows] == [
        ["transformers", "295.0 ms", "300.0 to 280.0 ms", "28,282", "4.75 GB", "1.00x"],
        ["fastft", "195.0 ms", "200.0 to 160.0 ms", "46,080", "4.00 GB", "1.51x"],
        ["transformers", "200.0 ms", "200.0 to 200.0 ms", "40,960", "18.00 GB", "1.00x"],
        ["fastft", "100.0 ms", "100.0 to 100.0 ms", "81,920", "15.00 GB", "2.00x"],
    ]
    assert rows[0][0] == "Llama-3.2-1B, lora, packed, checkpointing on" and rows[3][0].endswith("off")


def test_the_table_says_on_what_it_was_measured():
    printed = compare.table([line("transformers", [2.0, 2.0]), line("fastft", [1.0, 1.0], memory=None)])
    assert printed.splitlines()[-1] == "NVIDIA H200; torch 2.11.0; commit abc1234; 2 steps a round"
    assert "| not measured | 2.00x |" in printed


@pytest.mark.parametrize("place", [("versions", "commit"), ("versions", "torch"), ("hardware", "gpu")])
def test_lines_of_different_machines_or_versions_are_refused(place):
    other = copy.deepcopy(line("fastft", [1.0]))
    other[place[0]][place[1]] = "another"
    with pytest.raises(ValueError, match="2 different machines or versions"):
        compare.table([line("transformers", [2.0]), other])


def test_stacks_take_turns_and_failures_are_counted(monkeypatch, tmp_path, capsys):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, int("liger" in command), "", "no liger here")

    monkeypatch.setattr(compare.subprocess, "run", run)
    out = tmp_path / "lines.jsonl"
    arguments = ["--stacks", "transformers", "liger", "--rounds", "2", "--out", str(out), "--", "--model", "tiny"]
    assert compare.main(arguments) == 1
    assert [command[command.index("--stack") + 1] for command in commands] == ["transformers", "liger"] * 2
    assert all(command[2:4] == ["--model", "tiny"] and command[-1] == str(out) for command in commands)
    assert capsys.readouterr().err.count("no liger here") == 2


def test_an_old_file_is_not_added_to(tmp_path):
    out = tmp_path / "lines.jsonl"
    out.write_text("")
    for arguments in (["--out", str(out)], [], ["--out", str(out), "--table", str(out)]):
        with pytest.raises(SystemExit):
            compare.main(arguments)


def test_a_run_on_the_cpu(tmp_path):
    out = tmp_path / "lines.jsonl"
    command = [sys.executable, "benchmarks/compare.py", "--rounds", "1", "--out", str(out), "--"]
    command += ["--model", "tiny", "--steps", "2", "--warmup", "1", "--length", "64"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    stored = [json.loads(each) for each in out.read_text(encoding="utf-8").splitlines()]
    assert [each["arguments"]["stack"] for each in stored] == ["transformers", "fastft"]
    assert finished.stdout.strip() == compare.table(stored)
