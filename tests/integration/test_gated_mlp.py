"""The fused MLP in models: equal to stock, asked anew at each call, and visibly stock where it cannot serve."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from patch_cases import counters, skipped_reasons
from peft import LoraConfig, get_peft_model
from tiny_models import packed_batch, tiny_model
from torch import nn

import fastft

LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


def adapted(model, **config):
    return get_peft_model(model, LoraConfig(**LORA | config))


def step(model, seed=0, **autocast):
    """Loss and gradients of one packed batch."""
    torch.manual_seed(seed)
    with torch.autocast("cpu", **({"dtype": torch.bfloat16} | autocast), enabled=bool(autocast)):
        loss = model(**packed_batch((5, 7, 3))).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach()} | found


def pair(family="llama", lora=None, **options):
    """Two equal patched models, one of which leaves MLPs to torch."""
    stock = tiny_model(family).train() if lora is None else adapted(tiny_model(family), **lora).train()
    fused = copy.deepcopy(stock)
    return fastft.patch_model(stock, gated_mlp=False, **options), fastft.patch_model(fused, **options)


def assert_same(found, expected, exact=True):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        tolerances = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerances)


def mlp_counts(model):
    return {name: count for name, count in counters(model).items() if "gated_mlp" in name}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "qwen2_moe"])
def test_trained_weights_get_the_same_gradients_to_the_bit(family):
    stock, fused = pair(family)
    assert_same(step(fused), step(stock))
    assert mlp_counts(fused) == {"gated_mlp": 2} and mlp_counts(stock) == {}


@pytest.mark.parametrize("targets", ["all-linear", ["down_proj"], ["gate_proj", "up_proj"], ["q_proj"]], ids=str)
def test_adapters_get_the_same_gradients(targets):
    """t is made of the product as PEFT makes it; sums of the frozen way are in another order."""
    stock, fused = pair(lora={"target_modules": targets})
    assert_same(step(fused), step(stock), exact=False)
    assert mlp_counts(fused) == {"gated_mlp": 2}


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new"])
def test_activations_of_configs(act):
    stock = tiny_model("llama", hidden_act=act).train()
    fused = copy.deepcopy(stock)
    fastft.patch_model(stock, gated_mlp=False)
    fastft.patch_model(fused, gated_mlp="reference")
    assert_same(step(fused), step(stock), exact=act != "gelu_new")


def test_an_activation_that_is_not_known_stays_stock_and_says_so():
    model = fastft.patch_model(tiny_model("llama", hidden_act="relu").train())
    reasons = {reason for (_, op), reason in skipped_reasons(model).items() if op == "gated_mlp"}
    assert reasons == {"its activation is a ReLU"}
    step(model)
    assert mlp_counts(model) == {"gated_mlp not fused: the activation is a ReLU": 2}
    with pytest.raises(fastft.errors.UnsupportedOptionError, match="ReLU"):
        fastft.patch_model(tiny_model("llama", hidden_act="relu"), gated_mlp="reference")


def test_an_activation_put_in_later_is_seen():
    model = fastft.patch_model(tiny_model("llama").train())
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    step(model)
    assert mlp_counts(model) == {"gated_mlp": 1, "gated_mlp not fused: the activation is a Tanh": 1}


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ({"use_dora": True}, "a LoRA variant is in use (DoraLinearVariant)"),
        ({"lora_dropout": 0.1}, "the adapter has dropout, and is in training"),
        ({"lora_bias": True, "target_modules": ["down_proj"]}, "lora_bias: the adapter has a bias"),
    ],
    ids=str,
)
def test_projections_that_are_not_fused_get_the_product(lora, reason):
    stock, fused = pair(lora=lora)
    assert_same(step(fused), step(stock), exact=False)
    assert mlp_counts(fused) == {"gated_mlp": 2, f"gated_mlp without the projection behind it: {reason}": 2}


def test_adapters_come_and_go():
    stock, fused = pair()
    for model in (stock, fused):
        step(model)
    stock, fused = (adapted(model) for model in (stock, fused))
    fused.load_state_dict(stock.state_dict())
    assert_same(step(fused), step(stock), exact=False)
    for change in ("disable_adapter_layers", "enable_adapter_layers", "merge_adapter", "unmerge_adapter"):
        for model in (stock, fused):
            getattr(model, change)()
            model.base_model.model.lm_head.weight.requires_grad_()  # or nothing would be trained without adapters
        assert_same(step(fused), step(stock), exact=False)
    for model in (stock, fused):
        model.base_model.model.model.layers[0].mlp.down_proj.scaling["default"] = 0.3
    assert_same(step(fused), step(stock), exact=False)


def test_hooks_see_the_modules_they_are_on():
    model = fastft.patch_model(tiny_model("llama").train())
    seen = []
    first, second = (layer.mlp for layer in model.model.layers)
    first.act_fn.register_forward_hook(lambda *args: seen.append("act_fn"))
    second.down_proj.register_forward_pre_hook(lambda *args: seen.append("down_proj"))
    step(model)
    assert seen == ["act_fn", "down_proj"]
    assert mlp_counts(model) == {
        "gated_mlp": 1,
        "gated_mlp not fused: a hook wants to see the activation": 1,
        "gated_mlp without the projection behind it: it has hooks or a forward of its own": 1,
    }


@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_mixed_precision(lora):
    """fp32 weights under bf16 autocast: the gradients of both ways differ by roundings of bf16."""
    stock, fused = pair(lora=lora)
    expected, found = step(stock, dtype=torch.bfloat16), step(fused, dtype=torch.bfloat16)
    assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in expected.items()}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.02 * value.abs().max().item())


@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
@pytest.mark.parametrize("options", [{}, {"checkpointing": "selective"}, {"checkpointing": "recompute"}], ids=str)
def test_checkpointed_layers(lora, options):
    plain = pair(lora=lora)[1]
    checkpointed = pair(lora=lora, **options)[1]
    checkpointed.load_state_dict(plain.state_dict())
    for model in (plain, checkpointed):
        model.enable_input_require_grads()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(step(checkpointed), step(plain))
    assert mlp_counts(checkpointed).keys() == {"gated_mlp"}


class Saved:
    """Bytes that autograd saves, each storage once, parameters not."""

    def __init__(self, model):
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages = {}

    def __call__(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept: an address is used again otherwise
        return tensor

    @property
    def bytes(self):
        return sum(size for size, _ in self.storages.values())


def test_a_layer_saves_at_most_three_fifths_of_stock(device):
    """Shapes of Llama-3.2-1B, one layer, LoRA on all linear layers, bf16 weights under autocast.

    Plain torch, which a CPU gets by itself, keeps an fp32 copy of what a norm normalises; the kernels do not.
    """
    shapes = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "num_hidden_layers": 1,
    }  # fmt: skip
    found = {}
    for name in ("stock", "fused"):
        model = adapted(tiny_model("llama", **shapes).to(device, torch.bfloat16), init_lora_weights=True).train()
        model.enable_input_require_grads()
        if name == "fused":
            fastft.patch_model(model, rms_norm="triton")
        layer = model.base_model.model.model.layers[0]
        saved = Saved(model)
        hooks = torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x)
        layer.register_forward_pre_hook(lambda *args, hooks=hooks: hooks.__enter__())
        layer.register_forward_hook(lambda *args, hooks=hooks: hooks.__exit__())
        with torch.autocast(device.type, dtype=torch.bfloat16):
            model(**{key: value.to(device) for key, value in packed_batch((33, 31)).items()})
        found[name] = saved.bytes / 64
    assert 0 < found["fused"] <= 0.6 * found["stock"], found


@pytest.mark.parametrize("whole", [False, True])
def test_a_backward_within_another_one(whole):
    """The gradient of a weight is there before that of what it was multiplied by."""
    stock, fused = pair()
    results = []
    for model in (stock, fused):
        weight, busy = model.model.layers[0].mlp.down_proj.weight, []
        inner = list(model.parameters()) if whole else [weight]
        loss = model(**packed_batch((5, 7, 3))).loss

        def within(grad, busy=busy, inner=inner, loss=loss):
            if not busy:
                busy.append(1)
                torch.autograd.grad(loss, inner, torch.tensor(3.0), retain_graph=True)

        weight.register_hook(within)
        loss.backward(retain_graph=True)
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(results[1], results[0])


def test_backwards_in_threads():
    _, model = pair()
    parameters = list(model.parameters())
    loss = model(**packed_batch((5, 7, 3))).loss
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    found = {}

    def work(number):
        found[number] = [
            torch.autograd.grad(loss, parameters, torch.tensor(float(number)), retain_graph=True) for _ in range(10)
        ]

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, several in found.items():
        for grads in several:
            assert all(torch.equal(grad, number * other) for grad, other in zip(grads, expected, strict=True))


def test_what_the_op_does_not_serve_is_stock():
    stock = tiny_model("llama", attn_implementation="eager").eval()
    model = fastft.patch_model(copy.deepcopy(stock), rms_norm=False, rope=False, lora=False)
    ids = packed_batch((9,))["input_ids"]
    name = "model.layers.0.mlp.down_proj.weight"
    weights = torch.stack([stock.get_parameter(name).detach(), 2 * stock.get_parameter(name).detach()])

    def logits(each, weight):
        return torch.func.functional_call(each, {name: weight}, (ids,), {"use_cache": False}).logits

    found, expected = (torch.func.vmap(lambda w, each=each: logits(each, w))(weights) for each in (model, stock))
    torch.testing.assert_close(found, expected)
    for each in (model, stock):
        down = each.model.layers[0].mlp.down_proj
        weight = down.weight.detach()
        del down.weight
        down.weight = weight  # as FSDP leaves it
    assert torch.equal(model(ids).logits, stock(ids).logits)
    assert any("not a plain parameter" in reason for reason in mlp_counts(model))
