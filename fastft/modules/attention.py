"""Attention: the implementation and the mask registered as "fastft", and the forward bound onto attention modules.

The registered functions serve a packed batch of a patched model. Everything else (generation, caches, masks, other
models that were given a copy of a patched model's config) goes to the implementation that was there before, whose name
the config's own value carries.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import FastftError, PackingError
from ..ops.attention import resolve, varlen_attention
from ..packing import PackedSequences
from .chunked import sequences_seen_by, with_temperature_of_documents
from .dynamo import treat_as_constants
from .names import NAME, ImplementationName
from .projection import project
from .rotary import normalise_and_rotate, split_heads
from .state import ATTRIBUTE, ModelState, state_of


class AttentionName(ImplementationName):
    """Of a config's `_attn_implementation`."""


def register() -> None:
    """Makes the name "fastft" known to transformers. Harmless to other models, and to be repeated."""
    AttentionInterface.register(NAME, fastft_attention)
    AttentionMaskInterface.register(NAME, fastft_mask)
    treat_as_constants(AttentionName)


def _previous(config: Any) -> str:
    name = config._attn_implementation
    if isinstance(name, AttentionName):
        return name.previous
    raise FastftError(
        f'attn_implementation="{name}" belongs to patched models: load the model with another implementation (or '
        "none) and call fastft.patch_model(model), which selects it"
    )


# ------------------------------------------------------------------------------------------ registered functions


def fastft_mask(*args: Any, config: Any, **kwargs: Any) -> Any:
    """Builds the mask of the implementation that was there before; packed batches never come here."""
    previous = _previous(config)
    if previous not in ALL_MASK_ATTENTION_FUNCTIONS:  # transformers builds no mask for such an implementation
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, config=config, **kwargs)


def fastft_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_sequences: PackedSequences | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention as transformers calls it: q [B, Hq, L, D], k and v [B, Hk, L, D] to [B, L, Hq, D]."""
    state = state_of(module)
    if state is None and packed_sequences is not None:
        raise PackingError(
            f"{type(module).__name__} received the boundaries of a packed batch but is not patched, so it was added or "
            "replaced after patch_model; call fastft.patch_model(model) again"
        )
    if packed_sequences is None or state is None:
        if attention_mask is not None and attention_mask.numel() == 0 and query.numel():
            raise PackingError(
                f"{type(module).__name__} received a packed batch without its boundaries: a layer between it and the "
                "backbone dropped the keyword packed_sequences; pass it on, or patch with packing=False"
            )
        return _delegate(module, query, key, value, attention_mask, **kwargs)
    return _attend_packed(state.shared, module, query, key, value, packed_sequences, **kwargs)


# Boundaries differ from batch to batch; a compiler would specialise the code on them and compile it anew each time.
@torch.compiler.disable
def _attend_packed(
    shared: ModelState,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_sequences: PackedSequences,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if key.shape[2] != query.shape[2]:
        raise PackingError(
            f"{type(module).__name__} has {key.shape[2]} keys for {query.shape[2]} queries, so the boundaries of a "
            "packed batch do not apply to it; patch with packing=False"
        )
    query = with_temperature_of_documents(module, query, packed_sequences)
    packed_sequences = sequences_seen_by(module, packed_sequences)
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    window = kwargs.get("sliding_window")
    window_size = (None, None) if window is None else (window - 1, 0 if causal else window - 1)
    unsupported = _unsupported(module, kwargs, query, value)
    if unsupported:
        shared.counters[f"attention by the previous implementation: {unsupported}"] += 1
        mask = packed_sequences.attention_mask(causal=causal, window_size=window_size)
        return _delegate_packed(module, query, key, value, mask, **kwargs)
    batch, _, length, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in _one_dtype(query, key, value))
    dropout = kwargs.get("dropout", 0.0)
    engine = resolve(str(shared.config.attention), q.device, q.dtype, q.shape[-1], dropout > 0).impl
    shared.counters[f"attention: {engine}"] += 1
    out = varlen_attention(
        q,
        k,
        v,
        packed_sequences,
        softmax_scale=kwargs.get("scaling"),
        causal=causal,
        window_size=window_size,
        dropout=dropout,
        impl=engine,
    )
    return out.unflatten(0, (batch, length)), None


def _unsupported(module: nn.Module, kwargs: dict[str, Any], query: torch.Tensor, value: torch.Tensor) -> str:
    """What our engines lack for this call; empty when they can serve it."""
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            return name
    if kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False):
        return "attention weights are recorded"
    return "v's head dimension differs from q's" if value.shape[3] != query.shape[3] else ""


def _one_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v in the dtype of autocast, else in the narrowest among them (norms may have widened q and k)."""
    kind, first = tensors[0].device.type, tensors[0].dtype
    # Autocast knows no meta device, and leaves fp64 alone.
    if kind != "meta" and torch.is_autocast_enabled(kind) and first != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    else:
        dtype = min((x.dtype for x in tensors), key=lambda candidate: candidate.itemsize)
    if all(x.dtype == dtype for x in tensors):
        return tensors
    return tuple(x.to(dtype) for x in tensors)


