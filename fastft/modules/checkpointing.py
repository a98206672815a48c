"""How Hugging Face's gradient checkpointing comes to ask fastft's memory plan.

Trainers switch checkpointing on long after `patch_model`, by one method of the model that hands a checkpoint function
to every layer. That method is replaced on the instance; it calls the original and then wraps what the layers got.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch.utils.checkpoint
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..memory.activations import ActivationMemory
from ..memory.checkpoint import LayerCheckpoint
from .state import state_of

MEMORY = "_fastft_memory"
_METHOD = "_set_gradient_checkpointing"
_FUNCTION = "_gradient_checkpointing_func"


def install(model: nn.Module, memory: ActivationMemory) -> None:
    """Lets `memory` decide for the layers of `model`, checkpointed already or later."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _METHOD not in module.__dict__:
            module.__dict__[MEMORY] = memory
            module.__dict__[_METHOD] = types.MethodType(_set_gradient_checkpointing, module)
    if memory.budget is not None and memory.budget.most is not None:
        _switch_on(model, memory)
    _wrap_layers(model, memory)


def _switch_on(model: nn.Module, memory: ActivationMemory) -> None:
    """A budget was given: layers ask the plan whether anyone switches checkpointing on or not."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return
    memory.switched_on = True
    for layer in model.modules():  # and nothing else: what has no plan is not checkpointed for the budget's sake
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = True
            layer.__dict__[_FUNCTION] = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def uninstall(model: nn.Module) -> None:
    """Leaves the layers with the checkpoint functions that Hugging Face gave them."""
    for module in model.modules():
        function = module.__dict__.get(_FUNCTION)
        if isinstance(function, LayerCheckpoint) and function.memory.switched_on:
            del module.__dict__[_FUNCTION], module.__dict__["gradient_checkpointing"]
        elif isinstance(function, LayerCheckpoint):
            module.__dict__[_FUNCTION] = function.inner
        method = module.__dict__.get(_METHOD)
        # A pickle brings the class's own method back as an attribute.
        if getattr(method, "__func__", None) in (_set_gradient_checkpointing, getattr(type(module), _METHOD, None)):
            module.__dict__.pop(_METHOD, None)
        module.__dict__.pop(MEMORY, None)


def memories(model: nn.Module) -> list[ActivationMemory]:
    """One, or several if parts of the model were patched on their own, or none."""
    found = (module.__dict__.get(MEMORY) for module in model.modules())
    return list(dict.fromkeys(memory for memory in found if memory is not None))


# By the name of the method it stands for: that is how a pickle of the bound method finds the class's own again.
def _set_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> None:
    type(self)._set_gradient_checkpointing(self, *args, **kwargs)
    self.__dict__[MEMORY].switched_on = False  # from here on it is the caller's
    _wrap_layers(self, self.__dict__[MEMORY])


def _wrap_layers(model: nn.Module, memory: ActivationMemory) -> None:
    stacks = [layers for layers in map(_checkpointed_layers, model.modules()) if layers]
    longest = max(stacks, key=len, default=[])
    for layers in stacks:
        for index, layer in enumerate(layers):
            inner = layer.__dict__[_FUNCTION]
            if isinstance(inner, LayerCheckpoint):
                inner = inner.inner
            planned, tells = layers is longest, _tells(layer)
            layer.__dict__[_FUNCTION] = LayerCheckpoint(inner, memory, index, len(layers), planned, tells)


def _tells(layer: nn.Module) -> bool:
    """Whether a layer's largest activations are made by modules that tell of them, or saved by none.

    Experts save nothing but what the layer would rather keep: their input and the first product.
    """
    states = [state for state in map(state_of, layer.modules()) if state is not None]
    told = {state.kind for state in states if state.bound}
    return "mlp" in told or ("attention" in told and any(state.kind == "experts" for state in states))


def _checkpointed_layers(stack: nn.Module) -> list[GradientCheckpointingLayer]:
    return [
        layer
        for layer in stack.children()
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
    ]
