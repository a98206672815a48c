"""What fastft keeps on a patched model: one object shared by the model, one attribute on each patched module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..config import PatchConfig
from ..family_spec import FamilySpec
from ..memory.activations import ActivationMemory
from ..memory.tape import LayerTape
from ..ops.packed_weight import PackedWeight
from ..packing import PackedSequenceCache

ATTRIBUTE = "_fastft"

# The weight of a module by name if it is held in a form that has to be unpacked.
ReadPacked = Callable[[nn.Module, str], PackedWeight | None]


class Projector(Protocol):
    """Runs projections that may have adapters."""

    def __call__(self, modules: tuple[nn.Module, ...], x: torch.Tensor) -> tuple[list[torch.Tensor], list[str | None]]:
        """The outputs of projections of one input, and for each None if it was fused or the reason why it was not."""

    def gated(
        self, module: nn.Module, gate: torch.Tensor, up: torch.Tensor, activation: str, impl: str
    ) -> torch.Tensor | str:
        """The output of a projection of act(gate) * up, or the reason why that is not fused."""


class OwnConfig(NamedTuple):
    """A config object that took the place of the one a model came with, and may share with other models."""

    original: Any
    own: Any
    at_patching: dict[str, Any]  # the fields of `own` at that time


class UsedPadding(NamedTuple):
    """Where a head will use outputs at padding."""

    attention_mask: torch.Tensor  # of this batch
    places: torch.Tensor  # bool [B, L]


class BackboneRules(NamedTuple):
    """What was found out about a backbone when its model was patched."""

    keeps_padding: str = ""  # why padded batches keep their padding, or ""
    refuses_packing: str = ""  # of one left to its own code: why packed batches are refused, or ""
    implementation: str = ""  # of its attention
    carries_state: bool = False  # whether layers besides attention have to be told the boundaries


class ModelState:
    """State of one patched model. Counters tell how often each implementation ran, so that nothing is silently off."""

    def __init__(self, config: PatchConfig) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        self.packed_cache = PackedSequenceCache()
        self.projector: Projector | None = None
        self.read_packed: ReadPacked = no_packed_weight
        # From a head to its backbone, which takes it away; None if no head has said what it uses.
        self.used_padding: UsedPadding | None = None
        self.configs: list[OwnConfig] = []
        self.memory: ActivationMemory | None = None

    @property
    def tape(self) -> LayerTape | None:
        """Of the layer that runs now, if the memory plan wants to be told what it makes."""
        return self.memory.tape if self.memory is not None else None


class ModuleState:
    """State of one patched module. It follows `deepcopy`; a pickle forgets it, since pickling drops the forwards."""

    __slots__ = ("attention_before", "bound", "family", "kind", "parameter_names", "rules", "shared")

    def __init__(
        self,
        shared: ModelState,
        kind: str,
        family: FamilySpec | None,
        parameter_names: tuple[str, ...] = (),
        bound: bool = False,
        rules: BackboneRules | None = None,
    ) -> None:
        self.shared = shared
        self.kind = kind  # "head", "backbone", "guard", "head_guard", "decoder_layer", "attention", "mlp", "rms_norm",
        # "experts", "expert_adapter"
        self.family = family
        self.parameter_names = parameter_names  # of the forward of a head, backbone or guard, in order
        self.bound = bound  # whether a forward of fastft was bound onto the module
        self.rules = rules or BackboneRules()
        self.attention_before = 0  # of a backbone: attention calls counted when its present forward began

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        shared = deepcopy(self.shared, memo)
        return ModuleState(shared, self.kind, self.family, self.parameter_names, self.bound, self.rules)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _forgotten, ()


def no_packed_weight(module: nn.Module, name: str) -> None:
    """Of a model whose weights are all plain."""


def _forgotten() -> None:
    """What a pickled state loads as: the module is unpatched."""


def state_of(module: nn.Module) -> ModuleState | None:
    """The state of a module, or None if it is not patched."""
    return module.__dict__.get(ATTRIBUTE)


def arguments_by_name(state: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """All arguments of a forward by keyword; None for such as the forward refuses, and says why."""
    names = state.parameter_names[: len(args)]
    if len(args) > len(names) or any(name in kwargs for name in names):
        return None
    return {**dict(zip(names, args, strict=True)), **kwargs}
