"""The benchmark of experts: its ways agree on a CPU, wrong ones are found out; tables are made of made-up numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import grouped_mm
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import moe, moe_results  # noqa: E402
from benchmarks.compare import read_lines  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 8, 2, 32, 16, 37
FEW = ["--warmup", "2", "--repeats", "2", "--tokens", str(TOKENS)]
TOLERANCE = {"rms": 2e-6, "worst_row": 2e-5}  # of float32


def tiny(family: str = "qwen3_moe"):
    sizes = {
        "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts_per_tok": TOP_K,
    }  # fmt: skip
    if family == "gpt_oss":
        return GptOssConfig(num_local_experts=EXPERTS, **sizes)
    return Qwen3MoeConfig(num_experts=EXPERTS, moe_intermediate_size=INNER, **sizes)


def setup_of(*arguments: str, family: str = "qwen3_moe") -> moe.Setup:
    return moe.build(moe.parse_arguments(["--out", "unused", *FEW, *arguments]), tiny(family))


def measured(out: Path, *arguments: str, family: str = "qwen3_moe") -> tuple[int, dict[tuple[str, str], dict]]:
    status = moe.main(["--out", str(out), *FEW, *arguments], tiny(family))
    return status, {(line["kind"], line["way"]): line for line in read_lines(out)}


def register(monkeypatch: pytest.MonkeyPatch, forward) -> None:
    """A fastft whose patch selects `forward` for the experts, or nothing at all."""
    if forward is not None:
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "fastft", forward)

    def patch_model(model) -> None:
        if forward is not None:
            model.set_experts_implementation("fastft")

    skipped = [SimpleNamespace(op="experts", reason="no kernel for such experts"), SimpleNamespace(op="x", reason="y")]
    library = SimpleNamespace(
        patch_model=patch_model,
        unpatch_model=lambda model: None,
        report=lambda model: SimpleNamespace(skipped=skipped, counters={"experts: stand-in": 3}),
    )
    monkeypatch.setattr(moe, "library", lambda: library)


def stock(*arguments):
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](*arguments)


@pytest.mark.parametrize(
    ("family", "train"), [("qwen3_moe", "nothing"), ("qwen3_moe", "experts"), ("gpt_oss", "experts")]
)
def test_every_way_is_measured_or_says_why_not(family: str, train: str, tmp_path: Path, capsys) -> None:
    status, lines = measured(tmp_path / "lines.jsonl", "--train", train, "--routing", "--profile", family=family)
    assert status == 0 and [way for kind, way in lines if kind == "way"] == list(moe.WAYS)
    assert "liger-kernel" in lines["way", "liger"]["unavailable"] or "GPU" in lines["way", "liger"]["unavailable"]
    assert "interpreter" in lines["routing", "fastft, triton"]["unavailable"]
    ours = lines["way", "fastft"]
    assert "patch_model" in ours.get("unavailable", "") or ours["implementation"] == "fastft"
    gradients = {"output", "hidden", "topk_weights"}
    if train == "experts":
        gradients |= {name for name, _ in setup_of(family=family).experts.named_parameters()}
    for way in ("eager", "grouped_mm"):
        line = lines["way", way]
        assert line["implementation"] == way and line["errors"].keys() == gradients
        for part in ("forward", "backward", "both"):
            timing = line[part]
            assert len(timing["ms"]) == 2 and 0 < timing["lower_ms"] <= timing["median_ms"] <= timing["upper_ms"]
            assert line["share_of_floor"][part] == line["floor"][f"{part}_ms"] / timing["median_ms"]
        assert line["saved_bytes_per_token"] > 4 * HIDDEN and line["peak_bytes"] is None and line["profile"] is None
        assert line["versions"]["torch"] == torch.__version__ and line["arguments"]["train"] == train
        assert lines["routing", way]["order"]["median_ms"] > 0
        assert all(0 < kinds["rms"] < TOLERANCE["rms"] for kinds in line["errors"].values())  # the truth is float64
    assert "| 37 | eager |" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_a_way_runs_what_its_name_says(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of()
    case, calls, original = moe.make_case(setup, TOKENS), [], ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    counting = lambda *arguments: (calls.append(way), original(*arguments))[1]  # noqa: E731
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", counting)
    moe.forward_backward(setup, case, moe.turn_on(setup, way))
    assert len(calls) == (way == "grouped_mm")


def test_the_ways_agree_with_a_sum_over_each_tokens_experts() -> None:
    setup = setup_of("--train", "experts")
    case, experts = moe.make_case(setup, TOKENS), setup.experts

    def plain(hidden, indices, weights):
        def of(token: int, choice: int) -> torch.Tensor:
            expert = indices[token, choice]
            gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            return weights[token, choice] * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))

        return torch.stack([sum(of(token, choice) for choice in range(TOP_K)) for token in range(TOKENS)])

    expected = moe.results(setup, case, plain)
    known = moe.measure_errors(setup, case)
    assert known["yardstick"].keys() == {"output", "hidden", "topk_weights", "gate_up_proj", "down_proj"}
    found = moe_results.errors(expected, known["truth"])
    assert all(kinds[kind] < TOLERANCE[kind] for kinds in found.values() for kind in kinds), found
    for way in ("eager", "grouped_mm"):
        found = moe_results.errors(moe.results(setup, case, moe.turn_on(setup, way)), expected)
        assert all(kinds[kind] < TOLERANCE[kind] for kinds in found.values() for kind in kinds), (way, found)


def test_fastft_is_what_patch_model_selects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    register(monkeypatch, lambda *arguments: (calls.append(1), stock(*arguments))[1])
    status, lines = measured(tmp_path / "lines.jsonl", "--ways", "eager", "fastft")
    line = lines["way", "fastft"]
    assert status == 0 and line["implementation"] == "fastft" and "failure" not in line
    assert line["stack_report"]["counters"] == {"experts: stand-in": 3}
    assert lines["way", "eager"]["stack_report"] is None
    # Its results; forward, backward's graph and both, with their warm-ups; saved bytes.
    assert len(calls) == 1 + 4 + 1 + 4 + 1


def test_fastft_that_leaves_the_experts_alone_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, None)
    status, lines = measured(tmp_path / "lines.jsonl", "--ways", "fastft")
    reason = "patch_model left the experts to 'grouped_mm'; no kernel for such experts"
    assert lines["way", "fastft"]["unavailable"] == reason and "both" not in lines["way", "fastft"]
    assert status == 1  # it was asked for by name


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (lambda module, h, i, w: 1.001 * stock(module, h, i, w), "output (rms)"),
        (lambda module, h, i, w: stock(module, h, i, w.detach() + 0 * w), "topk_weights (rms)"),
        (lambda module, h, i, w: stock(module, h.detach() + 1.01 * (h - h.detach()), i, w), "hidden (rms)"),
        (lambda module, h, i, w: stock(module, h, i, w) * float("nan"), "output (rms) by nan"),
        (lambda module, h, i, w: stock(module, h, i.flip(1), w), "output (rms)"),
        (lambda module, h, i, w: stock(module, h, i, w) * (torch.arange(len(h)) > 0)[:, None], "output (worst row)"),
    ],
)
def test_a_wrong_way_fails_and_is_not_timed(forward, named: str, monkeypatch, tmp_path: Path) -> None:
    register(monkeypatch, forward)
    status, lines = measured(tmp_path / "lines.jsonl", "--ways", "fastft", "eager")
    line = lines["way", "fastft"]
    assert status == 1 and line["failure"].startswith("wrong: ") and named in line["failure"], line["failure"]
    assert "both" not in line and line["errors"].keys() == {"output", "hidden", "topk_weights"}
    assert "both" in lines["way", "eager"]  # which is measured all the same


def test_one_wrong_row_of_thousands_is_beyond_the_bound_of_bfloat16() -> None:
    truth = {"output": torch.randn(20_000, 64)}
    rounded = {"output": truth["output"].bfloat16()}
    yardstick = moe_results.errors(rounded, truth)
    assert moe_results.wrong(yardstick, yardstick, torch.bfloat16) == []
    rounded["output"][7_000] = 0
    (reason,) = moe_results.wrong(moe_results.errors(rounded, truth), yardstick, torch.bfloat16)
    assert reason.startswith("output (worst row) by ") and reason.endswith("allowed 2.5e-01")
    shapes = moe_results.errors({"output": torch.zeros(2, 3)}, {"output": torch.zeros(3, 2)})
    assert len(moe_results.wrong(shapes, yardstick, torch.bfloat16)) == 2


def test_an_error_may_be_twice_that_of_the_yardstick() -> None:
    def errors(rms: float) -> dict:
        return {"bias": {"rms": rms, "worst_row": 0.0}}

    assert moe_results.wrong(errors(0.09), errors(0.05), torch.bfloat16) == []
    assert moe_results.wrong(errors(0.11), errors(0.05), torch.bfloat16) == ["bias (rms) by 1.1e-01, allowed 1.0e-01"]
    assert moe_results.wrong(errors(float("nan")), errors(float("nan")), torch.bfloat16) != []


def test_errors_are_lines_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    def no_memory(*arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    def broken(*arguments):
        raise ValueError("no such stride\nand more")

    for forward, failure in ((no_memory, "out of memory"), (broken, "ValueError: no such stride")):
        register(monkeypatch, forward)
        status, lines = measured(tmp_path / f"{forward.__name__}.jsonl", "--ways", "fastft", "eager")
        assert status == 1 and lines["way", "fastft"]["failure"] == failure and "both" in lines["way", "eager"]
        assert ("Traceback" in capsys.readouterr().err) == (forward is broken)
    monkeypatch.setattr(moe, "YARDSTICK", "no such experts")  # nothing to compare with
    status, lines = measured(tmp_path / "yardstick.jsonl", "--ways", "eager")
    assert status == 1 and "nothing to compare with" in lines["way", "eager"]["failure"]


def test_saved_bytes_count_each_storage_once_and_no_parameter() -> None:
    setup = setup_of("--train", "experts")
    case, weight = moe.make_case(setup, TOKENS), setup.experts.down_proj[0]

    def experts(hidden, indices, weights):
        product = hidden @ weight[:, :].new_ones(HIDDEN, 4)  # saves the ones
        left, right = product.chunk(2, dim=1)
        return (left * right).sum(1, keepdim=True) * hidden + hidden @ weight @ weight.T

    # The ones; then of a token the product, which has two halves, the sum, the input and hidden @ weight.
    assert moe.saved_bytes(setup, case, experts) == 4 * (HIDDEN * 4 + TOKENS * (4 + 1 + HIDDEN + INNER))


def test_routing_is_that_of_a_router_and_can_be_skewed() -> None:
    even, skewed = (moe.make_case(setup_of("--skew", skew), 500) for skew in ("0", "3"))
    even_load, skewed_load = (moe_results.load_of(case.offsets) for case in (even, skewed))
    assert even_load["largest_over_mean"] < 1.3 and even_load["idle_experts"] == 0
    assert skewed_load["largest_over_mean"] > 2
    for case in (even, skewed):
        assert all(len(set(row)) == TOP_K for row in case.indices.tolist())
        torch.testing.assert_close(case.weights.sum(1), torch.ones(500))
        assert (case.weights.diff(dim=1) <= 0).all()  # the first choice weighs most
        ends = case.indices.flatten().sort().values
        assert all((ends[:end] <= expert).all() for expert, end in enumerate(case.offsets.tolist()))
        assert case.offsets[-1] == 500 * TOP_K


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("train", ["nothing", "experts"])
def test_the_floor_is_the_gemms_of_the_experts_and_nothing_else(family: str, train: str, monkeypatch) -> None:
    setup = setup_of("--train", train, family=family)
    case, shapes = moe.make_case(setup, TOKENS), set()

    def noted(x, weight, offs):
        found = grouped_mm(x, weight, offs=offs)
        shapes.add((tuple(x.shape), tuple(found.shape)))
        assert offs is case.offsets
        return found

    monkeypatch.setattr(moe.F, "grouped_mm", noted)
    floor = moe.measure_floor(setup, case)
    rows = TOKENS * TOP_K
    expected = {
        ((rows, HIDDEN), (rows, 2 * INNER)), ((rows, 2 * INNER), (rows, HIDDEN)),
        ((rows, INNER), (rows, HIDDEN)), ((rows, HIDDEN), (rows, INNER)),
    }  # fmt: skip
    if train == "experts":
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(setup.experts, name)
            expected.add(((weight.shape[1], rows), tuple(weight.shape)))
    assert shapes == expected
    medians = {name: timing["median_ms"] for name, timing in floor["parts"].items()}
    assert floor["both_ms"] == pytest.approx(sum(medians.values()))
    assert floor["forward_ms"] == pytest.approx(medians["up forward"] + medians["down forward"])
    flops = 2 * rows * HIDDEN * INNER * 3 * (2 if train == "nothing" else 3)
    assert floor["tflops"] == pytest.approx(flops / floor["both_ms"] / 1e9)


def test_all_orders_are_one_order() -> None:
    case = moe.make_case(setup_of("--skew", "2"), TOKENS)
    flat = case.indices.flatten()
    pairs, _, offsets = moe.ORDERS["fastft, reference"](case.indices, EXPERTS)
    order, inverse, ends = moe.ORDERS["grouped_mm"](case.indices, EXPERTS)
    assert torch.equal(offsets, case.offsets) and torch.equal(ends, case.offsets)
    assert torch.equal(flat[order], flat[pairs]) and torch.equal(order[inverse], torch.arange(len(flat)))
    per_expert = moe.ORDERS["eager"](case.indices, EXPERTS)
    expected = [part.tolist() for part in (pairs // TOP_K).tensor_split(offsets.long()[:-1])]
    assert [sorted(tokens.tolist()) for _, tokens in per_expert] == [part for part in expected if part]


def test_options_that_make_no_sense_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "lines.jsonl")]
    for arguments, reason in (
        ([*out, "--repeats", "1"], "at least 1"), ([*out, "--tokens", "0"], "at least 1"),
        ([*out, "--model", "Qwen3-8B"], "invalid choice"), ([*out, "--", "x"], "no train_step.py"),
        ([], "either --out"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            moe.parse_arguments(arguments)
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("_count_kernel", "routing"), ("_scan_kernel", "routing"), ("_place_kernel", "routing"),
        ("_gather_kernel", "gather"), ("_combine_kernel", "combine"), ("_outer_kernel", "grouped GEMM"),
        ("_gate_forward_kernel", "gate"), ("_gate_backward_kernel", "gate"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GroupProblemShape>>", "grouped GEMM"),
        ("void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>", "grouped GEMM"),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", "grouped GEMM"),
        ("_moe_bwd_dX_expanded_kernel", "grouped GEMM"), ("_moe_router_scatter_kernel", "routing"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*)", "other"),
        ("void at::native::tensor_kernel_scan_innermost_dim<int, std::plus<int>>", "other"),
    ],
)  # fmt: skip
def test_kernels_are_grouped_by_name(kernel: str, group: str) -> None:
    assert moe_results.group_of(kernel) == group


def test_times_of_kernels_are_of_one_call() -> None:
    events = [("nvjet_tst", 2.0), ("_gather_kernel", 0.5), ("nvjet_tst", 4.0), ("_gather_kernel", 0.5)]
    found = moe_results.group_kernels(events, calls=2)
    assert found["groups_ms"] == {
        "grouped GEMM": 3.0, "routing": 0.0, "gather": 0.5, "combine": 0.0, "gate": 0.0, "other": 0.0,
    }  # fmt: skip
    assert found["kernels"][0] == {"name": "nvjet_tst", "group": "grouped GEMM", "ms": 3.0, "count": 1.0}


def timing(ms: float) -> dict:
    return {"ms": [ms] * 3, "median_ms": ms, "lower_ms": 0.95 * ms, "upper_ms": 1.05 * ms, "host_ms": ms / 2}


def line(way: str, both: float | None, tokens: int = 1024, **fields) -> dict:
    facts = {
        "kind": "way", "way": way, "tokens": tokens, "experts": 128, "top_k": 8, "dtype": "bfloat16",
        "hardware": {"gpu": "NVIDIA H200", "cpu": "x86_64"}, "versions": {"torch": "2.11.0", "commit": "abc1234"},
        "arguments": {"model": "Qwen3-30B-A3B", "train": "nothing", "skew": 0.0},
        "load": {"largest_over_mean": 1.25, "idle_experts": 0},
        "floor": {"forward_ms": 1.0, "backward_ms": 1.0, "both_ms": 2.0, "tflops": 500.0},
    }  # fmt: skip
    if both is None:
        return {**facts, **fields}
    return {
        **facts, "forward": timing(both / 4), "backward": timing(both * 3 / 4), "both": timing(both),
        "share_of_floor": {"forward": 4 / both, "backward": 4 / both / 3, "both": 2 / both}, "peak_bytes": 3 * 10**9,
        "saved_bytes_per_token": 10 * 1024, "errors": {"output": {"rms": 0.004, "worst_row": 0.02}},
        "profile": None, **fields,
    }  # fmt: skip


GROUPS = {"grouped GEMM": 2.0, "routing": 0.1, "gather": 0.5, "combine": 0.2, "gate": 0.4, "other": 0.0}
LINES = [
    line("eager", 40.0),
    line("grouped_mm", 10.0),
    line("fastft", 4.0, profile={"groups_ms": GROUPS, "kernels": []}),
    line("liger", None, unavailable="liger-kernel is not installed"),
    line("fastft, triton", None, kind="routing", order=timing(0.05)),
    line("eager", None, kind="routing", failure="out of memory"),
    line("grouped_mm", 20.0, tokens=4096),
    line("fastft", None, tokens=4096, failure="wrong: output (rms) by 1.0e+00, allowed 1.6e-02"),
]


def cells(rows: list[list[str]], *start: str) -> list[str]:
    (row,) = [row for row in rows if row[: len(start)] == list(start)]
    assert len(row) == len(rows[0])
    return row[len(start) :]


def test_the_table_compares_with_the_floor_and_with_grouped_mm() -> None:
    rows = moe_results.way_rows([line for line in LINES if line["kind"] == "way"])
    assert cells(rows, "1,024", "floor (500 TFLOP/s)")[:4] == ["1.00 ms", "1.00 ms", "2.00 ms", ""]
    assert cells(rows, "1,024", "fastft") == [
        "1.00 ms", "3.00 ms", "4.00 ms", "3.80 to 4.20 ms", "2.00 ms", "50%", "3.00 GB", "10.0 KiB", "4.0e-03", "2.50x",
    ]  # fmt: skip
    assert cells(rows, "1,024", "eager")[-1] == "0.25x" and cells(rows, "4,096", "grouped_mm")[-1] == "1.00x"
    assert cells(rows, "1,024", "liger")[0] == "not here: liger-kernel is not installed"
    assert cells(rows, "4,096", "fastft")[0].startswith("wrong: output (rms)")


def test_kernels_and_orders_have_tables_of_their_own() -> None:
    (header, row) = moe_results.profile_rows([LINES[2]])
    assert header[2:] == list(GROUPS) and row[2:5] == ["2.00 ms", "0.100 ms (5%)", "0.500 ms (25%)"]
    rows = moe_results.routing_rows([line for line in LINES if line["kind"] == "routing"])
    assert cells(rows, "1,024", "fastft, triton") == ["0.050 ms", "0.048 to 0.053 ms", "0.025 ms", "2.5%"]
    assert cells(rows, "1,024", "eager")[0] == "out of memory"
    text = moe_results.table(LINES)
    assert "grouped GEMMs:" in text and "expert alone:" in text
    *_, spread, what, where = [row for row in text.splitlines() if row and not row.startswith("|") and row[-1] != ":"]
    assert spread == "quartiles of one way's forward and backward: at most 10.5% apart"
    assert what == (
        "Qwen3-30B-A3B, the experts of one layer: 8 of 128, bfloat16, trained: nothing, skew 0; "
        "rows of the busiest expert over the mean (tokens): 1.2x (1,024), 1.2x (4,096)"
    )
    assert where == "NVIDIA H200; torch 2.11.0; commit abc1234; 3 steps a round"
    only_ways = moe_results.table([line for line in LINES if line["way"] == "eager" and line["kind"] == "way"])
    assert "alone:" not in only_ways and "GEMMs:" not in only_ways


def test_a_floor_that_failed_leaves_the_ways_without_a_share() -> None:
    alone = line("grouped_mm", 10.0, floor={"failure": "out of memory"}, share_of_floor={})
    assert cells(moe_results.way_rows([alone]), "1,024", "grouped_mm")[5] == ""
    order = line("eager", None, kind="routing", order=timing(0.05), floor={"failure": "out of memory"})
    assert cells(moe_results.routing_rows([order]), "1,024", "eager")[-1] == ""
    with pytest.raises(ValueError, match="2 different machines"):
        moe_results.table([LINES[0], line("fastft", 4.0, hardware={"gpu": "another", "cpu": "x86_64"})])


def test_stored_lines_are_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, drawn = tmp_path / "lines.jsonl", tmp_path / "plot.png"
    stored.write_text("".join(json.dumps(each) + "\n" for each in LINES), encoding="utf-8")
    assert moe.main(["--table", str(stored), "--plot", str(drawn)]) == 0
    assert "2.50x" in capsys.readouterr().out
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    moe_results.plot([LINES[3]], tmp_path / "of_nothing_measured.png")
