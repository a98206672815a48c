"""patch_model before or after everything else that is done to a model: the same modules are patched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState
from patch_cases import LENGTHS, attention_calls, counters, rows, skipped_reasons, snapshot, train_step
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import packed_batch, tiny_model
from torch import nn

import fastft
from fastft.errors import UnsupportedOptionError

_LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


def _with_lora(model: nn.Module) -> PeftModel:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return get_peft_model(model, LoraConfig(**_LORA))


def _checkpointing(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable()
    return model


_STEPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "dtype": lambda model: model.to(torch.bfloat16),
    "float64": lambda model: model.to(torch.float64),
    "checkpointing": _checkpointing,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "peft": _with_lora,
    "frozen": lambda model: model.requires_grad_(False),
    "data parallel": nn.DataParallel,
}


def _patched(model: nn.Module) -> set[str]:
    """Names of the patched modules, without what PEFT and other wrappers put in front of them."""
    names = [fqn for fqn, module in model.named_modules() if module.__dict__.get("_fastft") is not None]
    return {re.sub(r"^(module|_orig_mod|base_model\.model)(\.|$)", "", name) for name in names}


@pytest.mark.parametrize("step", _STEPS)
def test_the_same_modules_are_patched_before_and_after(step: str) -> None:
    before = _STEPS[step](fastft.patch_model(tiny_model("qwen3")))
    after = _STEPS[step](tiny_model("qwen3"))
    assert fastft.patch_model(after) is after
    assert _patched(before) == _patched(after) == _patched(fastft.patch_model(tiny_model("qwen3")))
    # The whole, its backbone, 2 layers (attention, MLP, 4 norms), the last norm.
    assert len(_patched(after)) == 2 + 2 * 7 + 1
    for model in (before, after):
        report = fastft.report(model)
        assert {item.op for item in report.replaced} >= {"packing", "attention", "rope", "rms_norm"}
        assert not skipped_reasons(model)
    fastft.unpatch_model(after)
    assert not _patched(after)


@pytest.mark.parametrize("step", ["dtype", "checkpointing", "peft", "data parallel"])
def test_both_orders_run_fastft_and_agree(step: str) -> None:
    before = _STEPS[step](fastft.patch_model(tiny_model("qwen3")))
    after = fastft.patch_model(_STEPS[step](tiny_model("qwen3")))
    losses = [model(**packed_batch(LENGTHS)).loss for model in (before, after)]
    losses[0].backward()
    losses[1].backward()
    assert torch.equal(losses[0], losses[1])
    assert counters(before) == counters(after)
    assert attention_calls(after) == (4 if step == "checkpointing" else 2)


def test_a_second_call_after_peft_keeps_the_patch_and_its_counters() -> None:
    inner = fastft.patch_model(tiny_model("llama"))
    train_step(inner)
    counted = counters(inner)
    model = _with_lora(inner)
    patched = snapshot(model)
    assert fastft.patch_model(model) is model
    assert snapshot(model) == patched and counters(model) == counted
    fastft.unpatch_model(model)
    assert not _patched(model) and model.config._attn_implementation == "sdpa" and model.config is inner.config


def test_a_peft_model_trains_merges_and_unloads_like_stock(tmp_path: Path) -> None:
    stock = _with_lora(tiny_model("llama"))
    model = fastft.patch_model(_with_lora(tiny_model("llama")))
    assert list(model.state_dict()) == list(stock.state_dict())
    for _ in range(2):
        stock_loss = stock(**packed_batch(LENGTHS), use_cache=False).loss
        stock_loss.backward()
        loss = model(**packed_batch(LENGTHS)).loss
        loss.backward()
        torch.testing.assert_close(loss, stock_loss)
        for either in (stock, model):
            for parameter in either.parameters():
                if parameter.grad is not None:
                    parameter.data -= 0.1 * parameter.grad
                    parameter.grad = None
    model.save_pretrained(tmp_path)
    assert "fastft" not in (tmp_path / "adapter_config.json").read_text()
    merged, stock_merged = model.merge_and_unload(), stock.merge_and_unload()
    torch.testing.assert_close(merged(rows()).logits, stock_merged(rows()).logits, atol=1e-5, rtol=1e-4)
    assert attention_calls(merged) == 6
    merged.save_pretrained(tmp_path / "merged")
    assert "fastft" not in (tmp_path / "merged" / "config.json").read_text()


def test_an_adapter_loaded_later_is_used(tmp_path: Path) -> None:
    _with_lora(tiny_model("llama")).save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(tiny_model("llama"), tmp_path, is_trainable=True)
    after = fastft.patch_model(PeftModel.from_pretrained(tiny_model("llama"), tmp_path, is_trainable=True))
    before = PeftModel.from_pretrained(fastft.patch_model(tiny_model("llama")), tmp_path, is_trainable=True)
    batch = packed_batch(LENGTHS)
    expected = stock(**batch, use_cache=False).loss
    base = tiny_model("llama")(**batch, use_cache=False).loss
    assert not torch.isclose(expected, base, rtol=1e-4)  # the adapter does something
    for model in (before, after):
        torch.testing.assert_close(model(**batch).loss, expected)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_inside_distributed_data_parallel() -> None:
    before = nn.parallel.DistributedDataParallel(fastft.patch_model(tiny_model("llama")))
    after = nn.parallel.DistributedDataParallel(tiny_model("llama"))
    assert fastft.patch_model(after) is after
    losses = [train_step(model) for model in (before, after)]
    assert losses[0] == losses[1]
    assert counters(before) == counters(after) and attention_calls(after) == 2


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps one state a process, and trainers of other tests may have made it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_inside_accelerates_prepare() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    before = accelerator.prepare(fastft.patch_model(tiny_model("llama")))
    after = fastft.patch_model(accelerator.prepare(tiny_model("llama")))
    assert _patched(before) == _patched(after)
    losses = [train_step(model) for model in (before, after)]
    assert losses[0] == losses[1]
    assert counters(before) == counters(after) and attention_calls(after) == 2
    assert accelerator.unwrap_model(before) is before


def test_compiled_after_patching_gives_the_same_loss() -> None:
    model = fastft.patch_model(tiny_model("llama"))
    expected = model(**packed_batch(LENGTHS)).loss
    torch.testing.assert_close(torch.compile(model, backend="eager")(**packed_batch(LENGTHS)).loss, expected)


# ------------------------------------------------------------------------------------------ accelerate's device hooks


def test_a_module_with_a_hook_of_accelerate_is_skipped_with_the_reason() -> None:
    model = tiny_model("llama")
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    add_hook_to_module(norm, ModelHook())
    add_hook_to_module(mlp, ModelHook())
    hooked = {fqn: module.__dict__.get("forward") for fqn, module in model.named_modules()}
    fastft.patch_model(model)
    assert norm.forward is hooked["model.norm"] and mlp.forward is hooked["model.layers.0.mlp"]
    skipped = skipped_reasons(model)
    first = "model.layers.0.mlp"
    assert skipped.keys() == {("model.norm", "rms_norm"), (first, "gated_mlp"), (first, "lora")}
    assert all("replaced this module's forward already" in reason for reason in skipped.values())
    train_step(model)
    assert counters(model)["rms_norm"] == 4
    fastft.unpatch_model(model)
    assert norm.forward is hooked["model.norm"]
    before = snapshot(model)
    with pytest.raises(UnsupportedOptionError, match=r"rms_norm='reference' .* model\.norm: something else replaced"):
        fastft.patch_model(model, rms_norm="reference")
    assert snapshot(model) == before  # refused before anything was changed


def test_a_hook_of_accelerate_over_fastfts_forward() -> None:
    model = fastft.patch_model(tiny_model("llama"))
    norm = model.model.norm
    calls = []

    class Recorder(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(module)
            return args, kwargs

    add_hook_to_module(norm, Recorder())
    hooked = norm.forward
    fastft.patch_model(model)
    assert not skipped_reasons(model)
    train_step(model)
    assert counters(model)["rms_norm"] == 5 and calls == [norm]

    fastft.patch_model(model, rope=False)  # patched anew, below the hook
    assert norm.forward is hooked
    train_step(model)
    assert counters(model)["rms_norm"] == 5 and calls == [norm, norm]

    fastft.unpatch_model(model)
    assert norm.forward is hooked
    train_step(model)
    assert not counters(model) and calls == [norm, norm, norm]
    remove_hook_from_module(norm)
    fastft.patch_model(model, rms_norm="reference")  # a forward that is only the class's own does not count
    train_step(model)
    assert counters(model)["rms_norm"] == 5
