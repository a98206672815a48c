"""What the code of a model says about itself: enough to tell where fastft may step in for a family it has no file for.

Only classes and their compiled code are looked at; nothing is run and nothing is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .code_reading import uses_keywords, words_of
from .family_spec import FamilySpec
from .isolation import mixers, why_masks_forget, why_state_crosses

# What the bound attention forward passes on or handles itself; another parameter would be dropped silently.
_ATTENTION_PARAMETERS = {
    "self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values", "cache_position", "kwargs",
}  # fmt: skip

# What the bound forwards read from a module.
_NEEDED_ATTRIBUTES = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling", "attention_dropout", "config"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "act_fn"),
}

# Further rules of who sees whom, which a packed batch would lose.
_MASK_RULES = ("or_mask_function", "and_mask_function", "block_sequence_ids")


def pretrained_model(model: nn.Module) -> nn.Module | None:
    """The outermost transformers model in `model` (PEFT puts modules of its own around it)."""
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def find_decoder(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The name and module that turns tokens into hidden states, as transformers' own look-up finds it."""
    owner: Any = pretrained_model(model)
    if owner is None:
        return None
    base = owner.base_model
    candidates = [base.get_decoder() if hasattr(base, "get_decoder") else base, base, owner]
    decoder: Any = next(module for module in candidates if isinstance(module, nn.Module) and hasattr(module, "config"))
    if is_causal_lm(decoder) and hasattr(getattr(decoder, "model", None), "config"):  # Llama 4: its look-up ends early
        decoder = decoder.model
    return next((fqn, module) for fqn, module in model.named_modules() if module is decoder)


def is_causal_lm(module: nn.Module) -> bool:
    """Whether a module is one of transformers' own causal language models, head included."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(module).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def head_over(model: nn.Module, backbone: nn.Module) -> str | None:
    """The name of the module that makes a loss of the backbone's outputs, if fastft knows which of them it uses.

    Known are transformers' own causal LMs and its generic heads for classification, not what others derive from them.
    """
    from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

    owner: Any = pretrained_model(model)
    if owner is None or owner is backbone or not type(owner).__module__.startswith("transformers.models."):
        return None
    generic = (GenericForSequenceClassification.forward, GenericForTokenClassification.forward)
    if not is_causal_lm(owner) and type(owner).forward not in generic:
        return None
    return next(fqn for fqn, module in model.named_modules() if module is owner)


def why_padding_stays(backbone: nn.Module) -> str:
    """Why padded batches of a packable backbone keep their padding; "" if they may lose it.

    Without padding a batch is one row. Attention that our engines lack something for would then see T x T scores, for
    all T tokens of the batch, in place of L x L for each of its rows.
    """
    config = backbone.config
    if mixers(backbone):
        return "layers besides attention carry something from token to token"
    lengths = [kind for kind in _rope_types(config) if "dynamic" in kind or "longrope" in kind]
    if lengths:
        return f"rotary embeddings of the kind {lengths[0]!r} depend on the length of the rows"
    if getattr(config, "layerdrop", 0.0):
        return "layers are left out at random"
    for module in interface_attention(backbone).values():
        words = words_of(type(module).forward)
        name = type(module).__name__
        if "s_aux" in words:
            return f"{name} has attention sinks"
        if "softcap" in words and getattr(config, "attn_logit_softcapping", None) is not None:
            return f"{name} caps its attention scores"
        if "position_bias" in words:
            return f"{name} has a position bias"
        if getattr(module, "v_head_dim", None) != getattr(module, "qk_head_dim", None):
            return f"{name} has other head dimensions for v than for q and k"
    return ""


def interface_attention(backbone: nn.Module) -> dict[str, nn.Module]:
    """Modules below `backbone` that take their attention from transformers' AttentionInterface, by name."""
    return {
        fqn: module
        for fqn, module in backbone.named_modules()
        if "ALL_ATTENTION_FUNCTIONS" in words_of(type(module).forward)
        and hasattr(getattr(module, "config", None), "_attn_implementation")
    }


def why_not_packable(backbone: nn.Module) -> str:
    """Why batches of several sequences cannot be kept apart in a backbone that no family file names; "" if they can.

    Its masks must be transformers' causal ones, each of its layers must take its attention from the AttentionInterface,
    and keyword arguments must reach them: that is how the boundaries travel.
    """
    name, config = type(backbone).__name__, backbone.config
    words = words_of(type(backbone).forward)
    attention = interface_attention(backbone)
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models are not packed"
    if not attention:
        return f"{name} does not take its attention from transformers' AttentionInterface"
    if not all(getattr(module, "is_causal", None) is True for module in attention.values()):
        return f"not all attention in {name} is causal self-attention"
    if not _makes_causal_masks(words):
        return f"{name}.forward does not make its mask with transformers' create_causal_mask"
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    optional = "use_bidirectional_attention" in words and not bidirectional  # Gemma3: the rule is for that case only
    if any(rule in words for rule in _MASK_RULES) and not optional:
        return f"the masks of {name} have further rules, which a packed batch would lose"
    if "create_chunked_causal_mask" in words and not all(map(_knows_its_chunks, attention.values())):
        return f"which layers of {name} attend in chunks is not known"
    shares = getattr(config, "num_kv_shared_layers", None) != 0
    for module in attention.values():
        heard = words_of(type(module).forward)
        if shares and any("kv_shared" in word or "shared_kv" in word for word in heard):
            return f"layers of {name} share keys and values"
    return (
        why_window_is_lost(backbone)
        or why_state_crosses(backbone)
        or _why_not_reached(backbone, [*attention, *mixers(backbone)])
        or _layer_without(backbone, attention)
    )


