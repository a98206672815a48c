"""The hooks on a backbone: which sequences a batch holds, once per forward, and its padding taken out and put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import PackingError, UnsupportedModelError
from ..packing import PackedSequences
from ..unpadding import UnpaddedSequences
from .dynamo import is_exporting
from .sequences import find_sequences, row_boundaries, tokens_of
from .state import ModuleState, arguments_by_name, state_of


def announce_packing(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook: puts `packed_sequences` into the keyword arguments of a batch that fastft's attention serves.

    Such a batch gets a 4-D mask of size zero, which the stock mask code hands through: no mask is built and nothing
    is synchronised. A cache makes no sense for it and is turned off. If it is padded, its real tokens become one row.
    Every other batch passes through unchanged.
    """
    state = state_of(module)
    if state is None or is_exporting():
        return None
    given = arguments_by_name(state, args, kwargs)
    if given is None or (torch.compiler.is_compiling() and _is_plainly_stock(module, given)):
        return None
    return _announce(state, module, given)


def _is_plainly_stock(module: nn.Module, given: dict[str, Any]) -> bool:
    """Whether a batch goes the stock way whatever its values are, so that a compiled forward stays in one piece."""
    if any(given.get(name) is not None for name in ("packed_sequences", "cu_seq_lens_q", "seq_idx")):
        return False
    if given.get("past_key_values") is not None:
        return True
    training = module.training and torch.is_grad_enabled()
    return not training and all(given.get(name) is None for name in ("position_ids", "attention_mask"))


# What it looks at differs from batch to batch; a compiler would specialise on it.
@torch.compiler.disable
def _announce(
    state: ModuleState, module: nn.Module, kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if getattr(module, "_is_replica", False):
        raise UnsupportedModelError(
            "nn.DataParallel copies modules without their bound forwards, which would compute on the original's "
            "weights; launch one process a GPU instead (accelerate launch, torchrun), or set CUDA_VISIBLE_DEVICES"
        )
    used_padding, state.shared.used_padding = state.shared.used_padding, None
    packed, reason = find_sequences(state.shared, module, kwargs, used_padding)
    state.shared.counters[f"batches: {reason}"] += 1
    if packed is None:
        if "packed_sequences" not in kwargs:
            return None
        if kwargs.pop("packed_sequences") is not None:
            raise PackingError(f"packed_sequences cannot be honoured for this batch ({reason}); leave one of them out")
        return (), kwargs
    tokens = tokens_of(kwargs)
    state.attention_before = _attention_calls(state)
    kwargs["packed_sequences"] = packed
    kwargs["attention_mask"] = torch.empty(0, 0, 0, 0, dtype=torch.bool, device=tokens.device)
    kwargs["use_cache"] = False
    if isinstance(packed, UnpaddedSequences):
        state.shared.counters["padding dropped, in tokens"] += packed.padding
        _unpad(packed, kwargs, tokens)
    elif kwargs.get("position_ids") is None:
        kwargs["position_ids"] = packed.position_ids.view(tokens.shape[:2])
    if state.rules.carries_state:
        _tell_boundaries(packed, kwargs, tokens)
    return (), kwargs


def _tell_boundaries(packed: PackedSequences, kwargs: dict[str, Any], tokens: torch.Tensor) -> None:
    """By the keywords of the kernels of state-space layers, linear attention and short convolutions.

    Raises:
        PackingError: more than one row, which those kernels do not take beside boundaries.
    """
    if packed.cu_seqlens_host == row_boundaries(*tokens.shape[:2]):  # rows never share a state
        for name in ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
            kwargs.pop(name, None)
        return
    if tokens.shape[0] != 1:
        raise PackingError(
            f"the state of this model's layers can be kept apart in one packed row, not in {tokens.shape[0]}; flatten "
            "the batch into one row (per_device_train_batch_size=1, or a padding-free collator)"
        )
    kwargs["seq_idx"] = packed.doc_ids.to(torch.int32)[None]
    kwargs["cu_seq_lens_q"] = kwargs["cu_seq_lens_k"] = packed.cu_seqlens
    kwargs["max_length_q"] = kwargs["max_length_k"] = packed.max_seqlen


def _unpad(packed: UnpaddedSequences, kwargs: dict[str, Any], tokens: torch.Tensor) -> None:
    """Leaves only the real tokens in the arguments, each at the position that it has in the padded batch."""
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(packed.length, device=tokens.device)[None]
    kwargs["position_ids"] = packed.unpad(positions)
    for name in ("input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            kwargs[name] = packed.unpad(kwargs[name])


def finish_packing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook: puts the outputs of a batch that lost its padding back to their places, with zeros at the padding.

    Raises:
        PackingError: no attention module of this backbone used the boundaries, so the batch was computed wrongly.
    """
    packed = kwargs.get("packed_sequences")
    if packed is None:
        return None
    _check_attention_ran(module)
    return _repadded(packed, output) if isinstance(packed, UnpaddedSequences) else None


@torch.compiler.disable
def _repadded(packed: UnpaddedSequences, output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return packed.repad(output)
    if isinstance(output, tuple):  # return_dict=False, where no batch loses its padding if something is recorded
        return packed.repad(output[0]), *output[1:]
    output["last_hidden_state"] = packed.repad(output["last_hidden_state"])
    router_logits = output.get("router_logits")
    if router_logits is not None:
        output["router_logits"] = tuple(packed.repad_rows(x) if x.ndim == 2 else packed.repad(x) for x in router_logits)
    return output


@torch.compiler.disable
def _check_attention_ran(module: nn.Module) -> None:
    state = state_of(module)
    if state is not None and _attention_calls(state) == state.attention_before:
        raise PackingError(
            f"{type(module).__name__} got a packed batch, but none of its layers called fastft's attention, so its "
            "sequences were not kept apart; patch with packing=False and feed it separate rows"
        )


def _attention_calls(state: ModuleState) -> int:
    return sum(count for name, count in state.shared.counters.items() if name.startswith("attention"))
