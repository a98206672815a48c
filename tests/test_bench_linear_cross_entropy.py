"""The benchmark of the head: its ways agree on a CPU, wrong ones are found out; tables are made of made-up numbers."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import linear_cross_entropy as bench  # noqa: E402
from benchmarks import linear_cross_entropy_results as results  # noqa: E402
from benchmarks.compare import read_lines  # noqa: E402

HIDDEN, VOCAB, TOKENS = 16, 50, 9
SIZES = ["--hidden", str(HIDDEN), "--vocab", str(VOCAB), "--warmup", "2", "--repeats", "2"]
TINY = [*SIZES, "--tokens", str(TOKENS)]


def measured(out: Path, *arguments: str) -> tuple[int, dict[str, dict]]:
    status = bench.main(["--out", str(out), *TINY, "--dtype", "fp32", *arguments])
    return status, {line["way"]: line for line in read_lines(out)}


def case_of(*arguments: str) -> tuple[bench.Setup, bench.Case]:
    setup = bench.build(bench.parse_arguments(["--out", "unused", *TINY, "--dtype", "fp32", *arguments]))
    return setup, bench.make_case(setup, TOKENS)


@pytest.mark.parametrize("head", ["frozen", "trained"])
@pytest.mark.parametrize("options", [(), ("--ignored", "0.6", "--softcap", "5")], ids=["plain", "ignored and capped"])
def test_every_way_is_measured_or_says_why_not(head: str, options: tuple[str, ...], tmp_path: Path, capsys) -> None:
    status, lines = measured(tmp_path / "lines.jsonl", "--head", head, *options)
    assert status == 0 and list(lines) == ["floor", *bench.WAYS]
    for name in ("liger", "cut"):
        assert "not installed" in lines[name]["unavailable"] or "GPU" in lines[name]["unavailable"]
    floor = lines["floor"]
    steps = ["logits", "read and write", "dX", *(["dW"] if head == "trained" else [])]
    assert list(floor["parts_ms"]) == steps and floor["tflops"] > 0 and floor["gb_per_s"] > 0
    for way in ("fastft", "fastft-none", "eager", "trl"):
        line = lines[way]
        assert len(line["both"]["ms"]) == 2 and line["peak_bytes"] is None
        assert line["share_of_floor"] == floor["both"]["median_ms"] / line["both"]["median_ms"]
        assert line["loss"] == pytest.approx(line["exact_loss"], rel=1e-6)
        assert list(line["errors"]) == (["hidden", "weight"] if head == "trained" else ["hidden"])
        assert all(0 < kinds["rms"] <= kinds["worst_row"] < 1e-5 for kinds in line["errors"].values())
        assert line["num_valid"] == (4 if options else TOKENS) and line["arguments"]["head"] == head
        assert line["hardware"]["gpu"] is None and line["versions"]["torch"] == torch.__version__
        assert "cut-cross-entropy" in line["versions"]
    assert lines["fastft"]["implementation"] == "chunked"  # of a CPU
    written = capsys.readouterr()
    assert written.out == "" and "| 9 | fastft, a gradient a token |" in written.err


def test_the_script_runs_by_itself(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "lines.jsonl"
    script = ROOT / "benchmarks" / "linear_cross_entropy.py"
    asked = ["--tokens", "8", "16", "--ways", "floor", "fastft", "eager", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [str(script), *SIZES, *asked])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])  # as Python begins with for a script
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0 and sys.path[0] == str(ROOT)
    found = [(line["tokens"], line["way"]) for line in read_lines(out) if "both" in line]
    assert found == [(tokens, way) for tokens in (8, 16) for way in ("floor", "fastft", "eager")]
    written = capsys.readouterr()
    assert written.out == "" and "16 x 50, bf16, frozen head, 0% of the targets ignored" in written.err


def test_a_way_named_has_to_be_there_and_no_floor_leaves_no_share(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    status, lines = measured(tmp_path / "lines.jsonl", "--ways", "cut", "trl", "eager")
    assert status == 1 and lines["cut"]["unavailable"] == "cut-cross-entropy is not installed"
    assert "trl.kernels.chunked_logprob is not installed" in lines["trl"]["unavailable"]
    assert lines["eager"]["share_of_floor"] is None and lines["eager"]["both"]["median_ms"] > 0


def test_eager_is_skipped_where_it_would_not_fit(tmp_path: Path, monkeypatch, capsys) -> None:
    needed = bench.EAGER_BYTES * TOKENS * VOCAB
    monkeypatch.setattr(bench, "free_bytes", lambda device: needed)
    assert measured(tmp_path / "fits.jsonl", "--ways", "eager")[0] == 0
    status, lines = measured(tmp_path / "capped.jsonl", "--ways", "eager", "--softcap", "5")
    assert status == 1 and lines["eager"]["unavailable"].startswith("skipped: would take about 0.0 GB")
    assert "not here: skipped" in capsys.readouterr().err


@pytest.mark.parametrize(("softcap", "told"), [("0", None), ("5", 5.0)])
def test_other_libraries_get_the_same_work(softcap: str, told: float | None, tmp_path: Path, monkeypatch) -> None:
    seen = []

    def stand_in(hidden, weight, targets, *, ignore_index: int, reduction: str, softcap: float | None):
        seen.append((ignore_index, reduction, softcap))
        logits = hidden @ weight.T
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)

    library = SimpleNamespace(liger_fused_linear_cross_entropy=stand_in, linear_cross_entropy=stand_in)
    monkeypatch.setattr(bench, "peer", lambda *arguments, gpu_only: library)
    options = ("--ignored", "0.3", "--softcap", softcap, "--head", "trained")
    status, lines = measured(tmp_path / "lines.jsonl", "--ways", "liger", "cut", *options)
    assert status == 0 and all("both" in line for line in lines.values())
    assert set(seen) == {(bench.IGNORED, "sum", told)}


def of_fastft_with(change):
    """fastft's loss, with a change of its value or its gradient."""
    return lambda case: lambda: change(bench.of_fastft(case)(), case)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda loss, case: loss * 1.01, "loss "),
        (lambda loss, case: loss * float("nan"), "loss nan"),
        (lambda loss, case: loss.detach() + 1.02 * (loss - loss.detach()), "gradient of hidden (rms) by 2.0e-02"),
        (lambda loss, case: loss + 0.1 * (case.hidden - case.hidden.detach())[3].sum(), "hidden (worst row)"),
        (lambda loss, case: loss + (case.weight - case.weight.detach())[case.compared[5]].sum(), "weight (worst row)"),
    ],
)
def test_a_wrong_way_fails_and_is_not_timed(change, named: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(bench.WAYS, "fastft", of_fastft_with(change))
    status, lines = measured(tmp_path / "lines.jsonl", "--head", "trained", "--ways", "fastft", "eager")
    failure = lines["fastft"]["failure"]
    assert status == 1 and failure.startswith("wrong: ") and named in failure, failure
    assert "both" not in lines["fastft"] and "both" in lines["eager"]  # which is measured all the same


def test_errors_are_lines_and_the_others_are_measured(monkeypatch, tmp_path: Path) -> None:
    def no_memory(*arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setitem(bench.WAYS, "fastft", lambda case: no_memory)
    monkeypatch.setattr(bench, "floor_steps", no_memory)
    status, lines = measured(tmp_path / "lines.jsonl", "--ways", "eager", "fastft", "floor")
    assert status == 1 and list(lines) == ["floor", "eager", "fastft"]  # the floor first, wherever it was named
    assert lines["floor"]["failure"] == lines["fastft"]["failure"] == "out of memory"
    assert lines["eager"]["share_of_floor"] is None and "both" in lines["eager"]
    monkeypatch.setattr(bench, "exact", no_memory)
    status, lines = measured(tmp_path / "nothing.jsonl", "--ways", "eager")
    assert status == 1 and lines["eager"]["failure"] == "nothing to compare with: out of memory"


def test_the_exact_gradients_are_those_of_all_logits_at_once(monkeypatch) -> None:
    monkeypatch.setattr(bench, "ORACLE_LOGITS", 2 * VOCAB)  # five pieces
    _, case = case_of("--head", "trained", "--ignored", "0.3", "--softcap", "4")
    loss, found = bench.exact(case)
    hidden, weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.weight))
    logits = 4 * torch.tanh(hidden @ weight.T / 4)
    expected = F.cross_entropy(logits, case.targets)  # -100 is what it ignores by default
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(found["hidden"], hidden.grad)
    torch.testing.assert_close(found["weight"], weight.grad[case.compared])


