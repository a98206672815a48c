"""`fastft bench memory`: what is counted, the samples of a step, the table, the plot, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from fastft import cli
from fastft.bench import memory, subject, timeline
from fastft.bench.memory import Recorder, Sample, Timeline, Way, measure
from fastft.bench.meters import Held, StorageMeter
from fastft.bench.table import notes_of, rows_of
from fastft.errors import FastftError, UnsupportedModelError, UnsupportedOptionError

LAYERS, TOKENS, HIDDEN = 3, 64, 32
CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 128, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
}  # fmt: skip
WAYS = [Way("off"), Way("recompute"), Way("offload")]


@pytest.fixture(scope="module")
def measured() -> dict[str, Timeline]:
    model = subject.build_model(LlamaConfig(**SHAPE), "lora", CPU)
    return dict(zip(("off", "recompute", "offload"), measure(model, WAYS, TOKENS, CPU), strict=True))


# ------------------------------------------------------------------------------------------------------- the meter


def test_a_freed_tensor_is_counted_as_freed() -> None:
    existing = torch.zeros(10)
    with StorageMeter([existing]) as meter:
        assert meter.read() == Held(40, 40)
        made = torch.ones(100)
        view = made.view(10, 10)[1:]
        assert meter.read() == Held(440, 440)  # a view holds nothing of its own
        del made
        assert meter.read().now == 440
        del view
        assert meter.read() == Held(40, 440)
        assert meter.read() == Held(40, 40)  # the peak is of the time since the last reading
        del existing
        assert meter.read().now == 0


def test_what_autograd_saves_is_held_until_backward() -> None:
    weight = torch.ones(100, requires_grad=True)
    with StorageMeter([weight]) as meter:
        doubled = weight * 2
        total = (doubled * doubled).sum()
        del doubled
        assert meter.read().now == 800 + 4
        total.backward()
        assert meter.read().now == 800 + 4  # the gradient in the place of what was saved
        weight.grad = None
        assert meter.read().now == 400 + 4


def test_a_view_of_memory_from_before_is_not_new() -> None:
    before = torch.zeros(100)
    with StorageMeter() as meter:
        views = [before[1:], before.view(10, 10), before.add_(1)]
        assert meter.read() == Held(0, 0) and len(views) == 3
    alive = torch.ones(3)
    assert meter.read().now == 0 and alive.numel() == 3  # nothing is counted outside


# ----------------------------------------------------------------------------------------------------- the samples


def points_of_a_step() -> list[tuple[str, int | None]]:
    forward = [(point, layer) for layer in range(LAYERS) for point in ("forward begins", "forward ends")]
    backward = [(point, layer) for layer in reversed(range(LAYERS)) for point in ("backward begins", "backward ends")]
    return [("start", None), *forward, ("loss", None), *backward, ("end", None)]


@pytest.mark.parametrize("way", ["off", "recompute", "offload"])
def test_samples_come_in_the_order_of_the_step(way: str, measured: dict[str, Timeline]) -> None:
    """Also where a layer's forward runs again in backward."""
    samples = measured[way].samples
    assert [(sample.point, sample.layer) for sample in samples] == points_of_a_step()
    times = [sample.milliseconds for sample in samples]
    assert times == sorted(times) and times[0] == 0
    assert all(sample.peak >= sample.held > 0 for sample in samples)


def test_recomputing_holds_less_after_the_forward_and_the_same_at_the_ends(measured: dict[str, Timeline]) -> None:
    off, recompute = measured["off"], measured["recompute"]
    kept = [each.find("loss").held - each.find("start").held for each in (off, recompute)]
    assert kept[1] < kept[0] / 2
    assert off.loss == recompute.loss and off.peak > recompute.peak
    for point in ("start", "end"):
        assert off.find(point).held == recompute.find(point).held


def test_a_checkpointed_layer_leaves_hardly_more_than_its_input(measured: dict[str, Timeline]) -> None:
    ends = [measured["recompute"].find("forward ends", layer).held for layer in range(LAYERS)]
    (grown,) = {later - earlier for earlier, later in itertools.pairwise(ends)}
    assert 0 <= grown - TOKENS * HIDDEN * 4 < 3 * torch.get_rng_state().numel()  # torch keeps that, too
    inside = measured["recompute"].find("backward ends", 0)
    assert inside.peak > inside.held + 5 * TOKENS * HIDDEN * 4  # what the layer recomputed


def test_full_training_ends_with_gradients_of_all_weights() -> None:
    model = subject.build_model(LlamaConfig(**SHAPE), "full", CPU)
    (found,) = measure(model, [Way("recompute")], TOKENS, CPU)
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    grown = found.find("end").held - found.find("start").held
    assert weights <= grown < 1.01 * weights
    assert [(sample.point, sample.layer) for sample in found.samples] == points_of_a_step()


