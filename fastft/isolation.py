"""What a backbone's own code makes of the documents of a packed row: whether it keeps them apart, and what for.

Only code is looked at; nothing is run and nothing is changed.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import nn

from .code_reading import keywords_of_calls, uses_keywords

# Layers that carry something from one token to the next on a way of their own.
_MIXERS = ("mamba", "ssm", "linear_attn", "recurrent", "conv", "indexer", "delta")

# How the kernels of such layers are told where a document starts.
_BOUNDARIES = frozenset({"seq_idx", "cu_seqlens"})

# Mamba's first scan, whose kernels take no boundaries.
_WITHOUT_BOUNDARIES = ("selective_scan", "mamba_inner")

# Kernels for one token on top of a cache, which a packed batch never has.
_DECODING = ("update", "recurrent")  # "recurrent" names a layer above, and here the form of a kernel

# The import names that transformers goes by, where the package to install is called otherwise.
_DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}


class _Kernel(NamedTuple):
    """A function of transformers that calls a package's kernel if there is one."""

    package: str
    installed: bool
    parameters: frozenset[str]


def mixers(backbone: nn.Module) -> dict[str, nn.Module]:
    """Modules that mix tokens besides attention, by name."""
    found: dict[str, nn.Module] = {}
    for fqn, module in backbone.named_modules():
        parent, _, last = fqn.rpartition(".")
        # GPT-2's "Conv1D" is a linear layer: names and nn.Conv1d count, class names do not.
        if isinstance(module, (nn.Conv1d, nn.RNNBase)):
            found.setdefault(parent, backbone.get_submodule(parent))
        elif any(mixer in last.lower() for mixer in _MIXERS):
            found[fqn] = module
    # What is inside of one is a part of it.
    return {fqn: found[fqn] for fqn in found if not any(fqn.startswith(f"{other}.") for other in found)}


def why_state_crosses(backbone: nn.Module) -> str:
    """Why what a layer carries along crosses from one document of a packed row to the next; "" if nothing does.

    Layers with kernels that take `seq_idx` or `cu_seqlens` stop at the boundaries, if the kernels are installed.
    """
    for fqn, mixer in mixers(backbone).items():
        problem = _why_boundaries_are_lost(mixer)
        if problem:
            what = "mixes tokens besides attention, across the sequences of a row"
            return f"{fqn} ({type(mixer).__name__}) {what}: {problem}"
    return ""


def _why_boundaries_are_lost(mixer: nn.Module) -> str:
    forward = inspect.unwrap(type(mixer).forward)
    if not inspect.isfunction(forward):
        return "its code cannot be read"
    names = [name for name in forward.__code__.co_names if not any(word in name for word in _DECODING)]
    found = {name: _as_kernel(forward.__globals__.get(name)) for name in names}
    kernels = {name: kernel for name, kernel in found.items() if kernel is not None}
    if not kernels or not uses_keywords(forward):
        return "it cannot be told where a document starts"
    for name, kernel in kernels.items():
        known = any(word in name for word in _WITHOUT_BOUNDARIES)
        if known or (kernel.installed and not kernel.parameters & _BOUNDARIES):
            return f"{name} takes no boundaries"
    missing = sorted({kernel.package for kernel in kernels.values() if not kernel.installed})
    return f"only with {' and '.join(missing)} installed it can stop at a document's end" if missing else ""


def _as_kernel(function: Any) -> _Kernel | None:
    """What transformers' wrapper around a kernel has resolved when its module was imported."""
    code = getattr(function, "__code__", None)
    if code is None or function.__closure__ is None:
        return None
    cells = dict(zip(code.co_freevars, function.__closure__, strict=True))
    if not {"package", "is_new_implementation", "applicable_params"} <= cells.keys():
        return None
    package = cells["package"].cell_contents
    return _Kernel(
        _DISTRIBUTIONS.get(package, package),
        cells["is_new_implementation"].cell_contents,
        frozenset(cells["applicable_params"].cell_contents),
    )


def why_masks_forget(backbone: type[nn.Module]) -> str:
    """Why the masks that a backbone's forward makes do not stop where positions restart; "" if they do, as
    transformers' masks that are told the positions."""
    calls = keywords_of_calls(backbone.forward)
    if calls is None:
        return (
            f"the source of {backbone.__name__} cannot be read, which would tell whether its masks know the positions"
        )
    masks = [names for names in calls if {"config", "attention_mask"} <= names]
    if masks and all("position_ids" in names for names in masks):
        return ""
    return f"{backbone.__name__} does not make its mask with the positions, so documents see each other"
