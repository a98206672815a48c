"""The command line: what it prints, what it refuses, and what it must not load."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fastft import cli
from fastft.capability import DeviceFacts, SoftwareFacts, Verdict, assess, probe

ROOT = Path(cli.__file__).parents[1]
H200 = assess(
    DeviceFacts(
        "cuda", 0, "NVIDIA H200", arch=(9, 0), sm_count=132, warp_size=32, total_memory=141 << 30,
        shared_memory_per_block=227 << 10, l2_bytes=60 << 20,
    ),
    SoftwareFacts(torch_version="2.13.0", triton_version="3.9.0", packages_found=("flash_attn_4",)),
)  # fmt: skip


@pytest.fixture
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def only_h200(monkeypatch: pytest.MonkeyPatch, wide_terminal: None) -> None:
    monkeypatch.setattr(cli, "_capabilities", lambda device: [H200])


def test_info_prints_every_verdict_with_its_reason(only_h200: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for name, answer, reason in H200.summary():
        row = next(line for line in printed.splitlines() if reason in line)
        assert name.replace("_", " ") in row
        assert answer in row
    assert "cuda:0 NVIDIA H200 (sm90)" in printed
    assert "144,384 MiB memory, 60 MiB L2, 227 KiB shared memory a block, 132 SMs, warps of 32" in printed
    assert f"torch {metadata.version('torch')}" in printed
    assert "packages found: flash_attn_4" in printed


def test_info_prints_notices_and_reasons_literally(
    monkeypatch: pytest.MonkeyPatch, wide_terminal: None, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = dataclasses.replace(H200, notices=("failed [/bold]",), fp8=Verdict(False, "[red] is not markup"))
    monkeypatch.setattr(cli, "_capabilities", lambda device: [odd])
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "note: failed [/bold]" in printed
    assert "[red] is not markup" in printed


def test_info_json_says_the_same(only_h200: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (device,) = report["devices"]
    assert (device["device"], device["kind"], device["architecture"]) == ("cuda:0", "cuda", "sm90")
    assert device["total_memory_bytes"] == 141 << 30
    assert device["packages_found"] == ["flash_attn_4"]
    verdicts = {
        name: ("yes" if each["available"] else "no", each["reason"]) for name, each in device["verdicts"].items()
    }
    assert verdicts == {name: (answer, reason) for name, answer, reason in H200.summary()}
    assert report["versions"]["torch"] == metadata.version("torch")
    assert {"triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes"} <= report["versions"].keys()


def test_info_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    best = probe()
    assert {each["kind"] for each in devices} == {best.device.kind}
    assert devices[best.device.index]["notices"] == list(best.notices)


def test_info_lists_every_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    second = dataclasses.replace(H200, device=dataclasses.replace(H200.device, index=1))
    monkeypatch.setattr("fastft.capability.probe", lambda device=None: [H200, second][device or 0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cli.main(["info", "--json"]) == 0
    assert [each["device"] for each in json.loads(capsys.readouterr().out)["devices"]] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("device", ["cuda:99", "cpu:1", "gpu"])
def test_device_that_does_not_exist_is_told_on_stderr(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--device", device]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fastft: ")
    assert device in printed.err


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["info", "--nonsense"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: fastft" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("info", "demo", "bench"))


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_demo_gets_its_arguments_untouched(monkeypatch: pytest.MonkeyPatch, returned: int | None, status: int) -> None:
    received = []

    def demo_main(arguments: list[str]) -> int | None:
        received.append(arguments)
        return returned

    module = types.ModuleType("fastft.demo.run")
    module.main = demo_main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastft.demo.run", module)
    assert cli.main(["demo", "--steps", "3", "--help", "--", "x"]) == status
    assert received == [["--steps", "3", "--help", "--", "x"]]


def test_arguments_of_the_process_are_the_default(
    monkeypatch: pytest.MonkeyPatch, only_h200: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fastft", "info", "--json"])
    assert cli.main() == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["name"] == "NVIDIA H200"


def test_info_loads_neither_transformers_nor_other_commands() -> None:
    code = """
import sys
from fastft.cli import main
status = main(["info", "--json"])
others = ("transformers", "fastft.demo", "fastft.bench")
print(status, [name for name in sys.modules if name.startswith(others)], file=sys.stderr)
"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "0 []"
    assert json.loads(done.stdout)["devices"][0]["kind"] == "cpu"
