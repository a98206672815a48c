"""Launches of Triton kernels without the host time that looking up a specialisation takes.

`kernel[grid](...)` binds, classifies and hashes every argument on every launch, in Python. A training step repeats the
same few launches for every layer, so the compiled kernel is remembered here, and launched directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..capability import probe

# What Triton specialises a kernel for: whether a pointer is a multiple of this many bytes.
_ALIGNMENT = 16
# The number of tokens is part of what is remembered and differs from batch to batch.
_MOST_REMEMBERED = 1024
_SMALLEST_WIDE = 2**31


class Launcher:
    """Launches one kernel, by Triton's own way the first time and whenever an argument differs.

    Args:
        kernel: decorated by `triton.jit`; its parameters are pointers, then numbers, then constexprs.
    """

    __slots__ = ("_compiled", "_kernel", "_kinds")

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        # By the numbers themselves, which is soonest looked up, and by all that Triton specialises for.
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        self._kinds: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        programs: int,
        pointers: Sequence[torch.Tensor | None],
        numbers: tuple[float, ...],
        constants: Mapping[str, Any],
    ) -> None:
        """Launch on the tensors' own device.

        Args:
            programs: size of the one-dimensional grid.
            pointers: in the kernel's order; the first is not None.
            numbers: in the kernel's order.
            constants: constexprs and launch options (num_warps ...), always in the same order.
        """
        first = pointers[0]
        assert first is not None
        device = first.get_device()
        # Triton launches on the current device, which need not be the tensors'; switching costs, so only when needed.
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._launch(device, programs, pointers, numbers, constants)
        return self._launch(device, programs, pointers, numbers, constants)

    def _launch(
        self,
        device: int,
        programs: int,
        pointers: Sequence[torch.Tensor | None],
        numbers: tuple[float, ...],
        constants: Mapping[str, Any],
    ) -> None:
        kinds = [None if x is None else (x.dtype, x.data_ptr() % _ALIGNMENT) for x in pointers]
        key = (device, *kinds, numbers, *constants.values())
        known = self._compiled.get(key)
        if known is None:
            kind = (device, *kinds, *map(_kind, numbers), *constants.values())
            known = self._kinds.get(kind)
            if known is not None:
                _remember(self._compiled, key, known)
        if known is not None:
            compiled, constexprs = known
            compiled[programs, 1, 1](*pointers, *numbers, *constexprs)
            return
        compiled = self._kernel[(programs,)](*pointers, *numbers, **constants)
        if compiled is None:  # the interpreter compiles nothing
            return
        constexprs = tuple(constants[name] for name in self._kernel.arg_names if name in constants)
        _remember(self._compiled, key, (compiled, constexprs))
        _remember(self._kinds, kind, (compiled, constexprs))


def _kind(number: float) -> Any:
    """What of a number a kernel may be specialised for: whether it is 1, a multiple of 16, how wide."""
    if type(number) is not int:
        return number
    return number == 1, number % _ALIGNMENT == 0, -_SMALLEST_WIDE <= number < _SMALLEST_WIDE, number >= 2**63


def _remember(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: tuple[Any, tuple[Any, ...]]) -> None:
    if len(known) >= _MOST_REMEMBERED:
        known.clear()
    known[key] = value


@lru_cache(maxsize=64)
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a device; one on the CPU, where the interpreter runs."""
    return max(1, probe(device).device.sm_count)