def test_the_model_is_left_without_hooks_and_unpatched() -> None:
    model = subject.build_model(LlamaConfig(**SHAPE), "full", CPU)
    measure(model, [Way("off"), Way("recompute")], TOKENS, CPU)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in subject.decoder_layers(model))
    assert not any("_fastft" in name for module in model.modules() for name in module.__dict__)


def test_running_out_of_memory_keeps_the_samples_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    model = subject.build_model(LlamaConfig(**SHAPE), "lora", CPU)
    take = Recorder.take

    def scarce(self: Recorder, point: memory.Point, layer: int | None = None) -> None:
        take(self, point, layer)
        if point == "backward begins":
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Recorder, "take", scarce)
    found = measure(model, [Way("off"), Way("recompute")], TOKENS, CPU)
    assert [each.failure for each in found] == ["out of memory"] * 2
    assert [each.samples[-1].point for each in found] == ["backward begins"] * 2
    assert timeline.spans(found[0])[-1][0] == "backward"
    assert next(row for row in rows_of(found) if row[0] == "time of the step")[1:] == ["out of memory"] * 2
    assert notes_of(found)[0] == "no checkpointing: out of memory; the samples end there"


def test_a_budget_is_told_to_fastft_and_reasons_are_noted() -> None:
    model = subject.build_model(LlamaConfig(**SHAPE), "lora", CPU)
    (found,) = measure(model, [Way("auto", 20_000_000)], TOKENS, CPU)
    assert found.way == 'checkpointing="auto", budget 0.02 GB'
    assert "not planned: cpu: memory is planned on CUDA devices only (3 x)" in found.notes
    assert [(sample.point, sample.layer) for sample in found.samples] == points_of_a_step()


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_is_asked_and_layer_inputs_leave() -> None:
    device = torch.device("cuda", 0)
    model = subject.build_model(subject.build_config("tiny", LAYERS), "lora", device)
    off, recompute, offload = measure(model, WAYS, 16384, device)
    for each in (off, recompute, offload):
        assert [(sample.point, sample.layer) for sample in each.samples] == points_of_a_step()
        assert all(sample.peak >= sample.held > 0 and sample.milliseconds >= 0 for sample in each.samples)
    inputs = 16384 * 256 * 2
    assert offload.sent == (LAYERS - 2) * inputs  # the last stays, and so does the first, which autograd holds
    assert off.find("loss").held > recompute.find("loss").held >= offload.find("loss").held + (LAYERS - 2) * inputs


# ------------------------------------------------------------------------------------------------ table and plot


def made_up() -> Timeline:
    samples = [
        Sample("start", None, 0.0, 10_000_000, 10_000_000),
        Sample("forward begins", 0, 1.0, 11_000_000, 11_000_000),
        Sample("forward ends", 0, 3.0, 20_000_000, 21_000_000),
        Sample("loss", None, 4.0, 22_000_000, 22_000_000),
        Sample("backward begins", 0, 6.0, 21_000_000, 30_000_000),
        Sample("backward ends", 0, 9.0, 12_000_000, 22_000_000),
        Sample("end", None, 10.0, 12_000_000, 12_000_000),
    ]
    return Timeline('checkpointing="offload"', 1, samples, notes=["input kept: small (1 x)"], sent=3_000_000)


def test_the_table_has_the_moments_the_peak_and_the_reasons(measured: dict[str, Timeline]) -> None:
    assert rows_of([made_up()]) == [
        ["bytes held", 'checkpointing="offload"'],
        ["before the step", "10.0 MB"],
        ["forward, layer 1 done", "20.0 MB"],
        ["loss computed", "22.0 MB"],
        ["backward, layer 1 done", "12.0 MB"],
        ["after the step, with gradients", "12.0 MB"],
        ["peak", "30.0 MB"],
        ["  it lies in", "backward of head and loss"],
        ["sent to the host", "3.0 MB"],
        ["time of the step", "10.0 ms"],
    ]
    assert notes_of([made_up()]) == ['checkpointing="offload": input kept: small (1 x)']
    if not torch.cuda.is_available():
        assert "cpu: offloading runs on CUDA devices only" in " ".join(notes_of([measured["offload"]]))
    assert notes_of([measured["off"], measured["recompute"]]) == []


def test_a_table_of_many_layers_shows_the_first_the_last_and_some_between() -> None:
    rows = [row[0] for row in rows_of([Timeline("x", 36)])]
    assert [row for row in rows if row.startswith("forward")] == [f"forward, layer {n} done" for n in (1, 13, 24, 36)]
    assert [row for row in rows if row.startswith("back")] == [f"backward, layer {n} done" for n in (36, 24, 13, 1)]