def why_window_is_lost(backbone: nn.Module) -> str:
    """Why a packed batch would lose the sliding window of a backbone, which has it in its masks alone; "" if not."""
    words = words_of(type(backbone).forward)
    if "create_sliding_window_causal_mask" not in words or not _has_window(backbone.config):
        return ""
    for module in interface_attention(backbone).values():
        if "sliding_window" not in words_of(type(module).forward):
            return f"{type(module).__name__} does not tell its attention the sliding window"
    return ""


def reads_causally(model: nn.Module, backbone: Any) -> bool:
    """Whether a backbone is known to read from left to right, so that positions which start again mean another
    document. In an encoder they may say something else."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config, words, owner = backbone.config, words_of(type(backbone).forward), pretrained_model(model)
    declared = getattr(config, "is_decoder", None)
    either_way = getattr(config, "causal", True) is False or getattr(config, "attn_type", "uni") == "bi"  # XLM, XLNet
    if getattr(config, "is_encoder_decoder", False) or either_way:
        return False
    if owner is not None and is_causal_lm(owner):
        return True
    if "is_decoder" in words or (declared is not None and not _makes_causal_masks(words)):
        return bool(declared)
    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or _makes_causal_masks(words)


def why_promise_fails(model: nn.Module) -> str:
    """Why nobody can promise to use no output at padding; "" where one may."""
    owner = pretrained_model(model)
    if type(owner).__name__.endswith("ForQuestionAnswering"):
        return f"the softmax of {type(owner).__name__} goes over all places"
    return ""


def why_documents_meet(backbone: Any) -> str:
    """Why the documents of a packed row would see each other in a backbone that is left to its own code; "" if not."""
    name, implementation = type(backbone).__name__, backbone.config._attn_implementation
    attention = interface_attention(backbone)
    problem = why_state_crosses(backbone) or (_layer_without(backbone, attention) if attention else "")
    if problem:
        return problem
    if mixers(backbone):
        return f"{name} has layers that need boundaries, and no attention through which fastft could serve it"
    if implementation in ("eager", "sdpa", "flex_attention"):
        return why_masks_forget(type(backbone))
    flash = [words for words in map(_forward_words, backbone.modules()) if "_flash_attention_forward" in words]
    if "flash" in implementation and (attention or flash) and all("position_ids" in words for words in flash):
        return ""
    return f"of {name} with {implementation!r} attention it is not known whether it keeps documents apart"


def _forward_words(module: nn.Module) -> frozenset[str]:
    return words_of(type(module).forward)


def _makes_causal_masks(words: frozenset[str]) -> bool:
    return any(word.startswith("create_") and word.endswith("causal_mask") for word in words)


def _knows_its_chunks(module: Any) -> bool:
    types, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    return bool(types) and index is not None and isinstance(getattr(module.config, "attention_chunk_size", None), int)


def _rope_types(config: Any) -> list[str]:
    """Of all layers: a config has one set of parameters, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [str(each.get("rope_type") or each.get("type") or "") for each in sets]


def _has_window(config: Any) -> bool:
    """Whether a layer has a sliding window: by the types of the layers, where a config names them."""
    types = getattr(config, "layer_types", None)
    return any("sliding" in each for each in types) if types else getattr(config, "sliding_window", None) is not None


def why_not_bindable(module: nn.Module, kind: str, family: FamilySpec) -> str:
    """Why fastft's forward may not be bound onto a module of a known class; "" if it may."""
    name = type(module).__name__
    if kind == "attention":
        unknown = set(inspect.signature(type(module).forward).parameters) - _ATTENTION_PARAMETERS
        if unknown:
            return f"this transformers version passes {min(unknown)!r} to {name}, which fastft does not know"
    if kind == "rms_norm" and getattr(module, "weight", None) is None:
        return "the norm has no weight of its own"
    needed = (family.rms_norm_eps,) if kind == "rms_norm" else _NEEDED_ATTRIBUTES[kind]
    if kind == "attention" and family.qk_norm:
        needed = (*needed, "q_norm", "k_norm")
    missing = next((attribute for attribute in needed if not hasattr(module, attribute)), None)
    return f"this {name} has no {missing}, another library may have changed it" if missing else ""


def positional_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters that a method takes by position, in order and without self."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)[1:]


def _why_not_reached(backbone: nn.Module, names: Iterable[str]) -> str:
    """Names the first module on the way from the backbone to one of these that hands no keyword arguments on."""
    for fqn in names:
        path = fqn.split(".") if fqn else []
        for depth in range(len(path) + 1):
            module = backbone.get_submodule(".".join(path[:depth]))
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not uses_keywords(type(module).forward):
                return f"{type(module).__name__}.forward hands no keyword arguments on to its attention"
    return ""


def _layer_without(backbone: nn.Module, attention: dict[str, nn.Module]) -> str:
    """Names a layer that mixes tokens in no way that can be seen."""
    seen = [*attention, *mixers(backbone)]
    for stack in {fqn.split(".", 1)[0] for fqn in attention}:
        layers = backbone.get_submodule(stack)
        if not isinstance(layers, nn.ModuleList):
            continue
        for index, layer in enumerate(layers):
            if not any(fqn.startswith(f"{stack}.{index}.") for fqn in seen):
                return f"{stack}.{index} ({type(layer).__name__}) has no attention of transformers' AttentionInterface"
    return ""
