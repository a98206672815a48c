"""LoRA on experts: PEFT's wrappers of parameters, computed without a weight or gradient of the experts' size."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget
from patch_cases import counters
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import packed_batch, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from fastft import patch_model, report, unpatch_model

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "qwen3_moe": MOE,
    "gpt_oss": MOE | {"layer_types": ["full_attention"] * 2, "attn_implementation": "eager"},
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def with_adapters(family, parameters=BOTH, rank=4, seed=0):
    """A model of stock PEFT whose adapters change something."""
    torch.manual_seed(seed)
    model = tiny_model(family, **FAMILIES[family])
    model.set_experts_implementation("eager")  # grouped_mm knows no fp64
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj"], target_parameters=list(parameters))
    model = get_peft_model(model, config).train()
    stir(model)
    return model


def stir(model):
    """B starts at zero, and then A has no gradient."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)


def trained(model, batch, dtype=torch.float32):
    """Logits and the gradient of every adapter by name."""
    model = model.to(dtype)
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits)
    logits.backward(upstream)
    grads = {n: p.grad.clone().flatten() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


def batch_of(rows=2, tokens=19):
    return {"input_ids": packed_batch([tokens] * rows)["input_ids"].view(rows, tokens)}


def assert_same(model, stock, batch):
    found = trained(model, batch)
    eager, oracle = trained(copy.deepcopy(stock), batch), trained(copy.deepcopy(stock), batch, torch.float64)
    # Gradients of q_proj come through a softmax, where most cancels: rounding of anything above shows there by chance.
    for name in [name for name in found if "q_proj" in name]:
        torch.testing.assert_close(found.pop(name), oracle.pop(name).float(), rtol=1e-3, atol=1e-6)
        del eager[name]
    assert_within_budget(found, eager, oracle)
    name = next(name for name in found if "experts" in name and "lora_A" in name)
    assert_mutant_caught({**found, name: found[name] * 1.01}, eager, oracle)


def calls(model):
    return counters(model).get("lora on experts", 0)


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("parameters", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_peft(family, parameters, impl):
    stock = with_adapters(family, parameters)
    model = patch_model(copy.deepcopy(stock), experts=impl)
    assert_same(model, stock, batch_of())
    assert calls(model) == 2  # one for each layer


@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_that_come_after_patching(checkpointed):
    stock = with_adapters("qwen3_moe")
    model = patch_model(tiny_model("qwen3_moe", **MOE))
    model.load_state_dict({n.replace("base_layer.", ""): p for n, p in base_weights(stock).items()})
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=BOTH)
    model = get_peft_model(model, config).train()
    model.load_state_dict(stock.state_dict())
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    assert_same(model, stock, batch_of())
    assert calls(model) == (4 if checkpointed else 2)
    rows = [row for row in report(model).rows() if row[0] == "lora" and row[2] == "fused"]
    assert rows


def base_weights(model):
    state = model.get_base_model().state_dict()
    return {name: value for name, value in state.items() if "lora_" not in name}


def test_nothing_of_the_experts_size_is_made():
    """PEFT's own forward makes W + B A, and its backward a gradient of W."""
    model = with_adapters("qwen3_moe")
    batch = batch_of(1, 5)
    size = model.get_base_model().model.layers[0].mlp.experts.get_base_layer().gate_up_proj.shape
    assert dense_results(model, batch, size) > 0
    assert dense_results(patch_model(model), batch, size) == 0


def dense_results(model, batch, shape):
    found, parameters = [], {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                dense = isinstance(tensor, torch.Tensor) and sorted(tensor.shape) == sorted(shape)
                if dense and tensor.untyped_storage().data_ptr() not in parameters:
                    found.append(func)
            return out

    with Watch():
        model(**batch).logits.sum().backward()
    return len(found)


def test_names_that_peft_rewrites_double_the_rank():
    torch.manual_seed(0)
    base = tiny_model("qwen3_moe", **MOE)
    base.set_experts_implementation("eager")
    stock = get_peft_model(base, LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"])).train()
    stir(stock)
    ranks = {p.shape[0] // 4 for n, p in stock.named_parameters() if "experts" in n and "lora_A" in n}
    assert ranks == {4, 8}
    model = patch_model(copy.deepcopy(stock))
    assert_same(model, stock, batch_of())
    assert calls(model) == 2


def test_disabled_switched_and_several_adapters():
    stock = with_adapters("qwen3_moe")
    stock.add_adapter("other", LoraConfig(r=8, target_modules=["q_proj"], target_parameters=BOTH))
    stir(stock)
    model, batch = patch_model(copy.deepcopy(stock)), batch_of()

    def same():
        torch.testing.assert_close(model(**batch).logits, stock(**batch).logits, rtol=1e-4, atol=1e-5)

    same()
    with model.disable_adapter(), stock.disable_adapter():
        same()
    before = calls(model)
    model.set_adapter("other"), stock.set_adapter("other")
    same()
    assert calls(model) == before + 2
    model.base_model.set_adapter(["default", "other"]), stock.base_model.set_adapter(["default", "other"])
    same()
    assert counters(model)["lora on experts by PEFT: several adapters are active"] == 2


def test_merging_and_saving_stay_pefts(tmp_path):
    stock, batch = with_adapters("qwen3_moe"), batch_of()
    model = patch_model(copy.deepcopy(stock))
    expected = stock(**batch).logits
    model.save_pretrained(tmp_path)
    base = tiny_model("qwen3_moe", **MOE)
    base.load_state_dict({n.replace("base_layer.", ""): p for n, p in base_weights(stock).items()})
    again = PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(again(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    model.merge_adapter()
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-4, atol=1e-5)


def test_every_adapter_moves_in_three_steps():
    model = patch_model(with_adapters("gpt_oss"))
    adapters = {n: p for n, p in model.named_parameters() if "lora_" in n}
    before = {n: p.detach().clone() for n, p in adapters.items()}
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2)
    for _ in range(3):
        model(**batch_of(), labels=batch_of()["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [n for n, p in adapters.items() if torch.equal(p, before[n])] == []
    assert [n for n, p in model.named_parameters() if n in frozen and not torch.equal(p, frozen[n])] == []


def test_undone_copied_and_pickled():
    stock, batch = with_adapters("qwen3_moe"), batch_of()
    model = patch_model(copy.deepcopy(stock))
    copied = copy.deepcopy(model)
    copied(**batch)
    assert (calls(copied), calls(model)) == (2, 0)
    loaded = pickle.loads(pickle.dumps(model))
    expected = stock(**batch).logits
    torch.testing.assert_close(loaded(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    unpatch_model(model)
    assert torch.equal(model(**batch).logits, expected)
    for module in model.modules():
        assert "forward" not in module.__dict__ and not module._forward_pre_hooks


def test_hooks_inside_are_seen():
    stock = with_adapters("qwen3_moe")
    model = patch_model(copy.deepcopy(stock))
    seen = []
    model.get_base_model().model.layers[0].mlp.experts.get_base_layer().register_forward_hook(lambda *_: seen.append(1))
    assert_same(model, stock, batch_of())
    assert len(seen) == 1 and calls(model) == 1


def test_lora_can_be_left_to_peft():
    stock = with_adapters("qwen3_moe")
    model = patch_model(copy.deepcopy(stock), lora=False)
    assert_same(model, stock, batch_of())
    assert calls(model) == 0
