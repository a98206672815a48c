"""TRL's head without logits, for patched models with a frozen head: two products of matrices where TRL makes three.

TRL's trainers for SFT, DPO, KTO and GRPO give a model a forward that computes log-probabilities of tokens in tiles, and
make each tile again in backward. Where the head is frozen, the gradient of each token is known in forward up to the
number that comes for it in backward, whatever the loss does with log-probabilities.

That forward asks the model for its output embeddings, right before it computes. A method bound onto the patched model
hears of it, and puts another object in the place of TRL's function for the one call that follows: TRL's function is
untouched before and after, for other models and on other threads. What it does not serve goes to TRL's function, and is
counted with the reason. Nothing here imports TRL: who calls has done it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..modules.state import ModelState, state_of
from ..ops.linear_cross_entropy import token_log_probs

_MODULE, _CALLER, _FUNCTION = "trl.trainer.utils", "_fused_forward", "_ChunkedLogProbFunction"
# Of TRL's outputs, those that the pass over the logits finds as well, and one that takes no logits without a cap.
_KNOWN_OUTPUTS = frozenset(("log_probs", "entropy", "is_top1", "mean_logits"))
# A chunk of logits at most: more makes the products little faster, and would be the largest tensor of small models.
_MAX_LOGITS_BYTES = 768 * 2**20
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


def why_not_served(model: nn.Module) -> str:
    """Why a pretrained model has no head that can be served, or ""."""
    ask = getattr(type(model), "get_output_embeddings", None)
    head = ask(model) if ask is not None else None
    if type(head) is not nn.Linear:
        return "it has no head over a vocabulary" if head is None else f"its head is a {type(head).__name__}"
    return "its method get_output_embeddings was replaced" if _own(model) not in (None, get_output_embeddings) else ""


def bind(model: nn.Module) -> None:
    """Lets a pretrained model hear of TRL's head."""
    model.__dict__["get_output_embeddings"] = MethodType(get_output_embeddings, model)


def unbind(model: nn.Module) -> None:
    """Takes the method back from a model, and what a pickle has made of it: the class's own method, bound."""
    for module in model.modules():
        if _own(module) in (get_output_embeddings, getattr(type(module), "get_output_embeddings", None)):
            module.__dict__.pop("get_output_embeddings", None)


def is_bound(model: nn.Module) -> bool:
    return _own(model) is get_output_embeddings


def _own(model: nn.Module) -> Any:
    return getattr(model.__dict__.get("get_output_embeddings"), "__func__", None)


def get_output_embeddings(self: Any) -> Any:
    """The class's own answer; to TRL's head it comes with a stand-in for what that calls next."""
    head = type(self).get_output_embeddings(self)
    if torch.compiler.is_compiling():
        return head
    caller = sys._getframe(1)
    if caller.f_code.co_name == _CALLER and caller.f_globals.get("__name__") == _MODULE:
        state = next((state for module in self.modules() if (state := state_of(module)) is not None), None)
        function = caller.f_globals.get(_FUNCTION)
        if state is not None and function is not None:
            caller.f_globals[_FUNCTION] = _OneCall(state.shared, head, function, caller.f_globals)
    return head


class _OneCall:
    """In the place of TRL's function for one call, of one thread."""

    def __init__(self, shared: ModelState, head: Any, function: Any, namespace: dict[str, Any]) -> None:
        self._shared, self._head, self._namespace = shared, head, namespace
        # An exception may have left one behind, or another thread be about to call its own.
        self._function: Any = function._function if isinstance(function, _OneCall) else function
        self._thread = threading.get_ident()

    def apply(self, *args: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._function.apply(*args)
        self._namespace[_FUNCTION] = self._function
        reason = self._why_not(args)
        if reason:
            self._shared.counters[f"loss by TRL's own head: {reason}"] += 1
            return self._function.apply(*args)
        self._shared.counters["loss"] += 1
        return _log_probs(self._function.apply, str(self._shared.config.loss), *args)

    def _why_not(self, args: tuple[Any, ...]) -> str:
        if len(args) != 9:
            return "this version of TRL calls it otherwise"
        hidden, weight, bias, targets, *_, softcap, _, outputs = args
        tensors = (hidden, weight, targets) if bias is None else (hidden, weight, targets, bias)
        if any(type(tensor) not in _PLAIN_TENSORS for tensor in tensors) or hasattr(weight, "ds_id"):
            return "a tensor is not a plain one (sharded, quantized)"
        if weight is not self._head.weight:
            return "it is not the model's own head"
        if not _KNOWN_OUTPUTS.issuperset(outputs):
            return f"{sorted(set(outputs) - _KNOWN_OUTPUTS)[0]} is asked for"
        if softcap and "mean_logits" in outputs:
            return "mean_logits is asked for, under a softcap"
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            return "the head is trained, which takes as many products either way"
        if not (hidden.requires_grad and torch.is_grad_enabled()):
            return "no gradients are asked for"
        if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
            return "a transform or a dispatch mode watches"
        if not len(targets):
            return "no token has a target"
        dtypes = {tensor.dtype for tensor in tensors if tensor is not targets}
        if len(dtypes) > 1 and not torch.is_autocast_enabled(hidden.device.type):
            return "dtypes differ, and autocast is off"
        return ""


def _log_probs(
    function: Callable[..., Any],
    impl: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    tile: int,
    softcap: float | None,
    logit_scale: float,
    outputs: tuple[str, ...],
) -> tuple[torch.Tensor | None, ...]:
    """What TRL's function returns, in its order; what was not asked for is None."""
    log_probs, statistics = token_log_probs(
        hidden,
        weight,
        targets,
        bias=bias,
        temperature=temperature,
        num_valid=len(targets),
        logit_scale=logit_scale,
        softcap=softcap,
        return_statistics=True,
        max_logits_bytes=_MAX_LOGITS_BYTES,
        impl=impl,
    )
    entropy = mean_logits = is_top1 = None
    if "mean_logits" in outputs:
        mean_logits = _mean_logits(hidden, weight, bias) * (logit_scale / temperature)
    if "entropy" in outputs:
        options = (temperature, tile, softcap, logit_scale, ("entropy",))
        entropy = _Entropy.apply(hidden, statistics.entropy, function, (weight, bias, targets), options)
    if "is_top1" in outputs:
        is_top1 = statistics.argmax == targets
    return log_probs, entropy, None, mean_logits, is_top1


@torch.no_grad()
def _mean_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[N] fp32: the logit of the mean row of W."""
    with torch.autocast(hidden.device.type, enabled=False):
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
        return mean if bias is None else mean + bias.mean(dtype=torch.float32)


class _Entropy(torch.autograd.Function):
    """An entropy that was computed without a graph. Few losses have a use for its gradient: TRL's function makes it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        entropy: torch.Tensor,
        function: Callable[..., Any],
        tensors: tuple[torch.Tensor | None, ...],
        options: tuple[Any, ...],
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, *tensors)
        ctx.function, ctx.options = function, options
        kind = hidden.device.type
        ctx.autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        return entropy.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, *tensors = ctx.saved_tensors
        hidden, (enabled, dtype) = hidden.detach().requires_grad_(), ctx.autocast
        with torch.enable_grad(), torch.autocast(hidden.device.type, dtype=dtype, enabled=enabled):
            entropy = ctx.function(hidden, *tensors, *ctx.options)[1]
        return *torch.autograd.grad(entropy, hidden, grad), None, None, None, None
