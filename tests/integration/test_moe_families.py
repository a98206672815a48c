"""Families with sparse layers: their experts are fastft's, and losses, gradients and routing are those of stock."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from budget import assert_mutant_caught, assert_within_budget
from decoder_families import tiny_decoder
from patch_cases import left_padded, rows
from peft import LoraConfig, get_peft_model
from tiny_models import model_from, packed_batch, tiny_model
from torch import nn

from fastft import patch_model, report, unpatch_model
from fastft.errors import UnsupportedOptionError
from fastft.ops.moe import api, reference

KNOWN = ("qwen2_moe", "qwen3_moe", "mixtral", "granitemoe")
MOE = (*KNOWN, "deepseek_v3", "glm4_moe", "olmoe", "gpt_oss", "qwen3_next")
# Of the one a packed batch is refused, of the other stock's own masks forget the documents (`test_stock_faults`).
ROWS_ONLY = {"qwen3_next", "gpt_oss"}
LENGTHS = (13, 9, 1, 17)
NOTHING_ELSE = dict.fromkeys(("packing", "attention", "rope", "rms_norm", "gated_mlp", "lora", "loss", "walks"), False)
ATTENTION = r".*self_attn\.(q_proj|q_b_proj|k_proj|v_proj|kv_b_proj|o_proj)"
# The error of few numbers is luck: these are measured together, and all of them over several draws.
FEW, DRAWS = 256, 8

Tensors = dict[str, torch.Tensor]


def experts_of(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(type(module), "_apply_gate")}


def routers_of(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__.lower().endswith("router")}


def eager(model: Any) -> Any:
    """A stock copy, in which each expert is a product of its own."""
    model = copy.deepcopy(model)
    model.set_experts_implementation("eager")
    return model


def whole_rows(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"input_ids": rows(3, 14, seed), "labels": rows(3, 14, seed)}


def records(model: Any) -> bool:
    """Of some families transformers 5.17 cannot record what routers say."""
    return "router_logits" in (model._can_record_outputs or {})


def forward(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    return model(**batch, use_cache=False, output_router_logits=records(model))


def evaluate(model: Any, batch: dict[str, torch.Tensor]) -> Tensors:
    """Loss, logits, what routers say, and the gradient of every parameter."""
    model.zero_grad()
    out = forward(model, batch)
    out.loss.backward()
    found = {"loss": out.loss[None], "logits": out.logits}
    if out.get("aux_loss") is not None:
        found["aux_loss"] = out.aux_loss[None]
    found |= {f"router logits {number}": logits for number, logits in enumerate(out.get("router_logits") or ())}
    found |= {f"grad {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {name: value.detach().clone() for name, value in found.items()}


def gathered(found: Tensors, oracle: Tensors) -> Tensors:
    """Tensors of few numbers as one, each in units of its typical number."""
    few = [name for name, value in oracle.items() if value.numel() < FEW]
    units = [oracle[name].square().mean().sqrt().clamp_min(1e-6) for name in few]
    together = torch.cat([(found[name] / unit).flatten() for name, unit in zip(few, units, strict=True)])
    return {name: value for name, value in found.items() if name not in few} | {"few": together.to(found["logits"])}


def compared(family: str, model: Any, stock: Any, draws: int) -> Iterator[tuple[Tensors, Tensors, Tensors]]:
    """(patched, stock, stock in fp64), of whole rows and then of a packed batch."""
    single, double = eager(stock), eager(stock).double()
    for kind in (whole_rows,) if family in ROWS_ONLY else (whole_rows, lambda seed: packed_batch(LENGTHS, seed=seed)):
        drawn = []
        for seed in range(draws):
            oracle = evaluate(double, kind(seed))
            results = (evaluate(model, kind(seed)), evaluate(single, kind(seed)), oracle)
            drawn.append([gathered(each, oracle) for each in results])
        # A draw is a row: in gradients some rows cancel, whose own error says nothing of a whole model.
        found, expected, exact = (
            {name: torch.stack([each[name].flatten() for each in of]) for name in of[0]}
            for of in zip(*drawn, strict=True)
        )
        yield found, expected, exact


def check_parity(family: str, draws: int, **options: Any) -> tuple[Any, int]:
    """The patched model, and how many calls of its experts there were."""
    stock = tiny_decoder(family)
    model = patch_model(copy.deepcopy(stock), **options)
    compared_ones = list(compared(family, model, stock, draws))
    for results in compared_ones:
        assert_within_budget(*results)
    return model, len(compared_ones) * draws * len(experts_of(model))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("family", MOE)
def test_loss_router_logits_and_gradients_are_those_of_stock(family: str) -> None:
    model, calls = check_parity(family, DRAWS)
    seen = report(model)
    assert seen.counters["experts: reference"] == calls > 0
    assert {item.fqn for item in seen.replaced if item.op == "experts"} == experts_of(model).keys()
    assert {"rope", "rms_norm"} <= {item.op for item in (seen.replaced if family in KNOWN else seen.skipped)}


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_kernels_compute_the_same(family: str) -> None:
    model, calls = check_parity(family, 4, experts="triton")
    counters = report(model).counters
    assert counters["experts: triton"] == calls > 0 and "experts: reference" not in counters


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_a_wrong_gradient_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.gate_backward

    def wrong(*args: Any, **kwargs: Any) -> Any:
        grad, *others = right(*args, **kwargs)
        return grad * 1.05, *others

    stock = tiny_decoder(family)
    monkeypatch.setattr(api, "_pieces", api._pieces.__wrapped__)  # not the cached ones, nor kept after this
    monkeypatch.setattr(reference, "gate_backward", wrong)
    for results in compared(family, patch_model(copy.deepcopy(stock)), stock, DRAWS):
        assert_mutant_caught(*results)


@pytest.mark.parametrize("family", MOE)
def test_routers_say_the_same_to_the_bit_until_experts_round_otherwise(family: str) -> None:
    """ME-05: fastft has no opinion on the auxiliary loss; it leaves alone what it is made of."""
    stock = tiny_decoder(family)
    if not records(stock):
        pytest.skip(f"transformers {transformers.__version__} records no router logits of {family}")
    model = patch_model(copy.deepcopy(stock), **NOTHING_ELSE)
    expected, found = (forward(each, whole_rows()) for each in (stock, model))
    assert report(model).counters["experts: reference"] == len(found.router_logits) == len(expected.router_logits)
    assert torch.equal(found.router_logits[0], expected.router_logits[0])
    torch.testing.assert_close(found.router_logits, expected.router_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.get("aux_loss"), expected.get("aux_loss"), rtol=1e-5, atol=0)
    assert found.get("aux_loss") is None or found.aux_loss.requires_grad


# ------------------------------------------------------------------------------------------------------- training


def three_steps(model: Any) -> tuple[list[float], dict[str, list[bool]], dict[str, list[bool]]]:
    """Losses, and of each trained parameter which of its first dimension had a gradient, and which moved."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    seen = {name: torch.zeros_like(value) for name, value in before.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, weight_decay=0.0)
    losses = []
    for seed in range(3):
        loss = model(**whole_rows(seed), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        for name, parameter in trained.items():
            seen[name] += parameter.grad.abs()
        optimizer.step()
        optimizer.zero_grad()

    def parts(changes: Tensors) -> dict[str, list[bool]]:
        return {name: change.reshape(len(change), -1).any(1).tolist() for name, change in changes.items()}

    return losses, parts(seen), parts({name: p.detach() - before[name] for name, p in trained.items()})


@pytest.mark.parametrize("family", MOE)
def test_full_training_moves_every_expert_and_every_router(family: str) -> None:
    stock = tiny_decoder(family)
    model = patch_model(copy.deepcopy(stock))
    losses, had_gradient, moved = three_steps(model)
    assert moved == had_gradient
    for name, module in (experts_of(model) | routers_of(model)).items():
        for inner, parameter in module.named_parameters():
            assert all(moved[f"{name}.{inner}"]) and len(parameter) == 4, f"{name}.{inner}"
    assert losses == pytest.approx(three_steps(stock)[0], rel=1e-4)


@pytest.mark.parametrize("family", MOE)
def test_lora_on_attention_moves_adapters_and_no_expert(family: str) -> None:
    config = LoraConfig(r=2, target_modules=ATTENTION, init_lora_weights=False)
    stock = get_peft_model(tiny_decoder(family), config)
    model = patch_model(copy.deepcopy(stock))
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    losses, had_gradient, moved = three_steps(model)
    assert moved == had_gradient and all(map(any, moved.values())) and all("lora_" in name for name in moved)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in frozen.items())
    assert losses == pytest.approx(three_steps(stock)[0], rel=1e-4)
    assert report(model).counters["experts: reference"] == 3 * len(experts_of(model))


