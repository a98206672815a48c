"""Which sequences a batch holds: asked of what came with it, or else read from its positions and its mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import PackingError
from ..packing import PackedSequences
from ..unpadding import NO_PADDING, UnpaddedSequences
from .attention import AttentionName
from .foreign import why_rows_matter
from .state import ModelState, UsedPadding, state_of

# Why a batch goes the stock way although boundaries may have come with it.
_CACHE = "a cache is in use, which holds one sequence a row"
_OTHER_MASK = "a 2-D attention mask of another shape than the tokens"
_PREPARED_MASK = "a prepared attention mask"

# What loses its padding with the batch, or says where it is. The backbone ignores labels.
_MAPPED = frozenset({"input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels"})


def tokens_of(kwargs: dict[str, Any]) -> Any:
    """What a forward was given to compute on: token ids, or their embeddings; None if neither."""
    ids = kwargs.get("input_ids")
    return ids if ids is not None else kwargs.get("inputs_embeds")


def find_sequences(
    shared: ModelState, module: nn.Module, kwargs: dict[str, Any], used_padding: UsedPadding | None
) -> tuple[PackedSequences | None, str]:
    """The boundaries of this batch and how they were found, or None with the reason why it goes the stock way.

    Args:
        shared: of the model.
        module: its backbone.
        kwargs: the backbone's.
        used_padding: what its head has announced.

    Raises:
        PackingError: what came with the batch contradicts itself.
    """
    tokens = tokens_of(kwargs)
    reason = _stock_reason(shared, module, kwargs, tokens)
    if reason:
        _check_not_ignored(module, kwargs, reason)
        return None, f"stock, {reason}"
    batch_size, length = tokens.shape[:2]
    position_ids, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    _check_positions(position_ids, batch_size, length)
    given, from_collator = kwargs.get("packed_sequences"), kwargs.get("cu_seq_lens_q") is not None
    if given is None and not from_collator:
        return _from_positions(shared, module, kwargs, position_ids, tokens, used_padding)
    check_no_padding(shared, mask)
    packed = given if given is not None else boundaries_of_collator(shared, kwargs, batch_size * length)
    _check_covers(packed, batch_size, length)
    how = "given by the caller" if given is not None else "boundaries from the collator"
    return packed.to(tokens.device), f"packed, {how}"


def text_positions(position_ids: Any) -> torch.Tensor | None:
    """The positions within the text, [B, L]: M-RoPE's [4, B, L] begin with them, its [3, B, L] do not tell them."""
    if not isinstance(position_ids, torch.Tensor) or position_ids.is_floating_point():
        return None
    if position_ids.ndim == 3 and len(position_ids) == 4:
        return position_ids[0]
    return position_ids if position_ids.ndim == 2 else None


