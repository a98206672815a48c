"""When q and k may be rotated where they lie.

Two questions, asked at different moments. `in_place_verdict` is asked by a caller who does not know what became of a
projection's output, and says yes only when nobody else can hold it. `refuse_writing` guards `rope_qk_` itself, whose
caller vouches for ownership: it rejects what would be wrong whoever owns the memory. A kernel writes behind torch's
back, so everything that torch would have refused has to be refused here, before the launch.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_registry

from ...capability import Verdict
from ...errors import KernelInputError

# Backward nodes of what projections end in. None of them saves its output; softmax or exp would.
_FRESH_OUTPUT_NODES = frozenset(
    {"MmBackward0", "AddmmBackward0", "AddBackward0", "UnsafeViewBackward0", "ToCopyBackward0", "_LoRALinearBackward"}
)
# Libraries whose linear layers and adapters are known to keep no reference to what they return.
_KNOWN_PRODUCERS = frozenset({"torch", "peft", "bitsandbytes", "transformers", "fastft"})

_YES = Verdict(True, "a fresh projection output that nothing else holds")


def in_place_verdict(tensor: torch.Tensor, producer: nn.Module | None = None) -> Verdict:
    """Whether a projection's output is provably safe to rotate in place. To be asked right after it was produced.

    Args:
        tensor: the output as it was produced, not a view of it.
        producer: the module that returned it, whose hooks may have kept it; None if no module did.

    Returns:
        Yes only if every way to keep hold of the memory is excluded: views, saved tensors, hooks, dispatch modes.
        A no means out of place, and names the reason.
    """
    reason = _modes() or _autograd_state(tensor) or _owners(tensor) or _hooks(producer)
    return Verdict(False, reason) if reason else _YES


def _modes() -> str:
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, and fuses the rotation itself"
    if not torch.is_grad_enabled():
        return "gradients are off, so no backward node tells where the tensor comes from"
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "a torch dispatch or function mode is active (selective checkpointing is one) and may keep outputs"
    return ""


def _autograd_state(tensor: torch.Tensor) -> str:
    node = tensor.grad_fn
    if node is None:
        return "a leaf" if tensor.requires_grad else "without a gradient no backward node tells where it comes from"
    if tensor._is_view():
        return "a view: its base would be written as well, and backward would copy the base's whole gradient"
    if node.name() not in _FRESH_OUTPUT_NODES:
        return f"made by {node.name()}, which is not known to leave its output to the caller"
    if tensor.retains_grad or tensor._backward_hooks:
        return "its gradient is retained or hooked, which in place would be the gradient after the rotation"
    if type(tensor) is not torch.Tensor:
        return f"a {type(tensor).__name__}, which may hold its memory in its own way"
    return ""


def _owners(tensor: torch.Tensor) -> str:
    if not hasattr(tensor, "_use_count"):
        return "this torch version does not tell how many operations hold a tensor"
    owners, storage_owners = _count_owners(tensor)
    fresh_owners, fresh_storage_owners = _owners_of_a_fresh_tensor()
    if owners != fresh_owners:
        return "saved by another operation, which needs it as it is"
    if storage_owners != fresh_storage_owners:
        return "its memory is shared with another tensor"
    return ""


def _count_owners(tensor: Any) -> tuple[int, int]:
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def _owners_of_a_fresh_tensor() -> tuple[int, int]:
    return _count_owners(torch.empty(1))


def _hooks(producer: nn.Module | None) -> str:
    if module_registry._global_forward_hooks or module_registry._global_forward_pre_hooks:
        return "a global module forward hook may keep outputs"
    if producer is None:
        return ""
    for name, module in producer.named_modules():
        where = f"{type(module).__name__} {name!r}" if name else type(module).__name__
        if module._forward_hooks or module._forward_pre_hooks:
            return f"a forward hook on {where} may keep the output"
        forward = module.__dict__.get("forward", type(module).forward)
        function = forward.__func__ if isinstance(forward, MethodType) else forward
        if (getattr(function, "__module__", None) or "").partition(".")[0] not in _KNOWN_PRODUCERS:
            return f"the forward of {where} is not one of a library known to keep no output"
    return ""


# ------------------------------------------------------------------------------------------------ refusals


def refuse_writing(q: torch.Tensor, k: torch.Tensor, num_token_dims: int) -> None:
    """Raise KernelInputError if rotating q and k in place is impossible or wrong whoever owns them."""
    if torch._C._len_torch_dispatch_stack():
        raise KernelInputError(
            "rope_qk_: a torch dispatch mode is active (selective checkpointing is one), which may keep q and k as "
            "they were and cannot see a kernel write them; use rope_qk"
        )
    for name, x in (("q", q), ("k", k)):
        reason = _unwritable(x)
        if reason:
            raise KernelInputError(f"rope_qk_: {name} cannot be written in place: {reason}; use rope_qk")
    if _overlap(q, k, num_token_dims):
        raise KernelInputError("rope_qk_: q and k share memory, so both would be rotated twice in places; use rope_qk")


def _unwritable(x: torch.Tensor) -> str:
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return "it was made in inference mode, and is immutable outside of it"
    if not _elements_are_distinct(x):
        return f"several of its elements share memory (shape {tuple(x.shape)}, strides {x.stride()})"
    if not torch.is_grad_enabled():
        return ""
    base = x._base if x._base is not None else x
    if (x.requires_grad and x.is_leaf) or (base.requires_grad and base.is_leaf):
        return "it is, or is a view of, a leaf that requires grad"
    if x._is_view() and (x.requires_grad or base.requires_grad):
        creation = torch._C._autograd._get_creation_meta(x)
        if creation != torch._C._autograd.CreationMeta.DEFAULT:
            return f"autograd cannot follow a write to a view of this kind ({creation.name}, as split makes)"
    return ""


def _elements_are_distinct(x: torch.Tensor) -> bool:
    """Whether the strides provably give every element its own memory."""
    if x.is_contiguous() or x.numel() == 0:
        return True
    extent = 0  # offset of the last element along the dimensions of smaller stride
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= extent:
            return False
        extent += (size - 1) * stride
    return True


def _overlap(q: torch.Tensor, k: torch.Tensor, num_token_dims: int) -> bool:
    """Whether q and k may share an element: provably not if they lie apart, or side by side within each token."""
    if q.numel() == 0 or k.numel() == 0 or q.untyped_storage()._cdata != k.untyped_storage()._cdata:
        return False
    first, second = sorted((q, k), key=torch.Tensor.data_ptr)
    distance = second.data_ptr() - first.data_ptr()
    if distance >= _bytes_spanned(first):
        return False
    # Slices of one fused projection: the same strides from token to token, and room for both within one token.
    sizes, strides = first.shape[:num_token_dims], first.stride()[:num_token_dims]
    if sizes != second.shape[:num_token_dims] or strides != second.stride()[:num_token_dims]:
        return True
    token_stride = min((stride for stride, size in zip(strides, sizes, strict=True) if size > 1), default=0)
    end_of_second = distance + _bytes_spanned(second, num_token_dims)
    return distance < _bytes_spanned(first, num_token_dims) or end_of_second > token_stride * first.element_size()


def _bytes_spanned(x: torch.Tensor, first_dim: int = 0) -> int:
    pairs = zip(x.shape[first_dim:], x.stride()[first_dim:], strict=True)
    return (1 + sum((size - 1) * stride for size, stride in pairs)) * x.element_size()
