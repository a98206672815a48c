"""fastft: faster fine-tuning of Hugging Face models, computing the same thing.

    import fastft
    fastft.patch_model(model)

Importing this package does nothing else: no GPU is touched, torch and triton are loaded at the first use of a name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capability import probe as capability
    from .config import PatchConfig
    from .integrations.trl import prepare_trainer
    from .packing import PackedSequences
    from .patch import patch_model, report, unpatch_model

__version__ = "0.1.0"
__all__ = ["PackedSequences", "PatchConfig", "capability", "patch_model", "prepare_trainer", "report", "unpatch_model"]

_HOME = {
    "PackedSequences": "packing",
    "PatchConfig": "config",
    "patch_model": "patch",
    "prepare_trainer": "integrations.trl",
    "report": "patch",
    "unpatch_model": "patch",
}


def __getattr__(name: str) -> Any:
    if name == "capability":  # the module itself can be called
        return importlib.import_module(".capability", __name__)
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
