"""Projections as patched modules call them: with their LoRA adapters fused where that computes the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module

from ..ops.gated_mlp import gated, gated_linear
from ..ops.products import AUTOCAST_DTYPES
from .activation import activation_of
from .state import ModelState


def project(shared: ModelState, projections: tuple[nn.Module, ...], x: torch.Tensor) -> list[torch.Tensor]:
    """`[projection(x) for projection in projections]`, with the adapters of all of them in common GEMMs.

    What is at hand is looked at on each call, because adapters come and go after patching.
    """
    projector = shared.projector
    if projector is None or not any("lora_A" in projection.__dict__["_modules"] for projection in projections):
        return [projection(x) for projection in projections]
    outputs, reasons = projector(projections, x)
    for projection, reason in zip(projections, reasons, strict=True):
        if reason is None:
            shared.counters["lora"] += 1
        elif "lora_A" in projection.__dict__["_modules"]:  # without an adapter there was nothing to fuse
            shared.counters[f"lora not fused: {reason}"] += 1
    return outputs


def project_gated(
    shared: ModelState, projection: nn.Module, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> torch.Tensor:
    """`projection(act(gate) * up)`, where the product is not kept for backward if the projection is one of ours."""
    impl, lora, tape = str(shared.config.gated_mlp), shared.projector, shared.tape
    if tape is not None:
        tape.passes(gate.nbytes)
    shared.counters["gated_mlp"] += 1
    if lora is not None and "lora_A" in projection.__dict__["_modules"]:
        found = lora.gated(projection, gate, up, activation, impl)
        if not isinstance(found, str):
            shared.counters["lora"] += 1
            return found
        reason = found
        shared.counters[f"lora not fused: {reason}"] += 1
    else:
        layer = _plain_linear(projection, gate)
        if not isinstance(layer, str):
            return gated_linear(gate, up, activation, *layer, impl=impl)
        reason = layer
    shared.counters[f"gated_mlp without the projection behind it: {reason}"] += 1
    product = gated(gate, up, activation, impl=impl)
    if tape is not None:
        tape.made(product, "activation", lambda gate, up: gated(gate, up, activation, impl=impl), gate, up)
    found = projection(product)
    assert isinstance(found, torch.Tensor)
    return found


def why_not_gated(activation: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> str:
    """Why the product of an activation and a second half is left to torch, or ""."""
    if activation_of(activation) is None:
        return f"the activation is a {type(activation).__name__}"
    if has_global_hooks() or is_intercepted((activation.__dict__,)):
        return "a hook wants to see the activation"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func transforms the model, or it is differentiated forward"
    if torch.jit.is_tracing():
        return "torch.jit traces the model"
    if type(gate) is not torch.Tensor or type(up) is not torch.Tensor:
        return f"a projection gives a {type(gate).__name__} and a {type(up).__name__}, not plain tensors"
    if gate.dtype != up.dtype or gate.shape != up.shape:
        return "the two projections differ in dtype or shape"
    return "the tensors are on the meta device" if gate.device.type == "meta" else ""


def _plain_linear(module: nn.Module, x: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter | None] | str:
    """Weight and bias if F.linear, under the autocast of the moment, is all that module(x) does, or why it is not."""
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}"
    if has_global_hooks() or is_intercepted((module.__dict__,)):
        return "it has hooks or a forward of its own"
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if type(weight) is not nn.Parameter or (bias is not None and type(bias) is not nn.Parameter):
        return "its weight is not a plain parameter (sharded, quantized or replaced)"
    parameters = [weight] if bias is None else [weight, bias]
    if any(parameter.device != x.device for parameter in parameters):
        return "its weight is not on the input's device"
    dtypes = {x.dtype, *(parameter.dtype for parameter in parameters)}
    autocast = torch.is_autocast_enabled(x.device.type)
    if not (AUTOCAST_DTYPES.issuperset(dtypes) if autocast else len(dtypes) == 1):
        return "dtypes differ" if not autocast else "a dtype that autocast does not cast"
    return weight, bias


def is_repeatable(projections: tuple[nn.Module, ...]) -> bool:
    """Whether the projections give the same values when they are called again: no dropout, no code of others."""
    return not has_global_hooks() and all(map(_is_repeatable, projections))


def is_repeatable_activation(activation: Any) -> bool:
    """Whether an activation is one that is known to draw no random numbers, with no code of others."""
    known = type(activation).__module__ in ("torch.nn.modules.activation", "transformers.activations")
    return known and type(activation) is not nn.RReLU and not has_global_hooks() and not _is_changed(activation)


def _is_repeatable(projection: nn.Module) -> bool:
    if any(map(_is_changed, projection.modules())):
        return False
    if type(projection) is nn.Linear:
        return True
    base, dropouts = getattr(projection, "base_layer", None), getattr(projection, "lora_dropout", None)
    if type(base) is not nn.Linear or dropouts is None:
        return False
    return all(isinstance(dropout, nn.Identity) or not dropout.training for dropout in dropouts.values())


def _is_changed(module: nn.Module) -> bool:
    return is_intercepted((module.__dict__,))


def is_intercepted(states: tuple[dict[str, Any], ...]) -> bool:
    """Whether somebody wants to see a module being called: a hook, accelerate's forward, a compiled call."""
    for state in states:  # no generator: this loop is the larger part of the time a projection costs
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "forward" in state
            or "_compiled_call_impl" in state
        ):
            return True
    return False


def has_global_hooks() -> bool:
    return bool(nn_module._has_any_global_hook())
