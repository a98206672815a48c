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

import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..capability import probe
from ..modules.state import ModelState, state_of
from ..ops.first_order import first_order
from ..ops.linear_cross_entropy import token_log_probs

_MODULE, _CALLER, _FUNCTION = "trl.trainer.utils", "_fused_forward", "_ChunkedLogProbFunction"
# Of TRL's outputs, those that the pass over the logits finds as well, and one that takes no logits without a cap.
_KNOWN_OUTPUTS = frozenset(("log_probs", "entropy", "is_top1", "mean_logits"))
_PARAMETERS = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip
# Rows of a chunk of logits: products with 2,048 fill an H200 once or twice, with some hundred more they leave half of
# it idle (Llama-3.2-1B: 14.2 ms, with 2,816 rows 15.1). On small cards a share of the memory, of which logits would be
# the largest tensor.
_ROWS, _SHARE_OF_MEMORY = 2048, 1 / 64
_NAME = "get_output_embeddings"
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


def why_not_served(model: nn.Module) -> str:
    """Why a pretrained model has no head that can be served, or ""."""
    ask = getattr(type(model), "get_output_embeddings", None)
    head = ask(model) if ask is not None else None
    if type(head) is not nn.Linear:
        return "it has no head over a vocabulary" if head is None else f"its head is a {type(head).__name__}"
    return "its method get_output_embeddings was replaced" if _NAME in model.__dict__ and not _is_ours(model) else ""


def bind(model: nn.Module) -> None:
    """Lets a pretrained model hear of TRL's head."""
    model.__dict__[_NAME] = MethodType(get_output_embeddings, model)


def unbind(model: nn.Module) -> None:
    """Takes the method back, and what an exception has left in the place of TRL's function."""
    for module in model.modules():
        if _is_ours(module):
            del module.__dict__[_NAME]
    trl = sys.modules.get(_MODULE)
    left = getattr(trl, _FUNCTION, None)
    if isinstance(left, _OneCall):
        setattr(trl, _FUNCTION, left.function)


def is_bound(model: nn.Module) -> bool:
    return _own(model) is get_output_embeddings


def _is_ours(model: nn.Module) -> bool:
    """Whether the method on a model is that of this file, or what a pickle makes of it: the class's own, bound."""
    own = _own(model)
    return own is not None and own in (get_output_embeddings, getattr(type(model), _NAME, None))


def _own(model: nn.Module) -> Any:
    return getattr(model.__dict__.get(_NAME), "__func__", None)


def get_output_embeddings(self: Any) -> Any:
    """The class's own answer; to TRL's head it comes with a stand-in for what that calls next."""
    head = type(self).get_output_embeddings(self)
    if torch.compiler.is_compiling():
        return head
    caller = sys._getframe(1)
    if caller.f_code.co_name == _CALLER and caller.f_globals.get("__name__") == _MODULE:
        function = caller.f_globals.get(_FUNCTION)
        if function is not None:
            caller.f_globals[_FUNCTION] = _OneCall(self, head, function, caller.f_globals)
    return head


class _OneCall:
    """In the place of TRL's function for one call, of one thread. It keeps nothing of a model alive."""

    def __init__(self, model: nn.Module, head: nn.Module, function: Any, namespace: dict[str, Any]) -> None:
        self._model, self._head, self._namespace = weakref.ref(model), weakref.ref(head), namespace
        # An exception may have left one behind, or another thread be about to call its own.
        self.function: Any = function.function if isinstance(function, _OneCall) else function
        self._thread = threading.get_ident()

    def apply(self, *args: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self.function.apply(*args)
        self._namespace[_FUNCTION] = self.function
        shared = self._shared()
        if shared is None:
            return self.function.apply(*args)
        reason = self._why_not(args)
        if reason:
            shared.counters[f"loss by TRL's own head: {reason}"] += 1
            return self.function.apply(*args)
        shared.counters["loss"] += 1
        return _log_probs(self.function.apply, str(shared.config.loss), *args)

    def _shared(self) -> ModelState | None:
        """Of the model, if it is there and patched still."""
        model = self._model()
        if model is None or not is_bound(model):
            return None
        state = next((state for module in model.modules() if (state := state_of(module)) is not None), None)
        return None if state is None else state.shared

    def _why_not(self, args: tuple[Any, ...]) -> str:
        forward = inspect.signature(self.function.forward).parameters
        if len(args) != len(_PARAMETERS) or tuple(forward)[1:] != _PARAMETERS:
            return "this version of TRL calls it otherwise"
        hidden, weight, bias, targets, *_, softcap, _, outputs = args
        tensors = (hidden, weight, targets) if bias is None else (hidden, weight, targets, bias)
        if any(type(tensor) not in _PLAIN_TENSORS for tensor in tensors) or hasattr(weight, "ds_id"):
            return "a tensor is not a plain one (sharded, quantized)"
        head: Any = self._head()
        if head is None or weight is not head.weight:
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
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        if any(tensor.dtype != dtype for tensor in tensors[1:] if tensor is not targets):
            return "the head is in another dtype than it is computed in"
        # Made in forward for an upstream gradient of one, what is small is lost before the loss's scale comes to it.
        return "fp16 would lose small gradients" if dtype == torch.float16 else ""


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
        max_logits_bytes=_most_logits(weight),
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


def _most_logits(weight: torch.Tensor) -> int:
    """Bytes of a chunk; rows are padded to 64 logits."""
    padded = -(-weight.shape[0] // 64) * 64
    wanted = _ROWS * padded * weight.element_size()
    memory = probe(weight.device).device.total_memory
    return min(wanted, int(memory * _SHARE_OF_MEMORY)) if memory else wanted


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
    @first_order("loss")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, *tensors = ctx.saved_tensors
        hidden, (enabled, dtype) = hidden.detach().requires_grad_(), ctx.autocast
        with torch.enable_grad(), torch.autocast(hidden.device.type, dtype=dtype, enabled=enabled):
            entropy = ctx.function(hidden, *tensors, *ctx.options)[1]
        return *torch.autograd.grad(entropy, hidden, grad), None, None, None, None
