"""The benchmark of activation memory: its ways agree on the CPU, its tables are made of made-up numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import checkpointing, checkpointing_results  # noqa: E402
from benchmarks.checkpointing_ways import WAYS, YARDSTICK, Unavailable, Way, build, prepare  # noqa: E402
from benchmarks.compare import read_lines  # noqa: E402

LAYERS = 2  # of the tiny preset
TINY = ["--model", "tiny", "--tokens", "50", "--documents", "3", "--head-rows", "16", "--steps", "2", "--warmup", "1"]
CHEAP = ["none", "stock checkpointing", "stock offload", YARDSTICK, "fastft offload", "planner, half way"]
STEPS = 2 + 1 + 1  # the last one is looked at


def measured(out: Path, *arguments: str) -> tuple[int, dict[tuple[str, int], dict]]:
    status = checkpointing.main(["--out", str(out), *TINY, *arguments])
    return status, {(line["way"], line["round"]): line for line in read_lines(out)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[tuple[str, int], dict]]:
    return measured(tmp_path_factory.mktemp("run") / "lines.jsonl", "--ways", *CHEAP)


# ---------------------------------------------------------------------------------------------------- on the CPU


def test_every_way_is_measured_or_says_why_not(run) -> None:
    status, lines = run
    order = [YARDSTICK, "stock checkpointing", "none", "stock offload", "fastft offload", "planner, half way"]
    assert list(lines) == [*((name, 1) for name in order), (YARDSTICK, 2)]
    failures = {name: line["failure"] for (name, _), line in lines.items() if "failure" in line}
    assert status == 1 and failures == {
        "stock offload": "offloading needs a GPU",
        "planner, half way": "the peak of stock checkpointing or none was not measured; give --budget-gb",
    }
    for line in lines.values():
        assert line["versions"]["torch"] == torch.__version__ and line["arguments"]["tokens"] == 50
        if "failure" not in line:
            assert len(line["step_ms"]) == 2 and line["step_ms_min"] > 0 and line["peak_memory_gb"] is None


def test_all_ways_find_the_same_loss_and_gradients(run) -> None:
    found = {(line["loss"], line["gradient_sum"]) for line in run[1].values() if "failure" not in line}
    ((loss, total),) = found
    assert 6 < loss < 8 and total > 0  # ln 1024 = 6.9


def test_fastft_computes_every_way_and_layers_run_twice_where_they_are_checkpointed(run) -> None:
    for (name, _), line in run[1].items():
        if "failure" in line:
            continue
        counters = line["stack_report"]["counters"]
        passes = 1 if name == "none" else 2
        assert counters["batches: packed, positions restart"] == STEPS
        assert sum(n for key, n in counters.items() if key.startswith("attention: ")) == passes * STEPS * LAYERS, name


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.option == "auto"])
def test_the_planner_takes_a_budget(name: str, tmp_path: Path) -> None:
    status, lines = measured(tmp_path / "lines.jsonl", "--ways", name, "--budget-gb", "0.5")
    assert list(lines) == [(name, 1)] and lines[name, 1].get("failure") is None and status == 0
    assert lines[name, 1]["budget"] == ("auto" if WAYS[name].budget == "auto" else 500_000_000)


def test_all_weights_are_trained_and_an_optimizer_changes_none(tmp_path: Path) -> None:
    arguments = ("--ways", "none", "stock checkpointing", "--method", "full", "--optimizer")
    status, lines = measured(tmp_path / "lines.jsonl", *arguments)
    assert status == 0 and lines["none", 1]["gradient_sum"] == lines["stock checkpointing", 1]["gradient_sum"]


def test_no_hooks_are_left_by_switching_checkpointing_again_and_again() -> None:
    args = checkpointing.parse_arguments(["--out", "unused", *TINY])
    setup = build(args)
    for name in ("stock checkpointing", "none", "stock checkpointing", YARDSTICK):
        prepare(setup, WAYS[name], None)
        assert len(setup.causal.get_input_embeddings()._forward_hooks) == (name != "none")


def test_stock_offload_is_the_one_of_transformers(monkeypatch) -> None:
    """What a GPU would run, whatever transformers calls its methods; only the pinned memory is missing here."""
    setup = build(checkpointing.parse_arguments(["--out", "unused", *TINY]))
    told: list[dict] = []

    def save_on_cpu(**options) -> contextlib.AbstractContextManager[None]:
        told.append(options)
        return contextlib.nullcontext()

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", save_on_cpu)
    context = prepare(dataclasses.replace(setup, device=torch.device("cuda")), WAYS["stock offload"], None)
    checkpointing.run_step(setup, checkpointing.make_batch(setup, 50), context)
    assert len(told) == LAYERS and all(options["pin_memory"] for options in told)


def test_bandwidth_is_measured_only_for_ways_that_copy(tmp_path: Path, monkeypatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(checkpointing, "pinned_bandwidth", asked.append)
    measured(tmp_path / "without.jsonl", "--ways", "none", YARDSTICK)
    assert asked == []
    measured(tmp_path / "with.jsonl", "--ways", "fastft offload")
    assert len(asked) == 1


def test_options_that_make_no_sense_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in (
        (["--steps", "0"], "at least 1"),
        (["--", "--stack", "fastft"], "no train_step.py"),
    ):
        with pytest.raises(SystemExit):
            checkpointing.parse_arguments(["--out", str(tmp_path / "new"), *arguments])
        assert reason in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- parts of a step


def test_the_row_has_documents_and_nothing_follows_their_ends() -> None:
    setup = SimpleNamespace(
        args=SimpleNamespace(seed=0, documents=3),
        causal=SimpleNamespace(config=SimpleNamespace(vocab_size=100)),
        device=torch.device("cpu"),
    )
    batch = checkpointing.make_batch(setup, 11)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]]
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert [place for place in range(11) if labels[place] == checkpointing.IGNORED] == [3, 7, 10]
    assert all(labels[place] == ids[place + 1] for place in range(10) if place not in (3, 7))


@pytest.mark.parametrize("rows", [1, 4, 13, 64])
def test_the_loss_in_pieces_is_the_loss(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((1, 13, 8), (31, 8)))
    labels = torch.randint(31, (1, 13), generator=generator)
    labels[0, [4, 12]] = checkpointing.IGNORED
    found, expected = [], []
    for into, loss in (
        (found, lambda h, w: checkpointing.head_loss(h, w, labels, rows)),
        (expected, lambda h, w: F.cross_entropy(F.linear(h[0], w).float(), labels[0])),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value = loss(h, w)
        value.backward()
        into += [value.detach(), h.grad, w.grad]
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)  # the logits are float32


def test_running_out_of_memory_is_a_result_and_frees_what_the_step_held(monkeypatch) -> None:
    held: list[weakref.ref] = []
    alive: list[torch.Tensor | None] = []

    def step() -> dict:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    def broken() -> dict:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(checkpointing, "release", lambda setup: alive.append(held[0]()))
    assert checkpointing.attempt(None, step) == {"failure": "out of memory"}
    assert alive == [None]  # nothing of the step was left when memory was released
    with pytest.raises(RuntimeError, match="shapes differ"):
        checkpointing.attempt(None, broken)


def test_a_budget_needs_the_peaks_it_is_made_of() -> None:
    half = WAYS["planner, half way"]
    assert checkpointing.budget_of(half, {"stock checkpointing": 2.0, "none": 5.0}, None) == 3_500_000_000
    assert checkpointing.budget_of(half, {}, 1.5) == 1_500_000_000
    assert checkpointing.budget_of(Way("auto", budget="auto"), {}, None) == "auto"
    assert checkpointing.budget_of(WAYS["none"], {}, 1.5) is None
    with pytest.raises(Unavailable, match="stock checkpointing or none was not measured"):
        checkpointing.budget_of(half, {"stock checkpointing": 2.0, "none": None}, None)
    order = checkpointing.order_of(["planner, half way", "none"], has_budget=False)
    assert order == [("stock checkpointing", 1), ("none", 1), ("planner, half way", 1)]
    assert checkpointing.order_of(["planner, half way"], has_budget=True) == [("planner, half way", 1)]


# ---------------------------------------------------------------------------------------------------------- results


def line(way: str, step: float | None, peak: float | None = 10.0, number: int = 1, **fields) -> dict:
    arguments = {"model": "Qwen3-8B", "layers": 8, "method": "lora", "tokens": 16384, "documents": 4}
    facts = {
        "hardware": {"gpu": "NVIDIA H200", "cpu": "x86_64"}, "versions": {"torch": "2.11.0", "commit": "abc1234"},
        "way": way, "round": number, "arguments": arguments,
    }  # fmt: skip
    if step is None:
        return {**facts, "failure": "out of memory"}
    return {
        **facts, "step_ms": [step] * 3, "step_ms_median": step, "forward_ms_median": 30.0, "backward_ms_median": 70.0,
        "peak_memory_gb": peak, "memory_after_forward_gb": 1.5, "resident_growth_gb": 0.25, "pinned_gb": 1.0,
        "offloaded_bytes": 0, "bandwidth_gb_s": {"to_host": 50.0, "to_device": 25.0}, "budget": None,
        "loss": 7.5, "gradient_sum": 1000.0, **fields,
    }  # fmt: skip


LINES = [
    line(YARDSTICK, 100.0), line("stock checkpointing", 110.0, 10.5), line("none", None),
    line("fastft offload", 103.0, 9.0, offloaded_bytes=10**9), line("planner, half way", 90.0, 14.0, budget=14 * 10**9),
    line(YARDSTICK, 101.0, number=2, gradient_sum=1000.1),
]  # fmt: skip


def test_the_table_compares_and_says_how_much_of_the_copies_is_hidden() -> None:
    rows = {row[0]: row[1:] for row in checkpointing_results.step_rows(LINES)}
    assert rows[YARDSTICK][-2:] == ["the yardstick", "1.10x"]
    assert rows["none"][0] == "out of memory" and rows["stock checkpointing"][-1] == "1.00x"
    # 20 ms there, 40 ms back, and the step is 3 ms longer.
    assert rows["fastft offload"][-3:] == ["95%", "equal", "1.07x"] and rows["fastft offload"][5] == "1.00 GB"
    assert rows["planner, half way: 14.00 GB"][3] == "14.00 GB"
    assert rows[f"{YARDSTICK}, again"][-2] == "differ by 0.0e+00, 1.0e-04"
    *_, rounds, what, where = checkpointing_results.table(LINES).splitlines()
    assert rounds == f"{YARDSTICK}, first and last: 100.0 ms and 101.0 ms, 1.0% apart"
    assert what == "Qwen3-8B, 8 layers, lora, a row of 16,384 tokens in 4 document(s)"
    assert where == "NVIDIA H200; torch 2.11.0; commit abc1234; 3 steps a round"
    assert "out of memory" in checkpointing_results.table(LINES[2:3])  # nothing measured, so no conditions


def test_a_plot_is_drawn_also_where_nothing_has_a_peak(tmp_path: Path) -> None:
    for name, lines in (("all", LINES), ("cpu", [line(YARDSTICK, 100.0, None)])):
        checkpointing_results.plot(lines, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
