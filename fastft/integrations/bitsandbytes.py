"""Weights that bitsandbytes holds in 4 bits: of linear layers, and of experts (`replace_parameter_4bit`).

bitsandbytes makes a whole stack of experts anew whenever it is read, and autograd then saves it. Here weights are made
into memory that all layers of a model share, once in forward and once in backward. bitsandbytes is never imported from
here: a module with such weights has done it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..ops.packed_weight import PackedWeight


class FourBitWeights:
    """Reads 4-bit weights, and owns the memory that they are made in. A copy or a pickle starts without any."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def __reduce__(self) -> tuple[Callable[[], FourBitWeights], tuple[()]]:
        return type(self), ()

    def __call__(self, module: Any, name: str) -> PackedWeight | None:
        """The parameter of this name if it is held in 4 bits, as it is stored: not transposed."""
        packed = packed_parameter(module, name)
        if packed is None:
            return None
        return self._packed(*packed)

    def linear(self, layer: Any) -> PackedWeight | str:
        """The weight [N, K] of a linear layer of 4 bits, or why it is not read."""
        modules = sys.modules.get("bitsandbytes.nn")
        if modules is None or type(layer) not in (modules.Linear4bit, modules.LinearNF4, modules.LinearFP4):
            return f"the base layer is a {type(layer).__name__}, not a linear layer of 4 bits"
        weight = layer._parameters["weight"]
        state = getattr(weight, "quant_state", None)
        if type(weight) is not modules.Params4bit or state is None:
            return "the weight of 4 bits is not there (sharded, or not quantised yet)"
        if getattr(state, "packing_format_for_cpu", False) or tuple(state.shape) != (
            layer.out_features,
            layer.in_features,
        ):
            return "the weight of 4 bits lies in another order"
        return self._packed(weight, state)

    def _packed(self, original: torch.Tensor, state: Any) -> PackedWeight:
        def make() -> torch.Tensor:
            # Packages that a pickle brings in again are other objects: ask for the function when it is needed.
            functional = sys.modules["bitsandbytes.functional"]
            memory = self._borrow(original.device, state.dtype, state.shape.numel()).view(state.shape)
            if original.device.type == "cpu":  # where it writes into no memory of ours
                return memory.copy_(functional.dequantize_4bit(original, state))
            return functional.dequantize_4bit(original, state, out=memory)

        return PackedWeight(make, state.shape, state.dtype, original.device)

    def _borrow(self, device: torch.device, dtype: torch.dtype, count: int) -> torch.Tensor:
        memory = self._memory.get((device, dtype))
        if memory is None or memory.numel() < count:
            with torch.inference_mode(False):  # or training could never write there
                memory = self._memory[device, dtype] = torch.empty(count, device=device, dtype=dtype)
        return memory[:count]


def packed_parameter(module: Any, name: str) -> tuple[torch.Tensor, Any] | None:
    """The 4-bit data of a parameter and how it was quantised, or None if bitsandbytes does not hold it so."""
    parametrize = sys.modules.get("bitsandbytes.nn.parametrize")
    lists = module._modules.get("parametrizations")
    if parametrize is None or lists is None or name not in lists:
        return None
    entries = list(lists[name])
    if len(entries) != 1 or type(entries[0]) is not parametrize.Bnb4bitParametrization:
        return None
    return lists[name].original, entries[0].quant_state