def has_values(tensor: torch.Tensor) -> bool:
    """Whether there is something to read: not on the meta device, nor under a tracer that only follows shapes."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor) and not _is_transformed(tensor)


def _stock_reason(shared: ModelState, module: Any, kwargs: dict[str, Any], tokens: Any) -> str:
    """Why boundaries are not even looked for; empty if they are."""
    if tokens is None:
        return "no tokens given"
    if shared.config.packing is False:
        return "packing=False"
    if kwargs.get("past_key_values") is not None:
        return _CACHE
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.shape == tokens.shape[:2]):
        return _OTHER_MASK if isinstance(mask, torch.Tensor) and mask.ndim == 2 else _PREPARED_MASK
    if any(map(_is_transformed, (mask, kwargs.get("position_ids")))):
        return "a transform of torch.func, under which no values can be read"
    implementation = module.config._attn_implementation
    if not isinstance(implementation, AttentionName):
        return f"the attention implementation was set to {implementation!r} after patching"
    return ""


def _is_transformed(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


# ----------------------------------------------------------------------------------------------------- checks


def _check_not_ignored(module: Any, kwargs: dict[str, Any], reason: str) -> None:
    """A collator's boundaries beside something that only the previous implementation handles: flash attention honours
    them there, every other one would let the sequences see each other without a word."""
    if kwargs.get("cu_seq_lens_q") is None or reason not in (_CACHE, _OTHER_MASK, _PREPARED_MASK):
        return
    implementation = module.config._attn_implementation
    previous = getattr(implementation, "previous", implementation)
    if "flash" not in str(previous):
        raise PackingError(
            f"cu_seq_lens_q cannot be honoured for this batch ({reason}): {previous!r} attention ignores boundaries; "
            "leave one of the two out"
        )


def _check_positions(position_ids: torch.Tensor | None, batch_size: int, length: int) -> None:
    if position_ids is None:
        return
    if position_ids.ndim == 0 or position_ids.shape[-1] != length:
        got = position_ids.shape[-1] if position_ids.ndim else "no row of"
        raise PackingError(
            f"position_ids are for {got} tokens, the batch has {length} a row; the collator has to extend both alike"
        )
    if position_ids.ndim == 2 and position_ids.shape[0] not in (1, batch_size):
        raise PackingError(
            f"position_ids are for {position_ids.shape[0]} rows, the batch has {batch_size}; give one a row"
        )


def check_no_padding(shared: ModelState, mask: torch.Tensor | None) -> None:
    """Boundaries leave no room for padding: every token belongs to a sequence."""
    if mask is None:
        return
    question = ("no padding",)
    found, _ = shared.packed_cache.lookup(question, mask)
    if found:
        return
    if not bool(mask.all()):
        raise PackingError(
            "the batch has both boundaries of packed sequences and an attention_mask that hides tokens; leave the mask "
            "out, and make padding at the end of a row a sequence of its own"
        )
    shared.packed_cache.remember(None, question, mask)


def check_not_only_seq_idx(kwargs: dict[str, Any]) -> None:
    """Such a batch is packed, and its positions run on from one document into the next."""
    if kwargs.get("seq_idx") is not None and kwargs.get("position_ids") is None:
        raise PackingError("seq_idx came without position_ids, which would start again in each document; pass both")


def _check_covers(packed: Any, batch_size: int, length: int) -> None:
    if not isinstance(packed, PackedSequences):
        raise PackingError(f"packed_sequences must be a fastft.PackedSequences, got {type(packed).__name__}")
    if packed.total_tokens != batch_size * length:
        raise PackingError(
            f"packed_sequences cover {packed.total_tokens} tokens, the batch has {batch_size * length}; build them "
            "from this batch"
        )
    boundaries = packed.cu_seqlens_host
    if batch_size > 1 and boundaries is not None and not set(row_boundaries(batch_size, length)) <= set(boundaries):
        raise PackingError(
            f"a sequence runs from one row of the batch ({batch_size} rows of {length} tokens) into the next; "
            "packed_sequences needs a boundary at the end of each row"
        )


# ------------------------------------------------------------------------------------------------- boundaries


def boundaries_of_collator(shared: ModelState, kwargs: dict[str, Any], total_tokens: int) -> PackedSequences:
    cu_seqlens, keys = kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k")
    if not isinstance(cu_seqlens, torch.Tensor) or not isinstance(keys, torch.Tensor | None):
        raise PackingError(
            f"cu_seq_lens_q and cu_seq_lens_k must be tensors, got {type(cu_seqlens).__name__} and "
            f"{type(keys).__name__}; the collator has to make int32 tensors of them"
        )
    longest = kwargs.get("max_length_q")
    if not isinstance(longest, int | float | torch.Tensor):
        came = "without max_length_q" if longest is None else f"with max_length_q={longest!r}"
        raise PackingError(f"cu_seq_lens_q came {came}; pass the length of the longest sequence as a number")
    if keys is not None and keys is not cu_seqlens:
        on_host = keys.device.type == cu_seqlens.device.type == "cpu"  # elsewhere a comparison would wait
        if keys.shape != cu_seqlens.shape or (on_host and not torch.equal(keys, cu_seqlens)):
            raise PackingError(
                "cu_seq_lens_q and cu_seq_lens_k describe different sequences; in self-attention they are equal"
            )
    question = ("boundaries", total_tokens, int(longest), torch.is_inference_mode_enabled())
    found, packed = shared.packed_cache.lookup(question, cu_seqlens)
    if not found or packed is None:
        packed = PackedSequences.from_cu_seqlens(cu_seqlens.reshape(-1), int(longest), total_tokens)
        shared.packed_cache.remember(packed, question, cu_seqlens)
    return packed


def _from_positions(
    shared: ModelState,
    module: nn.Module,
    kwargs: dict[str, Any],
    position_ids: torch.Tensor | None,
    tokens: torch.Tensor,
    used_padding: UsedPadding | None,
) -> tuple[PackedSequences | None, str]:
    batch_size, length = tokens.shape[:2]
    mask = kwargs.get("attention_mask")
    if position_ids is not None and position_ids.is_floating_point():
        return None, "stock, positions that are no integers"
    check_not_only_seq_idx(kwargs)
    positions = text_positions(position_ids)
    if position_ids is not None and positions is None:
        return None, f"stock, positions of {position_ids.ndim} dimensions"
    whole_rows = _serves_whole_rows(module, kwargs)
    if position_ids is None and mask is None:
        if not whole_rows:
            return None, "stock, whole rows outside training"
        return PackedSequences.from_lengths([length] * batch_size, tokens.device), "whole rows"
    told = used_padding is not None and mask is not None and _is_same(used_padding.attention_mask, mask)
    keeps_padding = "" if mask is None else _why_padding_stays(module, kwargs, told)
    if mask is not None and positions is not position_ids:
        keeps_padding = "positions of several dimensions"
    if position_ids is None and not whole_rows and keeps_padding:
        return None, f"stock, {keeps_padding}"
    if not has_values(tokens):
        return None, "stock, there are no values to read"
    # Boundaries made in inference mode cannot be saved for a backward later.
    question = ("positions", batch_size, length, whole_rows, keeps_padding, torch.is_inference_mode_enabled())
    places = used_padding.places if used_padding is not None and told else None
    sources = (position_ids, mask, places)
    found, answer = shared.packed_cache.lookup(question, *sources)
    if not found:
        answer = _read(module, positions, tokens, mask, places, whole_rows, keeps_padding)
        shared.packed_cache.remember(answer, question, *sources)
    if isinstance(answer, str):
        return None, f"stock, {answer}"
    if isinstance(answer, UnpaddedSequences):
        return answer, "packed, padding dropped"
    unpacked = answer.cu_seqlens_host == row_boundaries(batch_size, length)
    return answer, "whole rows" if unpacked else "packed, positions restart"


def _read(
    module: nn.Module,
    position_ids: torch.Tensor | None,
    tokens: torch.Tensor,
    mask: torch.Tensor | None,
    used_places: torch.Tensor | None,
    whole_rows: bool,
    keeps_padding: str,
) -> PackedSequences | str:
    """The boundaries, or why the batch goes the stock way; one synchronisation on a device."""
    batch_size, length = tokens.shape[:2]
    if position_ids is not None:
        position_ids = position_ids.expand(batch_size, length)
    if mask is not None and not keeps_padding:
        unpadded = UnpaddedSequences.from_mask(mask, position_ids, used_places)
        if isinstance(unpadded, UnpaddedSequences):
            state = state_of(module)
            if unpadded.starts_padded and (state is None or state.family is None):
                return "padding before the tokens, in a family that fastft does not know"
            return why_rows_matter(module) or unpadded
        if unpadded != NO_PADDING:
            return unpadded
        mask = None
    if position_ids is None:
        if not whole_rows:
            return "whole rows outside training"
        if mask is None:
            return PackedSequences.from_lengths([length] * batch_size, tokens.device)
        position_ids = torch.arange(length, device=tokens.device).expand(batch_size, length)
    packed = PackedSequences.from_position_ids(position_ids, mask, whole_rows=whole_rows)
    why = f" ({keeps_padding})" if mask is not None else ""
    return packed if packed is not None else f"padded or ambiguous positions{why}"


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.device == b.device and a.data_ptr() == b.data_ptr())


def _why_padding_stays(module: Any, kwargs: dict[str, Any], told: bool) -> str:
    """Why a padded batch keeps its padding, whatever its mask says; empty if it may lose it.

    The outputs have zeros where the padding was, and there is no cache. That suits training, with gradients, or without
    them and told to use no cache (log-probabilities of a reference policy); elsewhere, whoever promises to use nothing
    at padding, and no cache.
    """
    state, config = state_of(module), module.config
    if state is None or state.rules.keeps_padding:
        return "not patched" if state is None else state.rules.keeps_padding
    if state.shared.config.unpad is False:
        return "unpad=False"
    use_cache = kwargs.get("use_cache")
    unwanted = (getattr(config, "use_cache", None) if use_cache is None else use_cache) is False
    promised = state.shared.config.unpad is True
    training = module.training and torch.is_grad_enabled()
    if use_cache or not (training or (unwanted and (module.training or promised))):
        return "padded rows outside training"
    if not told and not promised:
        return "which outputs are used is not known"
    for what in ("attentions", "hidden_states"):
        if _is_recorded(what, config, kwargs):
            return f"{what} are recorded"
    if _is_recorded("router_logits", config, kwargs) and kwargs.get("return_dict", config.return_dict) is False:
        return "router logits are recorded in a tuple"
    for name, value in kwargs.items():
        if name not in _MAPPED and isinstance(value, torch.Tensor) and value.ndim:
            return f"{name!r} cannot be mapped to a batch without padding"
    if getattr(_embedding(module), "neftune_noise_alpha", None) is not None:
        return "NEFTune's noise depends on the length of the rows"
    return ""


def _is_recorded(what: str, config: Any, kwargs: dict[str, Any]) -> bool:
    """An index is a wish as well: of one layer's states."""
    asked = kwargs.get(f"output_{what}")
    if asked is None:
        asked = getattr(config, f"output_{what}", False)
    return asked is not False and asked is not None


def _embedding(module: Any) -> nn.Module | None:
    found = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
    return found if isinstance(found, nn.Module) else None


def _serves_whole_rows(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Unpacked rows are worth serving in training only: elsewhere a caller may want the cache that stock returns, or
    the attention weights. A family that fastft does not know may draw more into its mask than causality."""
    state = state_of(module)
    known = state is not None and state.family is not None
    training = module.training and torch.is_grad_enabled()  # a loop that decodes may do so in training mode
    recording = kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False)
    return known and training and not kwargs.get("use_cache") and not recording


def row_boundaries(batch_size: int, length: int) -> tuple[int, ...]:
    return tuple(range(0, batch_size * length + 1, max(length, 1)))
