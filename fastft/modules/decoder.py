"""Decoder layers whose addition after attention is fused with the norm that follows: one pass over memory for two.

    hidden_states = residual + attention(...)
    residual = hidden_states
    hidden_states = post_attention_layernorm(hidden_states)

A layer gets a subclass of its class that carries the same name. An instance's own `forward` would not do: transformers
5.23 checkpoints in the forward of the class, of which 5.17 knows nothing. Hooks, recorded outputs and look-ups by class
or by its name find such a layer as before; its pickle is one of the class it came with.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import textwrap
import types
from typing import Any

import torch
from torch import nn
from transformers import modeling_layers

from ..ops.rms_norm import add_rms_norm, rms_norm
from . import norm
from .state import ATTRIBUTE, state_of

# The forwards that are stood in for. `self_attn` gets every parameter under its own name.
_BODY = """
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
hidden_states, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = residual + hidden_states
return hidden_states
"""


class FusedLayer:
    """What a layer's class gets for a first base, to be known by. Without fastft's state on it, a layer is stock."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy is fused as well: `__reduce_ex__`, which would make it, is for pickles."""
        twin: Any = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_fused(self):  # a subclass that somebody else made of it
            return super().__reduce_ex__(protocol)
        # Not by `copyreg.__newobj__`, which insists on the object's own class.
        return object.__new__, (layer_class(self),), self.__getstate__()


def fuse(layer: nn.Module) -> None:
    """Makes the layer's class a fused one. fastft's state on the layer switches it on."""
    cls: Any = type(layer)
    if not issubclass(cls, FusedLayer):
        _set_class(layer, _fused_class(cls))


def unfuse(layer: nn.Module) -> None:
    """Gives a layer its class back, unless FSDP2 has put another one above: that one goes on without fastft."""
    if is_fused(layer):
        _set_class(layer, layer_class(layer))


def is_fused(layer: object) -> bool:
    """Whether the layer's class is one that `fuse` gave it, and nobody has put another one above."""
    return FusedLayer in type(layer).__bases__


def layer_class(layer: object) -> type:
    """The class that a layer had before `fuse`, whatever FSDP2 has put above since; the class of any other object."""
    classes = type(layer).__mro__
    return classes[classes.index(FusedLayer) + 1] if FusedLayer in classes else classes[0]


def _set_class(layer: nn.Module, cls: type[nn.Module]) -> None:
    before: Any = type(layer).forward
    layer.__class__ = cls
    for name, value in layer.__dict__.items():  # accelerate's device hooks keep the forward that they found
        if getattr(value, "__func__", None) is before:
            layer.__dict__[name] = types.MethodType(cls.forward, layer)


@functools.cache
def _fused_class(cls: Any) -> type[nn.Module]:
    """One for each class of layers, so that those of a model stay of one class."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[2:]
    defaults = {each.name: each.default for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}

    @functools.wraps(cls.forward)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Under torch.compile the class's own forward runs, for the compiler to fuse.
        if torch.compiler.is_compiling() or state_of(self) is None or args:
            stock: torch.Tensor = cls.forward(self, hidden_states, *args, **kwargs)
            return stock
        return _forward(self, hidden_states, {**defaults, **kwargs})

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (FusedLayer, cls), {"forward": forward, **names})


def _forward(layer: Any, hidden_states: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """`_BODY`, with the names that it gives to tensors, so that each is freed when it was."""
    residual = hidden_states
    hidden_states = layer.input_layernorm(hidden_states)
    hidden_states, _ = layer.self_attn(hidden_states=hidden_states, **given)
    counters = layer.__dict__[ATTRIBUTE].shared.counters
    problem = _why_apart(layer.post_attention_layernorm, hidden_states, residual)
    if problem:
        counters[f"add_rms_norm apart: {problem}"] += 1
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = layer.post_attention_layernorm(hidden_states)
    else:
        counters["add_rms_norm"] += 1
        residual, hidden_states = _add_and_normalise(layer.post_attention_layernorm, hidden_states, residual)
    hidden_states = layer.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states


def _why_apart(module: Any, x: torch.Tensor, residual: torch.Tensor) -> str:
    """Why the norm has to be called by itself, after the addition; "" if both may run as one."""
    problem = norm.why_not_within(module)
    if problem:
        return problem
    if x.dtype != residual.dtype:
        return f"{residual.dtype} + {x.dtype}"
    if not type(x) is type(residual) is torch.Tensor:
        return f"{type(residual).__name__} + {type(x).__name__}"
    return "" if x.shape == residual.shape else "the shapes differ"


def _add_and_normalise(module: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and what the norm makes of it; told to the memory plan as the norm's own forward tells it."""
    shared, options = module.__dict__[ATTRIBUTE].shared, norm.options_of(module)
    shared.counters["rms_norm"] += 1
    total, normalised = add_rms_norm(x, residual, **options)
    tape = shared.tape
    if tape is not None:
        tape.root(total, "residual")
        tape.made(normalised, "norm", functools.partial(rms_norm, **options), total)
    return total, normalised


def why_not_fusable(cls: type[nn.Module]) -> str:
    """Why a class of decoder layers cannot be fused, by what its forward says; "" if it can."""
    forward = _below_checkpointing(cls.forward)
    if hasattr(forward, "__wrapped__"):
        return f"{cls.__name__}.forward is decorated"
    try:
        source = textwrap.dedent(inspect.getsource(forward))
    except (OSError, TypeError):  # built otherwise, or shipped without it
        return f"the source of {cls.__name__}.forward cannot be read"
    function = ast.parse(source).body[0]
    if not isinstance(function, ast.FunctionDef) or function.args.kwarg is None or function.args.vararg is not None:
        return f"{cls.__name__}.forward takes other arguments"
    names = [each.arg for each in function.args.args[2:]]
    expected = ast.parse(_BODY).body
    call: Any = expected[2]
    call.value.keywords[1:1] = [ast.keyword(name, ast.Name(name, ast.Load())) for name in names]
    body = function.body[ast.get_docstring(function) is not None :]
    if [_normal_form(each) for each in body] != [_normal_form(each) for each in expected]:
        return f"{cls.__name__}.forward does more, or something else, between attention and its norm"
    return ""


def _below_checkpointing(forward: Any) -> Any:
    """The forward that transformers' own wrapper calls, and ours; what others have put around it stays."""
    ours = (modeling_layers.__file__, __file__)
    while hasattr(forward, "__wrapped__") and forward.__code__.co_filename in ours:
        forward = forward.__wrapped__
    return forward


def _normal_form(statement: ast.stmt) -> str:
    """The same for every order of keywords."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            node.keywords.sort(key=lambda keyword: keyword.arg or "")
    return ast.dump(statement)
