"""PEFT's LoRA on experts: its `ParamWrapper`s around a module of transformers' experts interface.

PEFT makes W + scaling * B A of the whole stack in each forward, saves it, and makes a gradient of that size to get
those of A and B. The forward bound here hands the factors to the experts' op. PEFT wraps experts when it likes, so a
hook of the layer around them looks for new wrappers at each call; merging, saving and switching stay PEFT's, and which
adapter is active is asked at each call. PEFT is never imported from here: a model with a wrapper has done it.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import nn

from ..modules.expert_layout import ExpertLayout, asks_interface, read_layout, why_not_experts
from ..modules.experts import Adapters, ExpertsName, run, why_not_now
from ..modules.projection import is_intercepted
from ..modules.state import ATTRIBUTE, ModuleState, state_of
from ..ops.moe import ExpertAdapter

KIND = "expert_adapter"
_CACHING = "bitsandbytes.nn.parametrize"
# Where the factors of each parameter go in the op.
_PLACES = {"gate_up_proj": 0, "down_proj": 1}


def is_wrapper(module: nn.Module | None) -> bool:
    """Whether this is PEFT's wrapper of a parameter."""
    lora_layer = sys.modules.get("peft.tuners.lora.layer")
    return lora_layer is not None and type(module) is getattr(lora_layer, "ParamWrapper", None)


def wrapped_experts(module: Any) -> nn.Module | None:
    """The experts inside of a wrapper, or of wrappers in one another; None if these hold something else."""
    if not is_wrapper(module):
        return None
    while is_wrapper(module):
        module = module.base_layer
    return module if asks_interface(module) else None


def adopt(block: nn.Module, *_: Any) -> None:
    """A hook before the forward of a layer with experts: binds wrappers that PEFT put around them since patching."""
    for child in block.children():
        if not is_wrapper(child) or "forward" in child.__dict__:
            continue
        state = state_of(wrapped_experts(child) or child)
        if state is not None and state.shared.config.lora is not False:
            bind(child, state)


def bind(wrapper: nn.Module, state: ModuleState) -> None:
    """`state` is of the model."""
    wrapper.__dict__[ATTRIBUTE] = ModuleState(state.shared, KIND, None, bound=True)
    wrapper.__dict__["forward"] = types.MethodType(forward, wrapper)


def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The experts with their active adapters: x [T, H], then the experts and weights of the router, [T, K] each."""
    shared = self.__dict__[ATTRIBUTE].shared
    found = _find(self, x, kwargs)
    if isinstance(found, str):
        shared.counters[f"lora on experts by PEFT: {found}"] += 1
        try:
            return type(self).forward(self, x, *args, **kwargs)
        finally:
            _remove_leftovers(self)
    shared.counters["lora on experts"] += 1
    layout, adapters = found
    return run(shared, layout, adapters, x, *args, **kwargs)


def _find(wrapper: Any, x: torch.Tensor, kwargs: dict[str, Any]) -> tuple[ExpertLayout, Adapters] | str:
    """The experts' own weights and the factors beside them, or why PEFT's own forward has to run."""
    if torch.compiler.is_compiling() or "adapter_names" in kwargs:
        return "torch.compile is tracing" if torch.compiler.is_compiling() else "adapters are chosen by row"
    adapters: list[ExpertAdapter | None] = [None, None]
    module, outermost = wrapper, wrapper
    wrappers = []
    while is_wrapper(module):
        if module is not outermost and is_intercepted((module.__dict__,)):
            return "a wrapper has hooks or a forward of its own"
        wrappers.append(module)
        module = module.base_layer
    state = state_of(module)
    if state is None or state.kind != "experts":
        return "the experts are not patched; call fastft.patch_model(model) again"
    if not isinstance(module.config._experts_implementation, ExpertsName):
        return f"{module.config._experts_implementation!r} was selected after patching"
    if is_intercepted((_without_caching(module),)):
        return "the experts have hooks or a forward of their own"
    if why_not_experts(module, state.shared.read_packed):
        return "the experts have changed since patching"
    layout = read_layout(module, state.shared.read_packed)
    for each in wrappers:
        place = _PLACES.get(each.parameter_name)
        adapter = _adapter(each, bool(module.is_transposed), layout.weights.gate_up.dtype)
        if isinstance(adapter, str):
            return adapter
        if adapter is not None and (place is None or adapters[place] is not None):
            return f"an adapter of {each.parameter_name}" if place is None else "two adapters of one parameter"
        if place is not None and adapter is not None:
            adapters[place] = adapter
    problem = why_not_now(layout, x)
    return problem or (layout, (adapters[0], adapters[1]))


def _without_caching(module: nn.Module) -> dict[str, Any]:
    """What bitsandbytes hangs on 4-bit experts only keeps what it has made during a call."""
    state = dict(module.__dict__)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        state[name] = [hook for hook in state[name].values() if getattr(hook, "__module__", "") != _CACHING]
    return state


def _remove_leftovers(wrapper: Any) -> None:
    """PEFT does not find the proxy that it put over a parameter which was parametrized before, and adds another one in
    the next forward: then the adapter counts twice."""
    proxy = getattr(sys.modules["peft.tuners.lora.layer"], "_LoraFactorsProxy", None)
    for entries in (wrapper.get_base_layer()._modules.get("parametrizations") or {}).values():
        for index in reversed(range(len(entries))):
            if proxy is not None and type(entries[index]) is proxy:
                del entries[index]


def _adapter(wrapper: Any, transposed: bool, dtype: torch.dtype) -> ExpertAdapter | str | None:
    """The factors of the one active adapter, from input to output; None without one, or why it is PEFT's."""
    if wrapper.disable_adapters:
        return "adapters are disabled, and merged" if wrapper.merged else None
    if wrapper.merged:
        return None  # it is in the weight
    active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if len(active) != 1:
        return "several adapters are active" if active else None
    if wrapper.num_experts == 1:
        return "PEFT takes it for one layer"
    if active[0] in wrapper.lora_variant:
        return "a LoRA variant is in use"
    if is_intercepted((wrapper.lora_A[active[0]].__dict__, wrapper.lora_B[active[0]].__dict__)):
        return "a factor has hooks or a forward of its own"
    return _factors(wrapper, active[0], transposed, dtype)


def _factors(wrapper: Any, name: str, transposed: bool, dtype: torch.dtype) -> ExpertAdapter:
    """A and B of each expert, from input to output, in the dtype of the weight."""
    A, B, experts = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    A = A.view(experts, -1, A.shape[1])  # expert by expert: [E, r, in]
    B = B.view(B.shape[0], -1, experts).permute(2, 0, 1)  # rank by rank: [E, out, r]
    # PEFT's in and out are those of the parameter as it lies, unless it has swapped them: W + B A, or W + (B A)^T.
    left, right = (B, A) if wrapper._did_swap_in_out_features else (A.mT, B.mT)
    A, B = (left, right) if transposed else (right.mT, left.mT)
    # B lies with the experts next to each other in memory: kernels would read one number of each line.
    return ExpertAdapter(A.to(dtype), B.to(dtype).contiguous(), float(wrapper.scaling[name]))
