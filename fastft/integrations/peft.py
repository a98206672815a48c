"""PEFT's LoRA projections: when the fused op may take the place of PEFT's forward, decided at each call.

Adapters are added, switched, disabled, merged and hooked at any time, so no decision is remembered between calls. The
questions are asked seven times a layer in every step: they are reads of instance dictionaries, which skip the slow
attribute lookup of nn.Module, and what concerns x alone is asked once for all projections of it. PEFT is never
imported from here: a model with a PEFT layer has done it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ..errors import UnsupportedOptionError
from ..modules.projection import is_intercepted
from ..ops.adapter_casts import AdapterCasts
from ..ops.gated_mlp import Projection, kernels_for
from ..ops.gated_mlp.autograd import gated_linear
from ..ops.lora_linear.autograd import lora_linear_group
from ..ops.packed_weight import PackedWeight
from ..ops.products import AUTOCAST_DTYPES
from .bitsandbytes import FourBitWeights

# Why a projection without an adapter is not fused: there is nothing to fuse.
NOT_LORA = "not a LoRA linear layer of PEFT"

_PLACES = ("the LoRA layer", "base_layer", "lora_A", "lora_B", "lora_dropout")
_NOT_PLAIN = "a weight is not a plain parameter (sharded, quantized or replaced)"
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_Linear, _Identity, _Parameter = nn.Linear, nn.Identity, nn.Parameter  # read several times a projection


class _Lasting(str):
    """A reason that stays as long as the layer is built as it is, unlike what a context or a later call changes."""

    __slots__ = ()


class LoRAProjection(NamedTuple):
    """What `lora_linear` needs of a projection besides x, in its order: y = x W^T + b + scaling (x A^T) B^T."""

    weight: torch.Tensor | PackedWeight  # [N, K]
    bias: torch.Tensor | None  # [N]
    lora_A: torch.Tensor  # [r, K]
    lora_B: torch.Tensor  # [N, r]
    scaling: float


class LoRAProjector:
    """Calls projections, several of one input at a time, by the fused op where that computes the same as they do.

    It holds the copies of adapters that the recomputation of a checkpointed forward uses again. A copied or unpickled
    projector starts without any.

    Args:
        by_name: the fused op was asked for by name, so an adapter that it can never compute is an error.
        four_bit: reads weights of 4 bits, into memory that it shares with whoever else reads by it.
    """

    __slots__ = ("_by_name", "_casts", "_four_bit")

    def __init__(self, by_name: bool = False, four_bit: FourBitWeights | None = None) -> None:
        self._by_name = by_name
        self._casts = AdapterCasts()
        self._four_bit = four_bit or FourBitWeights()

    def __reduce__(self) -> tuple[Callable[[bool], LoRAProjector], tuple[bool]]:
        return type(self), (self._by_name,)

    def __deepcopy__(self, memo: dict[int, Any]) -> LoRAProjector:
        return type(self)(self._by_name)

    def __call__(self, modules: tuple[nn.Module, ...], x: torch.Tensor) -> tuple[list[torch.Tensor], list[str | None]]:
        """What each module(x) returns.

        Args:
            modules: any projections: LoRA layers of PEFT, or not. Calls with further arguments, such as PEFT's
                adapter_names, are for the modules themselves.
            x: [..., K].

        Returns:
            The y_i, [..., N_i], and for each the reason why the module's own forward ran, or None if the fused op did.

        Raises:
            UnsupportedOptionError: the op was asked for by name, and the kind of an adapter rules it out.
        """
        facts = _input_facts(x, self._four_bit)
        found = [_fused_lora(module, facts) for module in modules]
        if self._by_name:
            _refuse_lasting(found)
        reasons = [part if isinstance(part, str) else None for part in found]
        layers = [part for part in found if not isinstance(part, str)]
        if not layers or isinstance(facts, str):
            return [module(x) for module in modules], reasons
        weights, biases, As, Bs, scalings = zip(*layers, strict=True)
        # A forward without gradients has no recomputation; what it sees may be other values, put in for the moment.
        casts = self._casts if torch.is_grad_enabled() else None
        fused = iter(lora_linear_group(x, weights, biases, As, Bs, scalings, facts.compute_dtype, casts))
        if len(layers) == len(modules):
            return list(fused), reasons
        pairs = zip(modules, reasons, strict=True)
        return [next(fused) if reason is None else module(x) for module, reason in pairs], reasons

    def gated(
        self, module: nn.Module, gate: torch.Tensor, up: torch.Tensor, activation: str, impl: str
    ) -> torch.Tensor | str:
        """What module(act(gate) * up) returns, or why the fused op cannot compute it.

        Args:
            module: a projection, as in a call.
            gate, up: [..., I], alike.
            activation, impl: see `fastft.ops.gated_mlp.gated`.

        Raises:
            UnsupportedOptionError: as in a call.
        """
        facts = _input_facts(gate, self._four_bit)
        found = _fused_lora(module, facts)
        if self._by_name:
            _refuse_lasting([found])
        if isinstance(found, str) or isinstance(facts, str):
            return str(found)
        kernels = kernels_for(gate.device, gate.dtype, impl)
        casts = self._casts if torch.is_grad_enabled() else None
        return gated_linear(gate, up, activation, Projection(*found), facts.compute_dtype, kernels, casts)


def _refuse_lasting(found: list[LoRAProjection | str]) -> None:
    reason = next((part for part in found if isinstance(part, _Lasting)), None)
    if reason is not None:
        raise UnsupportedOptionError(
            f"lora='fused' cannot be honoured for a projection: {reason}; use lora='auto', which leaves such adapters "
            "to PEFT's own forward, or lora=False"
        )


class _InputFacts(NamedTuple):
    """What the questions about a projection have to know of x, and of the moment."""

    layer_type: type[nn.Module]  # PEFT's LoRA linear layer
    four_bit_type: type[nn.Module] | None  # the same over 4 bits
    four_bit: FourBitWeights
    device: torch.device
    dtype: torch.dtype
    autocast: bool
    compute_dtype: torch.dtype


def _input_facts(x: torch.Tensor, four_bit: FourBitWeights) -> _InputFacts | str:
    """The facts, or why nothing can be fused with this x now."""
    lora_layer = sys.modules.get("peft.tuners.lora.layer")
    if lora_layer is None:
        return NOT_LORA
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, and fuses PEFT's own operations"
    if nn_module._has_any_global_hook():
        return "a hook is registered for all modules"
    if type(x) not in _PLAIN_TENSORS:
        return f"the input is a {type(x).__name__}, not a plain tensor"
    device, dtype = x.device, x.dtype
    kind = device.type
    if kind == "meta":
        return "the input is on the meta device"
    if x.numel() == 0:
        return "the input has no tokens"
    types = (lora_layer.Linear, _four_bit_type())
    if not torch.is_autocast_enabled(kind):
        return _InputFacts(*types, four_bit, device, dtype, False, dtype)
    if dtype not in AUTOCAST_DTYPES:
        return "a dtype that autocast does not cast"
    return _InputFacts(*types, four_bit, device, dtype, True, torch.get_autocast_dtype(kind))


def _four_bit_type() -> type[nn.Module] | None:
    """PEFT's LoRA layer over 4 bits, where bitsandbytes is in use."""
    return getattr(sys.modules.get("peft.tuners.lora.bnb"), "Linear4bit", None)