def test_as_many_targets_are_ignored_as_asked_for() -> None:
    for share, valid in (("0", TOKENS), ("0.6", 4), ("0.99", 1)):
        _, case = case_of("--ignored", share)
        targets = case.targets[case.targets != bench.IGNORED]
        assert len(targets) == case.num_valid == case.num_items.item() == valid
        assert case.known()["num_valid"] == (None if share == "0" else valid)
        assert set(targets.tolist()) <= set(case.compared.tolist()) and case.compared.max() < VOCAB


@pytest.mark.parametrize("head", ["frozen", "trained"])
def test_the_floor_is_the_products_of_tokens_with_a_target(head: str) -> None:
    _, case = case_of("--head", head, "--ignored", "0.6")
    steps = bench.floor_steps(case)
    outputs = {name: step() for name, step in steps.items()}
    hidden, weight = case.hidden.detach()[:4], case.weight.detach()
    logits = -hidden @ weight.T  # read and written once
    torch.testing.assert_close(outputs["logits"], logits)
    assert outputs["read and write"].shape == (4, 64)
    torch.testing.assert_close(outputs["dX"], logits @ weight)
    assert ("dW" in outputs) == (head == "trained")
    if head == "trained":
        torch.testing.assert_close(outputs["dW"], logits.T @ hidden)


