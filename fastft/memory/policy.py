"""What a checkpoint keeps of layers that tell nothing: products of matrices and attention, like layers that do.

torch's own selective checkpointing, for layers that stay stock. Its limits are torch's: one backward through each
graph, and no writing into what was kept. Operators that write are found out; a kernel that writes past the dispatcher
is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Names of operators, of which a version of torch may lack some. Convolutions are those of short state-space layers.
_KEPT = frozenset((
    "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm", "aten._scaled_mm", "aten.convolution",
    "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._flash_attention_forward", "aten._efficient_attention_forward", "fastft.flash_attn_varlen_forward",
    "flash_attn._flash_attn_varlen_forward", "flash_attn._flash_attn_forward",
))  # fmt: skip


def is_kept(operator: Any) -> bool:
    """Whether an operator's output is dear to make: "namespace.name" of an overload.

    Not where it writes into memory it was given: that is made again with all that is in it.
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator._schema.is_mutable:
        return False
    return str(operator.overloadpacket) in _KEPT


class WrittenIntoError(RuntimeError):
    """A function writes into what a kept operator made: run again, it would write twice."""


def checkpoint_but_products(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint` of a function that runs all but its kept operators again.

    Args:
        function: and its arguments.
        options: of torch's checkpoint, where `use_reentrant` is of no account: only the other form can keep anything.

    Raises:
        WrittenIntoError: in forward, and nothing is checkpointed.
    """
    options = {name: value for name, value in options.items() if name not in ("use_reentrant", "context_fn")}
    return checkpoint(
        functools.partial(_uncached, function), *args, use_reentrant=False, context_fn=_contexts, **options
    )


def _uncached(function: Callable[..., Any], *args: Any) -> Any:
    """Autocast casts a weight in every call: one that was cast before the forward would be cast in backward alone."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        return function(*args)
    finally:
        torch.set_autocast_cache_enabled(before)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, again = create_selective_checkpoint_contexts(_policy)
    return _watched(forward), again


@contextmanager
def _watched(forward: AbstractContextManager[Any]) -> Iterator[None]:
    with _Watch(), forward:
        yield


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


class _Watch(TorchDispatchMode):
    """Refuses to write into what a kept operator made."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: set[int] = set()  # addresses of storages, which torch keeps alive meanwhile

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as torch's own modes for checkpoints

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._kept.isdisjoint(_written(func, args, kwargs)):
            raise WrittenIntoError(f"{func} writes into a product of matrices or the output of attention")
        results = func(*args, **kwargs)
        if is_kept(func):
            outputs = results if isinstance(results, (tuple, list)) else (results,)
            self._kept.update(each.untyped_storage()._cdata for each in outputs if isinstance(each, torch.Tensor))
        return results


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
    """Addresses of the storages that an operator writes into."""
    if not isinstance(operator, torch._ops.OpOverload) or not operator._schema.is_mutable:
        return
    for place, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    yield tensor.untyped_storage()._cdata
