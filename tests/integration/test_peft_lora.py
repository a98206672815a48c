"""The fused LoRA projection against PEFT's own forward: every state an adapter can be in, and which path ran."""

from __future__ import annotations

import copy
import subprocess
import sys

import peft
import pytest
import torch
from lora_cases import fused_lora, halve, project, randomize
from peft import LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting, rescale_adapter_scale
from torch import nn

from fastft.errors import UnsupportedOptionError
from fastft.integrations.peft import NOT_LORA, LoRAProjection, LoRAProjector

K, N = 24, 40
# PEFT rounds the update, and scaling times it, before it adds it: a few bf16 roundings, through two layers and back.
BF16_TOLERANCE = 0.02


class Block(nn.Module):
    """Two projections with adapters and one without."""

    def __init__(self, bias=False):
        super().__init__()
        self.q_proj = nn.Linear(K, N, bias=bias)
        self.o_proj = nn.Linear(N, K, bias=bias)
        self.head = nn.Linear(K, 7)

    def forward(self, x):
        return self.head(self.o_proj(torch.tanh(self.q_proj(x))))


def wrapped(bias=False, dtype=None, **config):
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj"]} | config
    block = Block(bias).to(dtype)
    model = get_peft_model(block, LoraConfig(**config))
    randomize(model)
    return model, block


def results(model, block, call, dtype=torch.float32):
    """Output, gradients of x and of all adapters, and why each projection fell back."""
    x = torch.randn(3, 5, K, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    model.zero_grad()
    reasons = []
    hidden = call(block.q_proj, x, reasons)
    y = call(block.head, call(block.o_proj, torch.tanh(hidden), reasons), [])
    y.float().square().sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, reasons


def by_peft(module, x, reasons):
    return module(x)


def by_fastft(module, x, reasons):
    y, reason = project(module, x, lambda: reasons.append(None))
    if reason is not None:
        reasons.append(reason)
    return y


def check(model, block, reason=None, count=2, tolerance=1e-5, dtype=torch.float32):
    """Equal results, and the path that is expected: `reason` None for the fused one, otherwise text in the reason."""
    torch.manual_seed(3)  # of dropout
    expected, _ = results(model, block, by_peft, dtype)
    torch.manual_seed(3)
    found, reasons = results(model, block, by_fastft, dtype)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm() / value.double().norm()
        assert found[name].dtype == value.dtype and error <= tolerance, f"{name}: relative error {error:.2e}"
    assert len(reasons) == count
    for given in reasons:
        assert given is None if reason is None else given is not None and reason in given, reasons


def by_name_is_refused(module, reason):
    with pytest.raises(UnsupportedOptionError, match=f"lora='fused' cannot be honoured.*{reason}.*use lora='auto'"):
        LoRAProjector(by_name=True)((module,), torch.zeros(1, K))


def test_plain():
    check(*wrapped())


def test_no_update_is_caught(monkeypatch):
    """The comparison has to notice a wrong update."""
    model, block = wrapped()

    halve(monkeypatch)
    with pytest.raises(AssertionError):
        check(model, block)


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"o_proj": 3}},
        {"init_lora_weights": "olora"},
        {"fan_in_fan_out": False, "lora_dropout": 0.0},
    ],
    ids=str,
)
def test_configurations(config):
    check(*wrapped(**config))


def test_biased_base():
    check(*wrapped(bias=True))


def test_scaling_changed_at_run_time():
    model, block = wrapped()
    block.q_proj.set_scale("default", 3)
    block.o_proj.scale_layer(0.3)
    check(model, block)
    assert fused_lora(block.q_proj, torch.zeros(1, K)).scaling == 3 * 6 / 4
    with rescale_adapter_scale(model, 0.5):
        check(model, block)


def test_scaling_that_is_a_tensor():
    model, block = wrapped()
    block.q_proj.scaling["default"] = block.o_proj.scaling["default"] = torch.tensor(1.5)
    check(model, block, "scaling is a Tensor")


def test_dropout():
    model, block = wrapped(lora_dropout=0.4)
    check(model.train(), block, "dropout")
    by_name_is_refused(block.q_proj, "dropout")
    check(model.eval(), block)
    assert LoRAProjector(by_name=True)((block.q_proj,), torch.zeros(1, K))[1] == [None]


