"""The report, the log line, and options that cannot be honoured."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest
import torch
from interpreter import needs_interpreter
from patch_cases import attention_calls, counters, skipped_reasons, snapshot, train_step
from tiny_models import FAMILIES, tiny_model
from torch import nn

import fastft
from fastft.errors import FastftError, UnsupportedModelError, UnsupportedOptionError
from fastft.plan import NO_ADAPTER


@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_accounts_for_every_module_and_op(family: str) -> None:
    model = fastft.patch_model(tiny_model(family))
    report = fastft.report(model)
    norms = 9 if family == "qwen3" else 5
    seen = {
        op: [item.fqn for item in report.replaced if item.op == op] for op in ("packing", "attention", "rope", "lora")
    }
    assert seen["packing"] == ["model"]
    assert seen["attention"] == seen["rope"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert not seen["lora"]
    unadapted = [item for item in report.skipped if item.op == "lora"]
    assert len(unadapted) == 4 and {item.reason for item in unadapted} == {NO_ADAPTER}
    assert len([item for item in report.replaced if item.op == "rms_norm"]) == norms
    assert unadapted == list(report.skipped) and not report.counters
    assert {item.impl for item in report.replaced} == {"varlen", "sdpa", "reference", "chunked", "direct"}
    assert all(item.reason for item in report.replaced)
    assert "not run yet" in str(report)


def test_summary_rows_and_text_agree() -> None:
    model = fastft.patch_model(tiny_model("llama"), rope=False)
    report = fastft.report(model)
    assert report.summary().startswith("fastft: LlamaForCausalLM: replaced ")
    assert "attention x2 (sdpa)" in report.summary() and report.summary().endswith("not replaced: lora, rope")
    table = {(op, what): (impl, count) for op, what, impl, count, _ in report.rows()}
    assert table["rms_norm", "replaced"] == ("reference", 5)
    assert table["rope", "skipped"] == ("stock", 2)
    text = str(report)
    assert report.summary() in text and "rope=False" in text
    train_step(model)
    assert re.search(
        r"since then: add_rms_norm 2, attention: sdpa 2, batches: packed, positions restart 1",
        str(fastft.report(model)),
    )
    assert not report.counters  # what was reported does not change later


def test_the_report_of_an_unpatched_model_says_so() -> None:
    report = fastft.report(tiny_model("llama"))
    assert (report.replaced, report.skipped, dict(report.counters)) == ((), (), {})
    assert report.summary() == "fastft: LlamaForCausalLM (not patched): replaced nothing"


def test_counters_are_fastfts_own_count() -> None:
    model = fastft.patch_model(tiny_model("llama"))
    train_step(model)
    once = counters(model)
    train_step(model)
    assert counters(model) == {name: 2 * count for name, count in once.items()}
    assert once["attention: sdpa"] == once["rope"] == 2 and once["rms_norm"] == 5


def test_the_report_after_moving_the_model() -> None:
    model = fastft.patch_model(tiny_model("llama"), rms_norm="reference")
    model.to("meta")
    report = fastft.report(model)
    assert {item.impl for item in report.replaced if item.op == "attention"} == {"auto"}
    assert {item.reason for item in report.replaced if item.op == "rope"} == {"decided when the weights have a device"}
    assert not skipped_reasons(model)


def test_the_report_does_not_raise_where_the_model_would(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fastft.patch_model(tiny_model("llama"), rms_norm="reference")
    before = snapshot(model)

    def refuse(*args, **kwargs):
        raise UnsupportedOptionError("rms_norm='reference' cannot run here: for the test")

    monkeypatch.setattr("fastft.choices.select", refuse)
    item = next(item for item in fastft.report(model).replaced if item.op == "rms_norm")
    assert item.impl == "reference" and item.reason.startswith("raises when it runs") and "for the test" in item.reason
    assert snapshot(model) == before


def test_one_log_line_a_patch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fastft")
    model = fastft.patch_model(tiny_model("llama"))
    fastft.patch_model(model)
    assert [record.message for record in caplog.records] == [fastft.report(model).summary()]


# --------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ropes": False}, "unknown option 'ropes'.*rope"),
        ({"rope": True}, "rope=True is not an option"),
        ({"rope": None}, "rope=None is not an option"),
        ({"rope": 1}, "rope=1 is not an option"),
        ({"attention": 0}, "attention=0 is not an option"),
        ({"packing": "triton"}, "packing='triton' is not an option"),
        ({"attention": False}, "give packing=False as well"),
        ({"rope": "cuda"}, "rope: unknown implementation 'cuda'.*'reference'"),
        ({"rms_norm": "liger"}, "rms_norm: unknown implementation 'liger'"),
        ({"lora": "triton"}, "lora: unknown implementation 'triton'"),
        ({"attention": "fa2"}, "attention='fa2' cannot run here.*NVIDIA"),
        ({"attention": "sdpa", "packing": False}, "attention='sdpa' cannot be honoured.*packing=False"),
    ],
)
def test_an_option_that_cannot_be_honoured_raises_before_anything_changes(options: dict, message: str) -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    with pytest.raises(UnsupportedOptionError, match=message) as caught:
        fastft.patch_model(model, **options)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, FastftError)
    assert snapshot(model) == before


def test_options_by_name_go_over_the_config() -> None:
    model = fastft.patch_model(
        tiny_model("llama"), fastft.PatchConfig(rope=False, rms_norm=False), rms_norm="reference"
    )
    assert {op for _, op in skipped_reasons(model)} == {"rope"}
    with pytest.raises(UnsupportedOptionError, match="PatchConfig, got dict"):
        fastft.patch_model(tiny_model("llama"), {"rope": False})


def test_everything_off_changes_nothing() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    fastft.patch_model(model, attention=False, packing=False, rope=False, rms_norm=False, gated_mlp=False, lora=False)
    assert snapshot(model) == before


def test_without_packing_the_model_keeps_its_attention() -> None:
    model = tiny_model("llama")
    config = model.config
    fastft.patch_model(model, packing=False)
    assert model.config is config and not model.model._forward_pre_hooks
    skipped = {(op, reason) for (_, op), reason in skipped_reasons(model).items()}
    assert skipped == {("packing", "packing=False"), ("attention", "packing=False")}
    train_step(model)
    assert counters(model)["rms_norm"] == 5 and not attention_calls(model)


@pytest.mark.parametrize("wrap", [lambda m: m.lm_head, lambda m: nn.Sequential(m), lambda m: "llama"])
def test_not_a_model(wrap) -> None:
    for call in (fastft.patch_model, fastft.unpatch_model, fastft.report):
        with pytest.raises(UnsupportedModelError, match="pass the model itself"):
            call(wrap(tiny_model("llama")))


def test_a_model_loaded_with_fastfts_own_name() -> None:
    fastft.patch_model(tiny_model("llama"))  # makes the name known
    model = tiny_model("llama", attn_implementation="fastft")
    with pytest.raises(UnsupportedOptionError, match="load it with another one or none"):
        fastft.patch_model(model, attention="sdpa")
    fastft.patch_model(model)
    assert {op for _, op in skipped_reasons(model)} == {"packing", "attention"}


# ---------------------------------------------------------------------------------------- triton without a GPU

_ASK_FOR_TRITON = """
import sys
sys.path.insert(0, "tests")
from tiny_models import packed_batch, tiny_model
import fastft
for option in ("rope", "rms_norm"):
    try:
        model = fastft.patch_model(tiny_model("llama"), **{option: "triton"})
    except fastft.errors.UnsupportedOptionError as error:
        print(option, "refused:", error)
    else:
        model(**packed_batch([5, 3])).loss.backward()
        report = fastft.report(model)
        print(option, "ran", report.counters[option], {item.impl for item in report.replaced if item.op == option})
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("interpreter", ["0", pytest.param("1", marks=needs_interpreter)])
def test_triton_by_name_on_a_cpu(interpreter: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": interpreter, "PYTHONPATH": os.getcwd()}
    result = subprocess.run(
        [sys.executable, "-c", _ASK_FOR_TRITON], capture_output=True, text=True, env=environment, check=True
    )
    lines = result.stdout.splitlines()
    if interpreter == "1":
        assert lines == ["rope ran 2 {'triton'}", "rms_norm ran 5 {'triton'}"]
    else:
        assert lines[0].startswith("rope refused: rope='triton' cannot run here") and "rope='auto'" in lines[0]
        assert lines[1].startswith("rms_norm refused: rms_norm='triton' cannot run here")