def _fused_lora(module: nn.Module, facts: _InputFacts | str) -> LoRAProjection | str:
    """The parts of a projection if the fused op computes on them exactly what module(x) does, or why it does not."""
    if isinstance(facts, str):
        lora_layer = sys.modules.get("peft.tuners.lora.layer")
        known = lora_layer is not None and type(module) in (lora_layer.Linear, _four_bit_type())
        return facts if known else _another_kind(module)
    in_four_bits = type(module) is facts.four_bit_type
    if type(module) is not facts.layer_type and not in_four_bits:
        return _another_kind(module)
    state = module.__dict__
    if state["_disable_adapters"] or state["merged_adapters"] or state["fan_in_fan_out"]:
        return _state_reason(state)
    children = state["_modules"]
    adapters = children["lora_A"].__dict__["_modules"]
    active = state["_active_adapter"]
    name = active if type(active) is str else active[0] if len(active) == 1 else ""
    if name not in adapters:  # of several active adapters PEFT runs those that the layer has
        present = [each for each in active if each in adapters] if type(active) is not str else []
        if len(present) != 1:
            return "several adapters are active in this layer" if present else "no active adapter is in this layer"
        name = present[0]
    if name in state["lora_variant"]:
        return _Lasting(f"a LoRA variant is in use ({type(state['lora_variant'][name]).__name__})")
    base, lora_A = children["base_layer"], adapters[name]
    lora_B = children["lora_B"].__dict__["_modules"][name]
    dropout = children["lora_dropout"].__dict__["_modules"][name]
    if (type(base) is not _Linear and not in_four_bits) or type(lora_A) is not _Linear or type(lora_B) is not _Linear:
        return _linear_reason(base, lora_A, lora_B)
    if type(dropout) is not _Identity:
        reason = _dropout_reason(dropout)
        if reason:
            return reason
    of_base, of_A, of_B = base.__dict__, lora_A.__dict__, lora_B.__dict__
    places = (state, of_base, of_A, of_B, dropout.__dict__)
    if is_intercepted(places):
        place = next(name for name, part in zip(_PLACES, places, strict=True) if is_intercepted((part,)))
        return f"{place} has hooks or a forward of its own"
    if in_four_bits:
        weight = _four_bit_weight(base, facts)
        if isinstance(weight, str):
            return weight
    else:
        weight = of_base["_parameters"].get("weight")
        if type(weight) is not _Parameter:
            return _NOT_PLAIN
    return _projection(state, weight, of_base["_parameters"].get("bias"), of_A, of_B, name, facts)


