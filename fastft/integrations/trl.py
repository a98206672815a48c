"""TRL's trainers: their own collators without padding.

A patched backbone drops the padding that it is given, where it may. A collator that never makes any saves the rest: one
synchronisation a batch, and hidden states of [B, L, H] for the loss.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ..errors import UnsupportedModelError, UnsupportedOptionError
from ..modules.foreign import why_rows_matter
from ..modules.state import ModuleState, state_of
from .fixed_tokens import FixedTokensCollator

logger = logging.getLogger("fastft")
TrainerT = TypeVar("TrainerT")

_METHOD = "get_train_dataloader"


def prepare_trainer(trainer: TrainerT, *, fixed_tokens: int | None = None) -> TrainerT:
    """Lets a trainer's own collator make training batches without padding: call it after the trainer was built.

    The samples of a step, the number of steps, the counted tokens and the losses stay. Only TRL's `SFTTrainer` with the
    collator that it made itself is changed, and only this one trainer's training batches; evaluation keeps its rows.
    Everything else is left alone, and the model's report says why: collators and losses of one's own, collators for
    images, batches padded to a multiple, adapters and prompts that go by rows, and what is packed already. Under
    `packing_strategy="wrapped"` the documents of a row see each other, which is what that strategy is for.

    Args:
        trainer: a trainer whose model is patched. A second call prepares it anew.
        fixed_tokens: give every batch exactly this many tokens and the same number of boundaries, so that shapes never
            change. For `packing=True` with a strategy that keeps documents apart. What the packed rows leave over is
            filled with pad tokens that are no targets; counts of tokens include them.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: the trainer's model is not patched.
        UnsupportedOptionError: `fixed_tokens` cannot be honoured for this trainer.
    """
    backbone = _patched_backbone(getattr(trainer, "model", None))
    if backbone is None:
        raise UnsupportedModelError(
            f"the model of this {type(trainer).__name__} has no backbone that fastft packs; call "
            "fastft.patch_model(trainer.model) first, and see fastft.report(trainer.model)"
        )
    if _is_prepared(trainer):
        delattr(trainer, _METHOD)
    make_collator: Callable[[Any], Any] | None = None
    if fixed_tokens is not None:
        make_collator = _fixed(trainer, backbone, fixed_tokens)
        note = f"the trainer's batches have {fixed_tokens} tokens each"
    elif reason := _why_left_alone(trainer, backbone):
        note = f"the trainer's collator is left alone: {reason}"
    else:
        make_collator, note = _padding_free, "the trainer's collator pads no more"
    logger.info("fastft: %s", note)
    for former in [name for name in backbone.shared.counters if name.startswith("the trainer's ")]:
        del backbone.shared.counters[former]
    backbone.shared.counters[note] = 1
    if make_collator is not None:
        setattr(trainer, _METHOD, partial(_train_dataloader, trainer, make_collator))
    return trainer


def _is_prepared(trainer: Any) -> bool:
    return getattr(vars(trainer).get(_METHOD), "func", None) is _train_dataloader


def _train_dataloader(trainer: Any, make_collator: Callable[[Any], Any]) -> Any:
    """The trainer's own, with another collator for as long as it takes to build it."""
    own = trainer.data_collator
    trainer.data_collator = make_collator(own)
    try:
        return getattr(type(trainer), _METHOD)(trainer)
    finally:
        trainer.data_collator = own


def _padding_free(collator: Any) -> Any:
    made = copy.copy(collator)
    made.padding_free = True
    return made


def _fixed(trainer: Any, backbone: ModuleState, fixed_tokens: int) -> Callable[[Any], FixedTokensCollator]:
    """Makes the collator of batches of one size.

    Raises:
        UnsupportedOptionError: the trainer does not pack rows that keep documents apart, or rows too long.
    """
    problem = _why_not_fixed(trainer, fixed_tokens) or backbone.rules.keeps_padding
    if problem:
        raise UnsupportedOptionError(f"fixed_tokens={fixed_tokens} cannot be honoured: {problem}")
    counts = sorted(map(len, trainer.train_dataset["seq_lengths"]), reverse=True)
    return partial(
        FixedTokensCollator,
        fixed_tokens=fixed_tokens,
        max_sequences=sum(counts[: trainer.args.per_device_train_batch_size]),
        pad_token_id=trainer.data_collator.pad_token_id,
    )


def _why_not_fixed(trainer: Any, fixed_tokens: int) -> str:
    problem = _why_no_own_collator(trainer)
    if problem:
        return problem
    args = trainer.args
    if not (args.packing and trainer.data_collator.padding_free):
        return "it needs packing=True with the strategy 'bfd' or 'bfd_split'"
    if not hasattr(trainer.train_dataset, "column_names") or not hasattr(trainer.train_dataset, "__len__"):
        return "a streaming dataset does not tell how many documents its rows hold"
    rows, longest = args.per_device_train_batch_size, args.max_length
    if longest is None or rows * longest > fixed_tokens:
        return f"{rows} rows of max_length={longest} can hold more tokens"
    return ""


def _patched_backbone(model: Any) -> ModuleState | None:
    if not isinstance(model, nn.Module):
        return None
    states = (state_of(module) for module in model.modules())
    return next((state for state in states if state is not None and state.kind == "backbone"), None)


def _why_left_alone(trainer: Any, backbone: ModuleState) -> str:
    problem = _why_no_own_collator(trainer)
    if problem:
        return problem
    collator: Any = trainer.data_collator
    if collator.padding_free:
        return "it makes batches without padding already"
    if trainer.args.packing:
        return f"packing_strategy={trainer.args.packing_strategy!r}, whose documents see each other by design"
    if collator.pad_to_multiple_of is not None:
        return f"it pads to a multiple of {collator.pad_to_multiple_of}"
    if getattr(collator, "return_position_ids", False):
        return "sequence parallelism wants rows"
    if trainer.args.neftune_noise_alpha is not None:
        return "NEFTune's noise depends on the length of the rows"
    return backbone.rules.keeps_padding or why_rows_matter(trainer.model)


def _why_no_own_collator(trainer: Any) -> str:
    sft = sys.modules.get("trl.trainer.sft_trainer")
    if sft is None or not isinstance(trainer, sft.SFTTrainer):
        return f"a {type(trainer).__name__} is no SFTTrainer"
    collator: Any = trainer.data_collator
    if type(trainer).compute_loss is not sft.SFTTrainer.compute_loss or trainer.compute_loss_func is not None:
        return "its loss is computed in a way of its own"
    if getattr(getattr(trainer.model, "active_peft_config", None), "is_prompt_learning", False):
        return "prompts are put before each row"
    if trainer.args.include_num_input_tokens_seen not in ("no", False):
        return "the places of its batches are counted"
    if _METHOD in vars(trainer):
        return "somebody else has put another get_train_dataloader onto the trainer"
    if type(collator) is not sft.DataCollatorForLanguageModeling:
        return f"a {type(collator).__name__} is not the one that SFTTrainer makes for text"
    return ""
