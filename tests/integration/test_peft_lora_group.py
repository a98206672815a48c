"""Several LoRA projections of one input through LoRAProjector, against PEFT's own forwards, as adapters change."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from lora_cases import halve, randomize
from peft import LoraConfig, get_peft_model
from torch import nn

from fastft.integrations.peft import NOT_LORA, LoRAProjector

K, N = 24, 40
# PEFT rounds the update, and scaling times it, before it adds it.
BF16_TOLERANCE = 0.02


class Attention(nn.Module):
    """Three projections of one input, of different widths."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(K, N), nn.Linear(K, 16, bias=False), nn.Linear(K, 24)

    def projections(self):
        return self.q_proj, self.k_proj, self.v_proj

    def forward(self, x):
        return torch.cat([projection(x) for projection in self.projections()], -1)


def attention(**config):
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj", "v_proj"]} | config
    model = get_peft_model(Attention(), LoraConfig(**config))
    randomize(model)
    return model, model.base_model.model


def group_results(model, ys, x):
    model.zero_grad()
    x.grad = None
    sum((i + 1) * y.float().square().sum() for i, y in enumerate(ys)).backward()
    found = {f"y{i}": y.detach() for i, y in enumerate(ys)} | {"x": x.grad}
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_group(model, block, projector, reasons=(None, None, None), tolerance=1e-5):
    x = torch.randn(3, 5, K, requires_grad=True)
    expected = group_results(model, [module(x) for module in block.projections()], x)
    ys, found_reasons = projector(block.projections(), x)
    assert len(found_reasons) == len(reasons)
    for found, reason in zip(found_reasons, reasons, strict=True):
        assert found is None if reason is None else found is not None and reason in found, found_reasons
    found = group_results(model, ys, x)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm() / value.double().norm()
        assert found[name].dtype == value.dtype and error <= tolerance, f"{name}: relative error {error:.2e}"
    return ys


@pytest.mark.parametrize(
    "config", [{}, {"rank_pattern": {"q_proj": 7, "v_proj": 1}, "alpha_pattern": {"k_proj": 3}}], ids=str
)
@pytest.mark.parametrize("autocast", [False, True])
def test_group(config, autocast):
    model, block = attention(**config)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ys = check_group(model, block, LoRAProjector(), tolerance=BF16_TOLERANCE if autocast else 1e-5)
    assert len({y.grad_fn for y in ys}) == 1


def test_group_mutant_is_caught(monkeypatch):
    model, block = attention()
    halve(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(AssertionError):
        check_group(model, block, LoRAProjector(), tolerance=BF16_TOLERANCE)


def test_group_in_part():
    """What cannot be fused leaves the others together."""
    model, block = attention(target_modules=["q_proj", "v_proj"])
    q, _, v = check_group(model, block, LoRAProjector(), (None, NOT_LORA, None))
    assert q.grad_fn is v.grad_fn
    model, block = attention()
    with block.q_proj.register_forward_hook(lambda *_: None):
        _, k, v = check_group(model, block, LoRAProjector(), ("hooks", None, None))
    assert k.grad_fn is v.grad_fn
    with model.disable_adapter():
        ys, reasons = LoRAProjector()(block.projections(), torch.randn(2, K))
        assert reasons == ["adapters are disabled"] * 3 and len(ys) == 3


def test_group_without_tokens():
    _, block = attention()
    ys, reasons = LoRAProjector()(block.projections(), torch.zeros(0, K))
    assert [tuple(y.shape) for y in ys] == [(0, N), (0, 16), (0, 24)] and "no tokens" in reasons[0]


def check_autocast_group(model, block, projector):
    # A context each time: torch keeps autocast's own copies for as long as one lasts, so PEFT would miss changes.
    with torch.autocast("cpu", torch.bfloat16):
        check_group(model, block, projector, tolerance=BF16_TOLERANCE)


OPTIMIZERS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_group_follows_the_optimizer(options):
    """A fused optimizer does not count up the version of what it changes."""
    model, block = attention()
    projector = LoRAProjector()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.5, **options)
    for _ in range(3):
        check_autocast_group(model, block, projector)
        with torch.autocast("cpu", torch.bfloat16):
            projector(block.projections(), torch.randn(2, K))  # between backward and the step
        optimizer.step()
        check_autocast_group(model, block, projector)


def test_group_follows_every_other_change():
    model, block = attention()
    projector = LoRAProjector()
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items() if "lora_" in name}
    model.add_adapter("second", LoraConfig(r=3, target_modules=["q_proj", "k_proj", "v_proj"]))
    randomize(model)
    check_autocast_group(model, block, projector)
    model.load_state_dict(state, strict=False)
    check_autocast_group(model, block, projector)
    for name in ("second", "default"):
        model.set_adapter(name)
        check_autocast_group(model, block, projector)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    check_autocast_group(model, block, projector)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    check_autocast_group(model, block, projector)
    assert len(projector._casts) == 2
    model.delete_adapter("second")
    gc.collect()
    assert len(projector._casts) == 1


def test_a_copied_projector_is_empty():
    _, block = attention()
    projector = LoRAProjector()
    with torch.autocast("cpu", torch.bfloat16):
        projector(block.projections(), torch.randn(2, K))
    assert len(projector._casts) == 1
    for copied in (copy.deepcopy(projector), copy.copy(projector), pickle.loads(pickle.dumps(projector))):
        assert type(copied) is LoRAProjector and len(copied._casts) == 0 and copied._casts is not projector._casts