def _delegate_packed(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The previous implementation with the boundaries drawn into a mask (T x T: the price of what we lack)."""
    previous = _previous(module.config)
    if previous not in ("eager", "sdpa"):
        previous = "eager"
    batch, _, length, _ = query.shape
    if batch > 1:  # the mask covers the tokens of all rows in one
        query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    if previous == "eager":
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    out, weights = _function(module, previous)(module, query, key, value, mask, **kwargs)
    if batch > 1:
        out = out[0].unflatten(0, (batch, length))
        if weights is not None:  # rows do not see each other: what is left of [1, H, B * L, B * L] are B blocks
            rows = weights[0].unflatten(2, (batch, length)).unflatten(1, (batch, length))
            weights = rows.diagonal(dim1=1, dim2=3).movedim(-1, 0)
    return out, weights


def _delegate(module: nn.Module, *tensors: torch.Tensor | None, **kwargs: Any) -> Any:
    previous = _previous(module.config)
    # Flash attention asks module.config for the implementation's name.
    asked = _WithConfig(module, previous) if "flash" in previous else module
    return _function(module, previous)(asked, *tensors, **kwargs)


def _function(module: nn.Module, name: str) -> Callable[..., Any]:
    if name != "eager":
        return ALL_ATTENTION_FUNCTIONS[name]
    for cls in type(module).__mro__:  # sharding libraries put classes of their own in front
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise FastftError(f"{type(module).__name__} has no eager attention; load its model with sdpa")


class _ConfigOf:
    """A config under another implementation's name. Copying it would take longer than a layer of a decoding step."""

    __slots__ = ("_attn_implementation", "_config")

    def __init__(self, config: Any, implementation: str) -> None:
        self._config = config
        self._attn_implementation = implementation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _WithConfig:
    """A module as another implementation should see it: with the config it had before it was patched."""

    __slots__ = ("_module", "config")

    def __init__(self, module: Any, implementation: str) -> None:
        self._module = module
        self.config = _ConfigOf(module.config, implementation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# ------------------------------------------------------------------------------------------------ bound forward


def forward(
    self: Any,  # an attention module of a known family
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Projections with fused LoRA, q and k rotated in one launch, packed attention, for [B, L, H].

    With a cache, or under torch.compile, the class's own forward runs, on the registered attention.
    """
    if past_key_values is not None or position_embeddings is None or torch.compiler.is_compiling():
        return type(self).forward(
            self,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
    state = self.__dict__[ATTRIBUTE]
    shared, family = state.shared, state.family
    head_dim = self.head_dim
    tape = shared.tape
    q, k, v = project(shared, (self.q_proj, self.k_proj, self.v_proj), hidden_states)
    rotate = functools.partial(normalise_and_rotate, self, state, position_embeddings)
    if tape is not None and family.qk_norm and not (self.q_norm._forward_hooks or self.k_norm._forward_hooks):
        # Backward of the norms needs q and k as they are here, and those after their rotation are cheap to have again.
        for x in (q, k, v):
            tape.root(x, "qkv")
        rotated = rotate(q, k)
        tape.made(rotated, "rotated", rotate, q, k)
        q, k = rotated
    else:
        q, k = rotate(q, k)
    if tape is not None:
        for x in (q, k, v):
            tape.root(x, "attention input")
    if family.sliding_window != "none":
        owner = self if family.sliding_window == "module" else self.config
        kwargs["sliding_window"] = getattr(owner, "sliding_window", None)
    implementation = self.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS.get(implementation) or ALL_ATTENTION_FUNCTIONS.get_interface(
        implementation, _function(self, "eager")
    )
    out, weights = attend(
        self,
        *(split_heads(x, head_dim).transpose(1, 2) for x in (q, k, v)),
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        **kwargs,
    )
    if tape is not None:
        tape.root(out, "attention")
    return project(shared, (self.o_proj,), out.flatten(2))[0], weights