@pytest.mark.parametrize("family", MOE)
def test_gradient_checkpointing_gives_the_same_gradients(family: str) -> None:
    model = patch_model(tiny_decoder(family))
    expected = evaluate(model, whole_rows())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(4):  # two are measured, the others planned
        torch.testing.assert_close(evaluate(model, whole_rows()), expected, rtol=1e-5, atol=1e-6)


def test_noise_that_mixtral_writes_into_a_normalised_input() -> None:
    stock = tiny_decoder("mixtral", router_jitter_noise=0.3)
    model = patch_model(copy.deepcopy(stock))
    for checkpointed in (False, False, True, True):
        found = []
        for each in (stock, model):
            if checkpointed:
                each.gradient_checkpointing_enable({"use_reentrant": False})
            torch.manual_seed(1)
            found.append(evaluate(each, whole_rows()))
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------------------------------------- what others see


@pytest.mark.parametrize("family", MOE)
def test_hooks_on_routers_and_experts_are_obeyed_as_in_stock(family: str) -> None:
    stock = tiny_decoder(family)
    seen: list[tuple[Any, ...]] = []

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append((type(module), *(x.shape for x in args), *(x.dtype for x in args)))

    def after(module: nn.Module, args: tuple[torch.Tensor, ...], out: Any) -> Any:
        before(module, out if isinstance(out, tuple) else (out,))
        return out if isinstance(out, tuple) else 2 * out  # of experts

    results = []
    for model in (stock, patch_model(copy.deepcopy(stock), **NOTHING_ELSE)):
        for module in (routers_of(model) | experts_of(model)).values():
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
        results.append(forward(model, whole_rows()).logits)
    half = 2 * (len(routers_of(stock)) + len(experts_of(stock)))
    assert len(seen) == 2 * half >= 8 and seen[:half] == seen[half:]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert (results[0] - forward(tiny_decoder(family), whole_rows()).logits).abs().max() > 0.1


