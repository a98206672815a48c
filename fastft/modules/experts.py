"""The experts of sparse layers: the function registered with transformers as "fastft".

It serves the experts of a patched model. Everything else (other models that were given a copy of a patched model's
config, torch.compile, weights in forms that fastft does not read) goes to the implementation that was there before,
whose name the config's own value carries.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..errors import FastftError
from ..ops import moe
from ..ops.packed_weight import PackedWeight
from .dynamo import treat_as_constants
from .expert_layout import ExpertLayout, eager_forward, read_layout
from .names import NAME, ImplementationName
from .state import ModelState, state_of

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

Adapters = tuple[moe.ExpertAdapter | None, moe.ExpertAdapter | None]
_READ = (torch.Tensor, torch.nn.Parameter, PackedWeight)


class ExpertsName(ImplementationName):
    """Of a config's `_experts_implementation`."""


def register() -> None:
    """Makes the name "fastft" known to transformers. Harmless to other models, and to be repeated."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, fastft_experts)
    treat_as_constants(ExpertsName)


def fastft_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts as transformers calls them: hidden_states [T, H], top_k_index and top_k_weights [T, K] to [T, H]."""
    state = state_of(module)
    if state is None or state.kind != "experts" or torch.compiler.is_compiling():
        return _delegate(module, hidden_states, top_k_index, top_k_weights)
    layout = read_layout(module, state.shared.read_packed)
    problem = why_not_now(layout, hidden_states)
    if problem:
        state.shared.counters[f"experts by the previous implementation: {problem}"] += 1
        return _delegate(module, hidden_states, top_k_index, top_k_weights)
    return run(state.shared, layout, (None, None), hidden_states, top_k_index, top_k_weights)


def run(
    shared: ModelState,
    layout: ExpertLayout,
    adapters: Adapters,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The experts by fastft's op. As transformers does it, under autocast too, in the dtype of the weights."""
    weights, impl = layout.weights, str(shared.config.experts)
    chosen = moe.resolve(weights.gate_up.device, weights.gate_up.dtype, moe.is_aligned(weights), impl).impl
    shared.counters[f"experts: {chosen}"] += 1
    hidden = hidden_states.to(weights.gate_up.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        out = moe.experts(hidden, top_k_index, top_k_weights, weights, layout.gate, adapters=adapters, impl=chosen)
    return out.to(hidden_states.dtype)


def why_not_now(layout: ExpertLayout, hidden_states: torch.Tensor) -> str:
    """Why this call is not fastft's, or ""."""
    if is_wrapped(hidden_states):
        return "torch.func takes the gradients"
    for weight in layout.weights:
        if weight is None:
            continue
        if isinstance(weight, torch.Tensor) and is_wrapped(weight):
            return "torch.func takes the gradients"
        if type(weight) not in _READ:
            return f"weights are {type(weight).__name__}"
        if weight.dtype != layout.weights.gate_up.dtype or weight.device != hidden_states.device:
            return "weights differ in dtype, or are on another device"
    return "" if hidden_states.ndim == 2 else "hidden states are not [tokens, hidden]"


def _delegate(module: Any, *args: torch.Tensor) -> torch.Tensor:
    name = module.config._experts_implementation
    if not isinstance(name, ExpertsName):
        raise FastftError(
            f'experts_implementation="{name}" belongs to patched models: load the model with another implementation '
            "(or none) and call fastft.patch_model(model), which selects it"
        )
    if name.previous == "eager":
        return eager_forward(module)(module, *args)
    return ALL_EXPERTS_FUNCTIONS[name.previous](module, *args)