def _four_bit_weight(base: Any, facts: _InputFacts) -> PackedWeight | str:
    """Of a layer that computes in the dtype that the fused op would."""
    weight = facts.four_bit.linear(base)
    if isinstance(weight, str) or base.compute_dtype is facts.compute_dtype:
        return weight
    if base.compute_dtype is None:
        return "a base of 4 bits takes the dtype of its first call, which was not yet"
    return (
        f"a base of 4 bits computes in {base.compute_dtype}, its adapter in {facts.compute_dtype}; load the model with "
        f"bnb_4bit_compute_dtype={facts.compute_dtype}"
    )


def _another_kind(module: nn.Module) -> str:
    """Subclasses, and what PEFT makes of quantized layers, compute something else, or may."""
    if "lora_A" in module.__dict__["_modules"]:
        return _Lasting(f"a LoRA layer of another kind ({type(module).__name__})")
    return NOT_LORA


def _state_reason(state: dict[str, Any]) -> str:
    if state["_disable_adapters"]:
        return "adapters are disabled"
    if state["merged_adapters"]:
        return "an adapter is merged into the base weight"
    return _Lasting("fan_in_fan_out: the base weight is stored transposed")


def _linear_reason(base: nn.Module, lora_A: nn.Module, lora_B: nn.Module) -> str:
    if type(base) is not nn.Linear:
        return _Lasting(f"the base layer is a {type(base).__name__}, not an nn.Linear")
    return _Lasting(f"the adapter is a {type(lora_A).__name__} and a {type(lora_B).__name__}, not two nn.Linear")


def _dropout_reason(dropout: nn.Module) -> str:
    if type(dropout) is not nn.Dropout:
        return _Lasting(f"the adapter's dropout is a {type(dropout).__name__}, not an nn.Dropout")
    if dropout.training and dropout.p != 0:
        return _Lasting("the adapter has dropout, and is in training")
    return ""


def _projection(
    state: dict[str, Any],
    weight: torch.Tensor | PackedWeight,
    bias: Any,
    of_A: dict[str, Any],
    of_B: dict[str, Any],
    name: str,
    facts: _InputFacts,
) -> LoRAProjection | str:
    """state, of_A and of_B: of the modules; weight and bias of the base layer."""
    parameters_A, parameters_B = of_A["_parameters"], of_B["_parameters"]
    if parameters_B["bias"] is not None or parameters_A["bias"] is not None:
        return _Lasting("lora_bias: the adapter has a bias")
    A, B = parameters_A.get("weight"), parameters_B.get("weight")
    if type(A) is not _Parameter or type(B) is not _Parameter or (bias is not None and type(bias) is not _Parameter):
        return _NOT_PLAIN
    scaling = state["scaling"][name]
    if type(scaling) is not float and type(scaling) is not int:
        return f"the scaling is a {type(scaling).__name__}, not a number"
    device = facts.device
    if weight.device != device or A.device != device or B.device != device:
        return "the weights are not on the input's device"
    dtype = facts.compute_dtype if isinstance(weight, PackedWeight) else weight.dtype
    dtypes = (dtype, A.dtype, B.dtype, dtype if bias is None else bias.dtype)
    reason = _dtype_reason(dtypes, state["cast_input_dtype_enabled"], facts)
    return reason or LoRAProjection(weight, bias, A, B, scaling)


def _dtype_reason(dtypes: tuple[torch.dtype, ...], casts_input: bool, facts: _InputFacts) -> str:
    """dtypes: of the weight, A, B and the bias."""
    if not facts.autocast:
        # PEFT would compute the update in the adapter's dtype, and add it to an output of the base's.
        return "" if dtypes.count(facts.dtype) == len(dtypes) else "dtypes differ, and autocast is off"
    if not AUTOCAST_DTYPES.issuperset(dtypes):
        return "a dtype that autocast does not cast"
    # PEFT rounds x to A's dtype on the way to autocast's, which is the same only if nothing is lost there.
    A_dtype = dtypes[1]
    lossless = A_dtype is torch.float32 or A_dtype is facts.dtype or A_dtype is facts.compute_dtype
    if casts_input and not lossless:
        return "PEFT rounds the input to the adapter's dtype, which is neither the input's nor autocast's"
    return ""