@pytest.mark.parametrize("family", MOE)
def test_another_implementation_may_be_selected_after_patching(family: str) -> None:
    stock, batch = tiny_decoder(family), whole_rows()
    expected = forward(eager(stock), batch).logits
    model = patch_model(copy.deepcopy(stock), **NOTHING_ELSE)
    model.set_experts_implementation("eager")
    assert torch.equal(forward(model, batch).logits, expected)
    seen = report(model)
    reasons = {item.reason for item in seen.skipped if item.op == "experts"}
    assert reasons == {"'eager' was selected after patching; call patch_model again"} and not seen.replaced
    assert not any(name.startswith("experts") for name in seen.counters)
    patch_model(model, **NOTHING_ELSE)
    forward(model, batch)
    assert report(model).counters["experts: reference"] == len(experts_of(model))
    assert unpatch_model(model).config._experts_implementation == "eager"
    assert torch.equal(forward(model, batch).logits, expected)


@pytest.mark.parametrize("family", MOE)
def test_other_models_of_the_same_config_are_untouched(family: str) -> None:
    model = tiny_decoder(family)
    config, implementation = model.config, model.config._experts_implementation
    other = model_from(config, seed=1)
    batch = whole_rows()
    expected = forward(other, batch).logits
    keys = list(model.state_dict())
    patch_model(model)
    forward(model, batch)
    counted = report(model).counters
    assert list(model.state_dict()) == keys
    assert config._experts_implementation == implementation != model.config._experts_implementation
    assert torch.equal(forward(other, batch).logits, expected)
    # Models made of a patched model's own config compute as stock does.
    assert torch.equal(forward(model_from(model.config, seed=1), batch).logits, expected)
    assert report(model).counters == counted
    unpatch_model(model)
    assert model.config is config and type(config._experts_implementation) is str
    assert config._experts_implementation == implementation


