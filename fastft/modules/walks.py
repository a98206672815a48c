"""What trainers ask a whole model in each step, without `nn.Module`'s generators: `train`, `parameters`, sizes.

The Trainer walks over all modules some five times a step, mostly while the GPU has nothing to do, because it has just
read the loss. LoRA on every projection of 16 layers makes 1,337 modules of a model, and a walk takes 2 to 6 ms (2 GHz,
Python 3.11). The same questions, asked of the modules' dictionaries, take a tenth (`train`) to a third of that.

Nothing is remembered between calls: modules and parameters come and go. Where a class answers a question itself, its
own method stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import nn


def bind(model: nn.Module) -> None:
    """Gives a model the methods of this file."""
    for name, function in _methods(type(model)).items():
        if name not in model.__dict__:
            model.__dict__[name] = MethodType(function, model)


def unbind(target: nn.Module) -> None:
    """Takes them back, and what a pickle has made of them: the class's own method, bound."""
    for module in target.modules():
        for name, function in _FUNCTIONS.items():
            ours = getattr(module.__dict__.get(name), "__func__", None) is function
            if ours or _is_of_class(module, name):
                del module.__dict__[name]


def is_bound(model: nn.Module) -> bool:
    """Whether a model has every method that it could have, or one of its own instance."""
    return model.__dict__.keys() >= _methods(type(model)).keys() and not any(
        _is_of_class(model, name) for name in _FUNCTIONS
    )


def _is_of_class(model: nn.Module, name: str) -> bool:
    """Whether a method on a model is what a pickle makes of one: the class's own, bound."""
    found = getattr(model.__dict__.get(name), "__func__", None)
    return found is not None and found is getattr(type(model), name, None)


def _methods(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Those that do what the class's own do: not of a class that has written its own."""
    from transformers import PreTrainedModel

    own: tuple[Any, ...] = (kind._named_members, kind.named_modules, kind.named_parameters, kind.parameters)
    plain = (nn.Module._named_members, nn.Module.named_modules, nn.Module.named_parameters, nn.Module.parameters)
    methods: dict[str, Callable[..., Any]] = {}
    if kind.train in _plain_trains():
        methods["train"] = train
    if own == plain:
        methods["parameters"] = parameters
        if getattr(kind, "num_parameters", None) is PreTrainedModel.num_parameters:
            methods["num_parameters"] = num_parameters
    return methods


def _plain_trains() -> tuple[Any, ...]:
    """Those `train(mode)` that change nothing where every module is in that mode."""
    from transformers import PreTrainedModel

    return nn.Module.train, PreTrainedModel.train


def train(self: Any, mode: bool = True) -> Any:
    """`nn.Module.train`, which is done when every module is in that mode already."""
    return self if _is_in_mode(self, mode) else type(self).train(self, mode)


def _is_in_mode(model: nn.Module, mode: bool) -> bool:
    plain = _plain_trains()
    waiting: list[Any] = [model]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        state = module.__dict__
        own = state.get("train")
        if own is not None and getattr(own, "__func__", None) is not train:
            return False
        if state.get("training") is not mode or type(module).train not in plain:
            return False
        waiting.extend(state["_modules"].values())
    return True


def parameters(self: Any, recurse: bool = True) -> Iterator[nn.Parameter]:
    """`nn.Module.parameters`: each one once, in the order of modules."""
    if not _WALKERS.isdisjoint(self.__dict__):
        yield from type(self).parameters(self, recurse)
        return
    for _, _, parameter in _parameters(self, recurse):
        yield parameter


def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """`PreTrainedModel.num_parameters`: embeddings are told by their class, and 4-bit parameters hold two in a byte."""
    if getattr(self, "is_loaded_in_4bit", False) or not _WALKERS.isdisjoint(self.__dict__):
        return int(type(self).num_parameters(self, only_trainable, exclude_embeddings))
    return sum(
        parameter.numel()
        for module, name, parameter in _parameters(self, True)
        if (parameter.requires_grad or not only_trainable)
        and not (exclude_embeddings and name == "weight" and isinstance(module, nn.Embedding))
    )


def _parameters(model: nn.Module, recurse: bool) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """What `named_parameters` gives, in its order, with the module that has it in place of the name."""
    seen: dict[int, nn.Parameter] = {}  # held, for an id is given out again
    visited: dict[int, nn.Module] = {}
    waiting: list[Any] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in visited:
            continue
        if type(module).named_modules is not nn.Module.named_modules or "named_modules" in module.__dict__:
            inside = [each for _, each in module.named_modules() if id(each) not in visited]
        else:
            inside = [module]
            if recurse and module.__dict__["_modules"]:
                waiting.extend(reversed(module.__dict__["_modules"].values()))
        for each in inside:
            visited[id(each)] = each
            for name, parameter in each.__dict__["_parameters"].items():
                if parameter is not None and id(parameter) not in seen:
                    seen[id(parameter)] = parameter
                    yield each, name, parameter


# What another answer to may stand on an instance, and parameters with it.
_WALKERS = frozenset(("named_parameters", "named_modules", "_named_members"))
_FUNCTIONS: dict[str, Callable[..., Any]] = {"train": train, "parameters": parameters, "num_parameters": num_parameters}