def test_the_curve_goes_over_what_was_held_between_samples() -> None:
    times, values = timeline.curve(made_up())
    assert (5.0, 30_000_000.0) in zip(times, values, strict=True) and len(times) == 7 + 3
    assert timeline.peak_place(made_up()) == (5.0, 30_000_000.0)
    assert timeline.spans(made_up()) == [("forward", 0.0, 3.0), ("loss", 3.0, 4.0), ("backward", 4.0, 10.0)]


def test_a_plot_is_drawn_also_of_nothing(tmp_path: Path) -> None:
    for number, drawn in enumerate(([made_up(), made_up()], [Timeline("x", 1, failure="out of memory")])):
        timeline.save_plot(tmp_path / f"{number}.png", drawn, "what was trained", "bytes")
        assert (tmp_path / f"{number}.png").read_bytes()[:4] == b"\x89PNG"


# --------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_draws_and_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "head_dim": 16, **SHAPE}))
    plot, numbers = tmp_path / "memory.png", tmp_path / "memory.json"
    arguments = ["--model", str(tmp_path), "--layers", "2", "--tokens", "32", "--checkpointing", "off", "recompute"]
    assert cli.main(["bench", "memory", *arguments, "--out", str(plot), "--json", str(numbers)]) == 0
    printed = capsys.readouterr().out
    assert "qwen3, 2 layers" in printed and "a row of 32 tokens, CPU" in printed
    assert "Counted: bytes of all storages that torch ops return" in printed and "backward, layer 2 done" in printed
    assert plot.read_bytes()[:4] == b"\x89PNG"
    stored = json.loads(numbers.read_text())
    assert stored["tokens"] == 32 and stored["versions"]["torch"] == torch.__version__
    assert [way["option"] for way in stored["ways"]] == ["off", "recompute"]
    for way in stored["ways"]:
        assert len(way["samples"]) == 2 * 4 + 3 and way["peak"] == max(each["peak"] for each in way["samples"])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["memory", "--help"]])
def test_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if arguments:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["bench", *arguments])
        assert stopped.value.code == 0
    else:
        assert cli.main(["bench"]) == 2
    printed = capsys.readouterr()
    assert "memory" in (printed.out if arguments else printed.err)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tokens", "1"], "at least 2, not 1"),
        (["--layers", "0"], "at least 1, not 0"),
        (["--budget", "much"], 'above 0, or "auto", not much'),
        (["--budget", "-1"], 'above 0, or "auto", not -1'),
        (["--budget", "20", "--checkpointing", "offload"], "ask for that as well"),
        (["--checkpointing", "stock"], "invalid choice: 'stock'"),
        (["--out", "no/such/folder.png"], "does not exist"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "memory", *arguments])
    assert stopped.value.code == 2 and reason in capsys.readouterr().err


def test_models_that_cannot_be_measured_are_refused(tmp_path: Path) -> None:
    def config(**values: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return str(tmp_path)

    with pytest.raises(UnsupportedOptionError, match="names of the Hugging Face hub are not looked up"):
        subject.build_config("someone/model")
    with pytest.raises(UnsupportedModelError, match="quantised"):
        subject.build_config(config(model_type="llama", quantization_config={"bits": 4}))
    with pytest.raises(UnsupportedModelError, match="does not know"):
        subject.build_config(config(model_type="no such model"))
    with pytest.raises(UnsupportedOptionError, match="--layers 4: this model has 3"):
        subject.build_config(config(model_type="llama", **SHAPE), layers=4)
    with pytest.raises(UnsupportedModelError, match="no layers"):
        subject.decoder_layers(torch.nn.Linear(2, 2))
    (tmp_path / "config.json").write_text("no JSON")
    with pytest.raises(UnsupportedModelError, match="not JSON"):
        subject.build_config(str(tmp_path / "config.json"))


def test_types_of_layers_are_cut_with_the_layers(tmp_path: Path) -> None:
    values = {"model_type": "qwen3", **SHAPE, "layer_types": ["full_attention"] * LAYERS}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = subject.build_config(str(tmp_path / "config.json"), layers=2)
    assert isinstance(config, Qwen3Config) and config.num_hidden_layers == len(config.layer_types) == 2


def test_without_matplotlib_it_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FastftError, match="pip install matplotlib"):
        timeline.require_matplotlib()
    monkeypatch.setattr(timeline, "require_matplotlib", lambda: (_ for _ in ()).throw(FastftError("no matplotlib")))
    assert cli.main(["bench", "memory"]) == 1
    assert capsys.readouterr().err == "fastft: no matplotlib\n"
