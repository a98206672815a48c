"""`fixed_tokens`: packed batches of one shape, filled with what is no target."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from packed_cases import counters
from sft_cases import MAX_LENGTH, equal_training, sft, texts
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import fastft
from fastft.errors import PackingError, UnsupportedOptionError
from fastft.integrations.fixed_tokens import FixedTokensCollator

TOKENS = 2 * MAX_LENGTH + 5


@pytest.mark.parametrize("options", [{}, {"lora": True, "packing_strategy": "bfd_split", "dataloader_num_workers": 1}])
def test_the_same_training_on_batches_of_one_shape(tmp_path, options):
    stock, ours = sft(tmp_path / "stock", patch=False, **options), sft(tmp_path / "ours", patch="before", **options)
    fastft.prepare_trainer(fastft.prepare_trainer(ours), fixed_tokens=TOKENS)
    stock.train(), ours.train()
    equal_training(stock, ours)
    assert counters(ours.model)[f"the trainer's batches have {TOKENS} tokens each"] == 1
    shapes = [{k: v.shape for k, v in batch.items() if isinstance(v, torch.Tensor)} for batch in ours.seen]
    assert all(shape == shapes[0] for shape in shapes) and len({batch["max_length_q"] for batch in stock.seen}) > 1
    for packed, fixed in zip(stock.seen, ours.seen, strict=True):
        real = packed["input_ids"].shape[1]
        assert fixed["input_ids"].shape == fixed["position_ids"].shape == fixed["labels"].shape == (1, TOKENS)
        assert torch.equal(fixed["input_ids"][:, :real], packed["input_ids"])
        assert fixed["cu_seq_lens_q"][-1] == TOKENS and fixed["cu_seq_lens_q"].diff().min() >= 0
        assert real in fixed["cu_seq_lens_q"] and not (fixed["labels"][:, real:] != -100).any()


@pytest.mark.parametrize(
    ("options", "tokens", "reason"),
    [
        ({"packing": False}, TOKENS, "needs packing=True"),
        ({"packing_strategy": "wrapped"}, TOKENS, "needs packing=True with the strategy 'bfd'"),
        ({}, 2 * MAX_LENGTH - 1, f"2 rows of max_length={MAX_LENGTH} can hold more"),
    ],
)
def test_what_cannot_be_honoured(tmp_path, options, tokens, reason):
    trainer = sft(tmp_path, patch="before", **options)
    with pytest.raises(UnsupportedOptionError, match=f"fixed_tokens={tokens} cannot be honoured: .*{reason}"):
        fastft.prepare_trainer(trainer, fixed_tokens=tokens)
    assert "get_train_dataloader" not in vars(trainer)


def test_a_batch_that_does_not_fit():
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    examples = [{"input_ids": list(range(1, 5))}, {"input_ids": list(range(1, 8))}]
    assert FixedTokensCollator(collate, 11, 2, 0)(examples)["cu_seq_lens_q"].tolist() == [0, 4, 11, 11]
    for tokens, sequences in ((10, 2), (11, 1)):
        with pytest.raises(PackingError, match=f"11 tokens in 2 sequences does not fit fixed_tokens={tokens}"):
            FixedTokensCollator(collate, tokens, sequences, 0)(examples)


def test_little_is_filled():
    """Lengths spread as those of instruction data are: a mean of 200 tokens, and some of 1,000. TRL packs a thousand
    samples at a time, so each thousand leaves one row that is not full."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(1000).log_normal_(5.0, 0.7, generator=generator).int().clamp(8, 1500).tolist()
    rows = pack_dataset(Dataset.from_dict({"input_ids": [[7] * length for length in lengths]}), 4096, "bfd")
    filled = sorted(map(len, rows["input_ids"]))
    assert sum(filled[1:]) >= 0.995 * 4096 * (len(filled) - 1)


def test_texts_differ_in_length():
    """What the tests above stand on: batches that would otherwise have several shapes."""
    assert len({len(text.split()) for text in texts()["text"]}) > 5