def test_by_name_leaves_what_passes_to_peft():
    """A context or a hook is no reason to stop a run, and neither is a projection without an adapter."""
    model, block = wrapped()
    projector = copy.deepcopy(LoRAProjector(by_name=True))
    with model.disable_adapter():
        assert projector((block.q_proj,), torch.zeros(1, K))[1] == ["adapters are disabled"]
    with block.q_proj.register_forward_hook(lambda *_: None):
        assert "hooks" in projector((block.q_proj,), torch.zeros(1, K))[1][0]
    assert projector((block.head,), torch.zeros(1, K))[1] == [NOT_LORA]
    block.q_proj.fan_in_fan_out = True
    with pytest.raises(UnsupportedOptionError, match="fan_in_fan_out"):
        projector((block.q_proj,), torch.zeros(1, K))


def test_disabled():
    model, block = wrapped()
    with model.disable_adapter():
        expected, _ = results(model, block, by_peft)
        found, reasons = results(model, block, by_fastft)
        torch.testing.assert_close(found["y"], expected["y"])
        assert reasons == ["adapters are disabled"] * 2
    check(model, block)


def test_merged():
    model, block = wrapped()
    model.merge_adapter()
    check(model, block, "merged")
    model.unmerge_adapter()
    check(model, block, tolerance=1e-4)


def test_merged_and_disabled_unmerges():
    """PEFT unmerges as a side effect of a disabled forward; it has to happen."""
    model, block = wrapped()
    model.merge_adapter()
    with model.disable_adapter():
        project(block.q_proj, torch.zeros(1, K))
    assert not block.q_proj.merged


def test_several_adapters():
    model, block = wrapped()
    model.add_adapter("second", LoraConfig(r=3, target_modules=["q_proj", "o_proj"]))
    randomize(model)
    check(model, block)
    model.set_adapter("second")
    check(model, block)
    assert fused_lora(block.q_proj, torch.zeros(1, K)).lora_A.shape == (3, K)
    model.base_model.set_adapter(["default", "second"])
    check(model, block, "several adapters")
    model.set_adapter("default")
    check(model, block)


def test_adapter_of_another_layer():
    """Of two active adapters PEFT runs those that the layer has."""
    model, block = wrapped()
    model.add_adapter("second", LoraConfig(r=3, target_modules=["q_proj"]))
    model.base_model.set_adapter("second")
    assert isinstance(fused_lora(block.q_proj, torch.zeros(1, K)), LoRAProjection)
    assert "no active adapter" in fused_lora(block.o_proj, torch.zeros(1, N))
    model.base_model.set_adapter(["default", "second"])
    assert "several" in fused_lora(block.q_proj, torch.zeros(1, K))
    assert isinstance(fused_lora(block.o_proj, torch.zeros(1, N)), LoRAProjection)
    expected, _ = results(model, block, by_peft)
    found, _ = results(model, block, by_fastft)
    torch.testing.assert_close(found["y"], expected["y"])


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"use_dora": True}, "variant is in use (Dora"), ({"lora_bias": True}, "lora_bias")],
    ids=["dora", "lora_bias"],
)
def test_what_only_peft_can(config, reason):
    model, block = wrapped(bias=True, **config)
    check(model, block, reason)
    by_name_is_refused(block.q_proj, reason.replace("(", "."))


PARTS = {
    "the LoRA layer": lambda layer: layer,
    "base_layer": lambda layer: layer.base_layer,
    "lora_A": lambda layer: layer.lora_A["default"],
    "lora_B": lambda layer: layer.lora_B["default"],
    "lora_dropout": lambda layer: layer.lora_dropout["default"],
}
HOOKS = {
    "forward": lambda part, hook: part.register_forward_hook(hook),
    "forward_pre": lambda part, hook: part.register_forward_pre_hook(hook),
    "full_backward": lambda part, hook: part.register_full_backward_hook(hook),
    "full_backward_pre": lambda part, hook: part.register_full_backward_pre_hook(hook),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("part", PARTS)
def test_hooks_run(part, register):
    model, block = wrapped()
    calls = []
    handles = [
        register(PARTS[part](layer), lambda *args: calls.append(args[0]) and None)
        for layer in (block.q_proj, block.o_proj)
    ]
    check(model, block, f"{part} has hooks")
    assert len(calls) == 4  # two layers, by PEFT and by fastft
    for handle in handles:
        handle.remove()
    check(model, block)
    assert len(calls) == 4


def test_global_hooks_run():
    model, block = wrapped()
    calls = []
    with nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module)):
        check(model, block, "all modules")
    assert calls.count(block.q_proj.lora_B["default"]) == 2
    check(model, block)


