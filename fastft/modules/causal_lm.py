"""The forward bound onto a causal LM, which alone sees the labels: what they ask of padding decides about the padding.

A batch that loses its padding has no output there. A label that only such an output could predict keeps the whole
batch on the stock way, if it is a label of padding (a script that does not mask them trains on them). If it is the
first token of a row that padding stands before, it is no target, as it is none of a row by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..unpadding import UnpaddedSequences, targets_of_padding
from .dynamo import is_exporting
from .sequences import find_sequences
from .state import ModuleState, state_of

IGNORE_INDEX = -100


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward, with labels that a batch without padding can answer."""
    state = state_of(self)
    # Without a state the model was unpatched below a wrapper that still calls this.
    too_many = state is not None and len(args) > len(state.parameter_names)  # the class's own says so
    if state is None or too_many or torch.compiler.is_compiling() or is_exporting():
        return type(self).forward(self, *args, **kwargs)
    given: dict[str, Any] = {**dict(zip(state.parameter_names, args, strict=False)), **kwargs}
    mask: Any = given.get("attention_mask")
    labels: Any = given.get("labels")
    shifted: Any = given.get("shift_labels")
    if _cover_the_same(mask, shifted):  # each stands where it is predicted already
        return _run(self, state, args, kwargs, (mask == 0) & (shifted != IGNORE_INDEX))
    if not _cover_the_same(mask, labels):
        return type(self).forward(self, *args, **kwargs)
    of_padding, of_first_tokens = targets_of_padding(mask, labels, IGNORE_INDEX)
    if _starts_padded(self, state, given, of_padding):
        args, kwargs = (), {**given, "labels": labels.masked_fill(of_first_tokens, IGNORE_INDEX)}
    return _run(self, state, args, kwargs, of_padding)


def _run(model: Any, state: ModuleState, args: Any, kwargs: dict[str, Any], of_padding: torch.Tensor) -> Any:
    """The class's own forward, while its backbone's hook knows what the labels ask of padding."""
    with _told(state, of_padding):
        return type(model).forward(model, *args, **kwargs)


@contextmanager
def _told(state: ModuleState, of_padding: torch.Tensor) -> Iterator[None]:
    before, state.shared.targets_on_padding = state.shared.targets_on_padding, of_padding
    try:
        yield
    finally:
        state.shared.targets_on_padding = before


def for_class(cls: type[nn.Module]) -> Callable[..., Any]:
    """`forward` with the signature of the class's own: trainers read there which columns and options a model takes."""
    made = FunctionType(forward.__code__, forward.__globals__, "forward")
    made.__doc__, made.__module__ = forward.__doc__, forward.__module__
    made.__dict__["__signature__"] = inspect.signature(cls.forward)
    own: Callable[..., Any] = made
    return own


def _cover_the_same(mask: Any, labels: Any) -> bool:
    tensors = isinstance(mask, torch.Tensor) and isinstance(labels, torch.Tensor)
    return tensors and labels.ndim == 2 and labels.shape == mask.shape


def _starts_padded(model: Any, state: ModuleState, given: dict[str, Any], of_padding: torch.Tensor) -> bool:
    """Whether the batch will lose padding that stands before tokens."""
    backbone = next(module for module in model.modules() if getattr(state_of(module), "kind", "") == "backbone")
    with _told(state, of_padding):
        packed, _ = find_sequences(state.shared, backbone, given)
    return isinstance(packed, UnpaddedSequences) and packed.starts_padded