@pytest.mark.parametrize("family", MOE)
def test_copies_and_checkpoints(family: str, tmp_path: Any) -> None:
    model = tiny_decoder(family)
    batch, implementation = whole_rows(), model.config._experts_implementation
    expected = model(**batch).logits  # records nothing: transformers' own hooks for that cannot be pickled
    patch_model(model)
    patched = model(**batch).logits
    once = len(experts_of(model))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(**batch).logits, patched)
    assert report(twin).counters["experts: reference"] == 2 * once
    assert report(model).counters["experts: reference"] == once
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert "(not patched)" in str(report(loaded)) and loaded.config._experts_implementation == implementation
    assert torch.equal(loaded(**batch).logits, expected)
    patch_model(loaded)
    assert torch.equal(loaded(**batch).logits, patched)
    assert report(loaded).counters["experts: reference"] == once
    model.save_pretrained(tmp_path)
    assert "fastft" not in (tmp_path / "config.json").read_text()
    again = type(model).from_pretrained(tmp_path)
    assert again.config._experts_implementation == implementation
    torch.testing.assert_close(again.train()(**batch).logits, expected)


@pytest.mark.parametrize("family", MOE)
def test_generation_is_that_of_stock(family: str) -> None:
    stock = tiny_decoder(family).eval()
    model = patch_model(copy.deepcopy(stock))
    batch = {**left_padded(), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(**batch), stock.generate(**batch))
    assert report(model).counters["experts: reference"] == 6 * len(experts_of(model))


# ---------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_experts_with_a_known_gate_give_what_stock_gives(activation: str) -> None:
    """ME-13, with inputs for which the gates differ."""
    stock = tiny_decoder("qwen3_moe", hidden_act=activation)
    model = patch_model(copy.deepcopy(stock))
    hidden = 5 * torch.randn(40, model.config.hidden_size)
    indices, weights = torch.rand(40, 4).topk(2).indices, torch.rand(40, 2)
    for name, module in experts_of(model).items():
        expected = stock.get_submodule(name)(hidden, indices, weights)
        torch.testing.assert_close(module(hidden, indices, weights), expected, rtol=1e-4, atol=1e-4)
        other = tiny_decoder("qwen3_moe", hidden_act="gelu" if activation == "silu" else "silu").get_submodule(name)
        assert (other(hidden, indices, weights) - expected).abs().max() > 1e-2
    assert report(model).counters["experts: reference"] == 2


@pytest.mark.parametrize(("activation", "name"), [("relu", "ReLU"), ("quick_gelu", "QuickGELUActivation")])
def test_experts_with_a_gate_that_is_not_known_stay_stock(activation: str, name: str) -> None:
    stock = tiny_decoder("qwen3_moe", hidden_act=activation)
    model = patch_model(copy.deepcopy(stock))
    reasons = [item.reason for item in report(model).skipped if item.op == "experts"]
    assert reasons == [f"its gate ({name}) is none that fastft knows"] * 2
    assert model.config._experts_implementation == stock.config._experts_implementation
    found, expected = (forward(each, whole_rows()).logits for each in (model, stock))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not any(key.startswith("experts") for key in report(model).counters)
    with pytest.raises(UnsupportedOptionError, match=rf"experts='loop' cannot be honoured .*\({name}\)"):
        patch_model(stock, experts="loop")


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("has_gate", False, "experts without a gate are not fused"),
        ("has_post_expert_norm", True, "the outputs of its experts are normalised before they are weighted"),
    ],
)
def test_experts_of_another_kind_stay_stock(flag: str, value: bool, reason: str) -> None:
    model = tiny_decoder("qwen3_moe")
    for module in experts_of(model).values():
        setattr(module, flag, value)
    patch_model(model)
    assert [item.reason for item in report(model).skipped if item.op == "experts"] == [reason] * 2
    assert not any("_fastft" in module.__dict__ for module in experts_of(model).values())


def test_experts_that_are_asked_for_where_there_are_none() -> None:
    with pytest.raises(UnsupportedOptionError, match="experts='triton' cannot be honoured: nothing in LlamaFor"):
        patch_model(tiny_model("llama"), experts="triton")


def test_a_window_that_qwen2_moe_has_in_its_masks_alone() -> None:
    """Its attention is not told, so packed rows stay with its own masks; norms and rotations are fused all the same."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
    model = patch_model(tiny_decoder("qwen2_moe", **layers))
    reasons = {item.op: item.reason for item in report(model).skipped}
    assert reasons["packing"].startswith("Qwen2MoeAttention does not tell its attention the sliding window; ")
    for batch in (whole_rows(), packed_batch(LENGTHS)):
        expected = evaluate(tiny_decoder("qwen2_moe", **layers), batch)
        torch.testing.assert_close(evaluate(model, batch), expected, rtol=1e-3, atol=1e-5)
    assert report(model).counters["rope"] == 4
