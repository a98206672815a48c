"""What a model's head uses of a padded batch: a hook that tells the backbone before it runs.

A backbone that drops padding has no output there. So it does that only where a head that fastft knows has said which
outputs its loss will use, and none of them is at padding. Whoever calls the backbone otherwise (other heads, code of
one's own, a trainer that keeps the labels to itself) may use any output: such a batch keeps its padding, unless the
caller has promised to use none there (`unpad=True`); even then, a loss of the model's own is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from .foreign import foreign_hook
from .state import ModuleState, UsedPadding, state_of

IGNORE_INDEX = -100


def announce_used_outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: notes where this forward will use an output at padding."""
    state = state_of(module)
    if state is None or not (module.training or state.shared.config.unpad is True):
        return
    _announce(state, module, args, kwargs)


def forget_used_outputs(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook, also after an exception: what was noted is of this forward alone."""
    state = state_of(module)
    if state is not None:
        state.shared.used_padding = None


@torch.compiler.disable
def _announce(state: ModuleState, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = {**dict(zip(state.parameter_names, args, strict=False)), **kwargs}
    mask = given.get("attention_mask")
    state.shared.used_padding = None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return
    # Another hook may still put other labels in the place of these.
    used = None if foreign_hook(module._forward_pre_hooks) else _reader(module)(module, given, mask)
    if used is not None:
        state.shared.used_padding = UsedPadding(mask, used & (mask == 0))
    elif state.shared.config.unpad is True and any(given.get(name) is not None for name in ("labels", "shift_labels")):
        state.shared.used_padding = UsedPadding(mask, mask == 0)  # a loss that is not known may use all of them


def _reader(head: nn.Module) -> Callable[[Any, dict[str, Any], torch.Tensor], torch.Tensor | None]:
    if isinstance(head, GenericForSequenceClassification):
        return _used_by_sequence_classification
    if isinstance(head, GenericForTokenClassification):
        return _used_by_token_classification
    return _used_by_causal_lm


def _used_by_causal_lm(head: Any, given: dict[str, Any], mask: torch.Tensor) -> torch.Tensor | None:
    """bool [B, L], True where an output has a label: that of the next place, unless they were shifted already."""
    kept = given.get("logits_to_keep", 0)
    if head.loss_function is not LOSS_MAPPING["ForCausalLM"] or isinstance(kept, torch.Tensor) or kept:
        return None
    shifted, labels = given.get("shift_labels"), given.get("labels")
    ignored = given.get("ignore_index", IGNORE_INDEX)
    valid = _is_valid(labels if shifted is None else shifted, ignored, mask)
    if valid is None or shifted is not None:
        return valid
    return nn.functional.pad(valid[:, 1:], (0, 1))


def _used_by_token_classification(head: Any, given: dict[str, Any], mask: torch.Tensor) -> torch.Tensor | None:
    if head.loss_function is not LOSS_MAPPING["ForTokenClassification"]:
        return None
    return _is_valid(given.get("labels"), IGNORE_INDEX, mask)


def _used_by_sequence_classification(head: Any, given: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
    """The one place a row is judged by: the last whose id is not the pad id, or else the last of all."""
    ids, pad_token_id = given.get("input_ids"), head.config.get_text_config().pad_token_id
    places = torch.arange(mask.shape[1], device=mask.device)
    if ids is None or pad_token_id is None or ids.shape != mask.shape:
        return (places == mask.shape[1] - 1).expand(mask.shape)
    last = (places * (ids.to(mask.device) != pad_token_id)).argmax(-1, keepdim=True)
    return places == last


def _is_valid(labels: Any, ignored: int, mask: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(labels, torch.Tensor) or labels.shape != mask.shape:
        return None
    return labels.to(mask.device) != ignored
