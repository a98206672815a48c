"""TRL's trainers: their own collators without padding.

The hook on a patched backbone drops padding whatever the trainer. A collator that never makes any saves the rest: one
synchronisation a batch, and hidden states of [B, L, H] for the loss.
"""

from __future__ import annotations

import copy
import logging
import sys
import types
from typing import Any, TypeVar

from torch import nn

from ..errors import UnsupportedModelError
from ..modules.state import ModuleState, state_of

logger = logging.getLogger("fastft")
TrainerT = TypeVar("TrainerT")

_METHOD = "get_train_dataloader"


def prepare_trainer(trainer: TrainerT) -> TrainerT:
    """Lets a trainer's own collator make training batches without padding: call it after the trainer was built.

    The samples of a step, the number of steps, the counted tokens and the losses stay. Only TRL's `SFTTrainer` with the
    collator that it made itself is changed, and only this one trainer's training batches; evaluation keeps its rows.
    Everything else is left alone, for the hook on the model to drop the padding, and the model's report says why:
    collators of one's own, those for images, batches padded to a multiple, and what is packed already. Under
    `packing_strategy="wrapped"` the documents of a row see each other, which is what that strategy is for.

    Args:
        trainer: a trainer whose model is patched. A second call changes nothing.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: the trainer's model is not patched.
    """
    backbone = _patched_backbone(getattr(trainer, "model", None))
    if backbone is None:
        raise UnsupportedModelError(
            f"the model of this {type(trainer).__name__} has no backbone that fastft packs; call "
            "fastft.patch_model(trainer.model) first, and see fastft.report(trainer.model)"
        )
    if _METHOD in vars(trainer):
        return trainer
    reason = _why_left_alone(trainer, backbone)
    note = f"the trainer's collator is left alone: {reason}" if reason else "the trainer's collator pads no more"
    logger.info("fastft: %s", note)
    backbone.shared.counters[note] = 1
    if not reason:
        setattr(trainer, _METHOD, types.MethodType(get_train_dataloader, trainer))
    return trainer


def get_train_dataloader(self: Any) -> Any:
    """The trainer's own, with a copy of its collator that does not pad."""
    padding = self.data_collator
    self.data_collator = copy.copy(padding)
    self.data_collator.padding_free = True
    try:
        return getattr(type(self), _METHOD)(self)
    finally:
        self.data_collator = padding


def _patched_backbone(model: Any) -> ModuleState | None:
    if not isinstance(model, nn.Module):
        return None
    states = (state_of(module) for module in model.modules())
    return next((state for state in states if state is not None and state.kind == "backbone"), None)


def _why_left_alone(trainer: Any, backbone: ModuleState) -> str:
    sft = sys.modules.get("trl.trainer.sft_trainer")
    if sft is None or not isinstance(trainer, sft.SFTTrainer):
        return f"a {type(trainer).__name__} is no SFTTrainer"
    collator: Any = trainer.data_collator
    if type(collator) is not sft.DataCollatorForLanguageModeling:
        return f"a {type(collator).__name__} is not the one that SFTTrainer makes for text"
    if collator.padding_free:
        return "it makes batches without padding already"
    if trainer.args.packing:
        return f"packing_strategy={trainer.args.packing_strategy!r}, whose documents see each other by design"
    if collator.pad_to_multiple_of is not None:
        return f"it pads to a multiple of {collator.pad_to_multiple_of}"
    if getattr(collator, "return_position_ids", False):
        return "sequence parallelism wants rows"
    return backbone.keeps_padding