def test_options_that_make_no_sense_are_refused(tmp_path: Path, capsys) -> None:
    out = ["--out", str(tmp_path / "lines.jsonl")]
    for arguments, reason in (
        ([*out, "--repeats", "1"], "at least 1"), ([*out, "--tokens", "0"], "at least 1"),
        ([*out, "--ignored", "1"], "less than 1"), ([*out, "--softcap", "-1"], "not negative"),
        ([*out, "--ways", "other"], "invalid choice"), ([*out, "--", "x"], "no train_step.py"), ([], "either --out"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            bench.parse_arguments(arguments)
        assert reason in capsys.readouterr().err


def line(way: str, ms: float | None, tokens: int = 1024, **fields) -> dict:
    facts = {
        "way": way, "tokens": tokens, "num_valid": tokens, "exact_loss": 16.5,
        "hardware": {"gpu": "NVIDIA H200", "cpu": "x86_64"},
        "versions": {"torch": "2.11.0", "cut-cross-entropy": "25.1.1", "commit": "abc1234"},
        "arguments": {
            "hidden": 4096, "vocab": 151936, "dtype": "bf16", "head": "trained", "ignored": 0.6, "softcap": 30.0,
        },
    }  # fmt: skip
    if ms is None:
        return {**facts, **fields}
    both = {"ms": [ms] * 3, "median_ms": ms, "lower_ms": 0.95 * ms, "upper_ms": 1.05 * ms, "host_ms": ms / 4}
    if way == "floor":
        parts = {"logits": 3.0, "read and write": 0.5, "dX": 2.5, "dW": 2.0}
        return {**facts, "both": both, "parts_ms": parts, "tflops": 650.0, "gb_per_s": 4000.0}
    return {
        **facts, "both": both, "share_of_floor": 8 / ms, "peak_bytes": 3 * 2**30, "loss": 16.51234,
        "errors": {"hidden": {"rms": 0.004, "worst_row": 0.02}, "weight": {"rms": 0.003, "worst_row": 0.01}}, **fields,
    }  # fmt: skip


LINES = [
    line("floor", 8.0),
    line("fastft", 10.0),
    line("cut", None, unavailable="cut-cross-entropy is not installed"),
    line("eager", 40.0, share_of_floor=None, peak_bytes=None, errors={"hidden": {"rms": 0.004, "worst_row": 0.02}}),
    line("fastft", 20.0, tokens=4096),
    line("liger", None, tokens=4096, failure="out of memory"),
]


def test_the_table_has_the_floor_the_share_and_the_reasons() -> None:
    _, floor, ours, cut, eager, _, liger = results.rows_of(LINES)
    assert floor[:5] == ["1,024", "products and one pass alone", "8.00 ms", "7.60 ms to 8.40 ms", "2.00 ms"]
    assert ours[1:] == ["fastft", "10.00 ms", "9.50 ms to 10.50 ms", "2.50 ms", "80%", "3.00 GiB", "16.51234",
                        "4.0e-03, 2.0e-02", "3.0e-03, 1.0e-02"]  # fmt: skip
    assert eager[5:] == ["", "not measured", "16.51234", "4.0e-03, 2.0e-02", ""]
    assert cut[2] == "not here: cut-cross-entropy is not installed" and liger[2] == "out of memory"
    assert {len(row) for row in results.rows_of(LINES)} == {10}
    parts, spread, what, where = results.table(LINES).splitlines()[-4:]
    assert parts.startswith("floor of 1,024 tokens, each step alone: logits 3.00 ms + read and write 0.500 ms + dX")
    assert parts.endswith("products at 650 TFLOP/s, the pass at 4000 GB/s")
    assert spread == "quartiles of one way: at most 10.5% apart"
    assert what.startswith("4,096 x 151,936, bf16, trained head, 60% of the targets ignored, softcap 30; errors are")
    assert where == "NVIDIA H200; torch 2.11.0; commit abc1234; 3 steps a round; cut-cross-entropy 25.1.1"
    assert "out of memory" in results.table(LINES[-1:])  # nothing measured, so no conditions


def test_stored_lines_are_printed_and_drawn(tmp_path: Path, capsys, monkeypatch) -> None:
    stored, drawn = tmp_path / "lines.jsonl", tmp_path / "plot.png"
    stored.write_text("".join(json.dumps(each) + "\n" for each in LINES), encoding="utf-8")
    assert bench.main(["--table", str(stored), "--plot", str(drawn)]) == 0
    assert "| 80% |" in capsys.readouterr().out
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    results.plot(LINES[2:3], tmp_path / "of_nothing_measured.png")
    monkeypatch.setattr(results.importlib.util, "find_spec", lambda name: None)
    results.plot(LINES, tmp_path / "absent.png")
    assert "matplotlib is not installed" in capsys.readouterr().err and not (tmp_path / "absent.png").exists()