@pytest.mark.parametrize(("slot", "original"), [("forward", "forward"), ("_compiled_call_impl", "_call_impl")])
@pytest.mark.parametrize("part", PARTS)
def test_a_forward_or_call_of_its_own_runs(part, slot, original):
    """accelerate puts its hooks into the one, `module.compile()` its code into the other."""
    model, block = wrapped()
    calls = []
    for layer in (block.q_proj, block.o_proj):
        target = PARTS[part](layer)
        call = getattr(target, original)
        setattr(target, slot, lambda *args, call=call: calls.append(1) or call(*args))
    check(model, block, f"{part} has hooks or a forward of its own")
    assert len(calls) == 4


class TimesTwo(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("part", ["base_layer", "lora_A"])
def test_parametrized(part):
    model, block = wrapped()
    for layer in (block.q_proj, block.o_proj):
        nn.utils.parametrize.register_parametrization(PARTS[part](layer), "weight", TimesTwo())
    check(model, block, "ParametrizedLinear")


def test_subclasses_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model, block = wrapped()
    for layer in (block.q_proj, block.o_proj):
        layer.base_layer.__class__ = Scaled
    check(model, block, "base layer is a Scaled")
    by_name_is_refused(block.q_proj, "base layer is a Scaled")


def test_weights_that_are_no_plain_parameters():
    class Quantized(torch.Tensor):
        pass

    _, block = wrapped()
    x = torch.randn(2, K)
    assert "not a plain tensor" in fused_lora(block.q_proj, x.as_subclass(Quantized))
    assert "device" in fused_lora(block.q_proj, x.to("meta"))
    weight = block.q_proj.base_layer.weight.detach().as_subclass(Quantized)
    block.q_proj.base_layer.weight = nn.Parameter(weight, requires_grad=False)
    assert "plain parameter" in fused_lora(block.q_proj, x)


@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_with_fp32_adapters(base_dtype):
    """As TRL trains."""
    model, block = wrapped(bias=True, dtype=base_dtype)
    assert block.q_proj.lora_A["default"].weight.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        check(model, block, tolerance=BF16_TOLERANCE, dtype=base_dtype)
        with disable_input_dtype_casting(model):
            check(model, block, tolerance=BF16_TOLERANCE, dtype=base_dtype)


def test_adapters_of_the_base_dtype():
    model, block = wrapped(dtype=torch.bfloat16)
    check(model.to(torch.bfloat16), block, tolerance=BF16_TOLERANCE, dtype=torch.bfloat16)


def test_fp32_adapters_without_autocast():
    """PEFT computes the update in fp32 then, and so does not the fused op."""
    model, block = wrapped(dtype=torch.bfloat16)
    block.head.to(torch.bfloat16)
    check(model, block, "dtypes differ", dtype=torch.bfloat16)


def test_dtypes_that_autocast_does_not_reach():
    model, block = wrapped()
    x = torch.randn(2, K)
    with torch.autocast("cpu", torch.bfloat16):
        block.q_proj.lora_A["default"].half()
        assert "rounds the input" in fused_lora(block.q_proj, x)
        with disable_input_dtype_casting(model):
            assert isinstance(fused_lora(block.q_proj, x), LoRAProjection)
        block.q_proj.double()
        assert "autocast does not cast" in fused_lora(block.q_proj, x)


def test_projections_without_an_adapter():
    _, block = wrapped()
    x = torch.randn(2, K)
    y, reason = project(block.head, x)
    assert reason == NOT_LORA and torch.equal(y, block.head(x))


def test_subclass_of_the_lora_layer():
    _, block = wrapped()

    class Custom(peft.tuners.lora.layer.Linear):
        pass

    block.q_proj.__class__ = Custom
    assert fused_lora(block.q_proj, torch.zeros(1, K)) == "a LoRA layer of another kind (Custom)"
    by_name_is_refused(block.q_proj, "another kind .Custom.")


def test_a_copied_model():
    model, _ = wrapped()
    copied = copy.deepcopy(model)
    check(copied, copied.base_model.model)


def test_compiling_is_left_to_peft(monkeypatch):
    _, block = wrapped()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "torch.compile" in fused_lora(block.q_proj, torch.zeros(1, K))


def test_peft_is_not_imported():
    code = (
        "import sys, torch; from fastft.integrations.peft import NOT_LORA, LoRAProjector; "
        "layer = torch.nn.Linear(3, 4); (y,), (reason,) = LoRAProjector()((layer,), torch.ones(2, 3)); "
        "assert reason == NOT_LORA and y.shape == (2, 4); assert 'peft' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
