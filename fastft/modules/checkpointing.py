"""How Hugging Face's gradient checkpointing comes to ask fastft's memory plan.

Trainers switch checkpointing on long after `patch_model`, by one method of the model that hands a checkpoint function
to every layer. That method is replaced on the instance; it calls the original and then wraps what the layers got.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..memory.checkpoint import ActivationMemory, LayerCheckpoint

MEMORY = "_fastft_memory"
_METHOD = "_set_gradient_checkpointing"
_FUNCTION = "_gradient_checkpointing_func"


def install(model: nn.Module, memory: ActivationMemory) -> None:
    """Lets `memory` decide for the layers of `model`, checkpointed already or later."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _METHOD not in module.__dict__:
            module.__dict__[MEMORY] = memory
            module.__dict__[_METHOD] = types.MethodType(_set_gradient_checkpointing, module)
    _wrap_layers(model, memory)


def uninstall(model: nn.Module) -> None:
    """Leaves the layers with the checkpoint functions that Hugging Face gave them."""
    for module in model.modules():
        function = module.__dict__.get(_FUNCTION)
        if isinstance(function, LayerCheckpoint):
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
    _wrap_layers(self, self.__dict__[MEMORY])


def _wrap_layers(model: nn.Module, memory: ActivationMemory) -> None:
    for stack in model.modules():
        layers = [
            layer
            for layer in stack.children()
            if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
        ]
        for index, layer in enumerate(layers):
            inner = layer.__dict__[_FUNCTION]
            if isinstance(inner, LayerCheckpoint):
                inner = inner.inner
            layer.__dict__[_FUNCTION] = LayerCheckpoint(inner, memory, index, len(layers))
