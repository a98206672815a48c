"""Triton's interpreter, made to round fp32 to bf16 as GPUs do, and to lose less time.

The interpreter (3.6 to 3.9) cuts the low bits off, which doubles the error of every bf16 store and of every rounding
inside a kernel; the error budget, rightly, does not accept that. GPUs round to the nearest even.
"""

from __future__ import annotations

import os
from importlib import import_module

import numpy
import pytest
import torch
import triton

# Its interpreter converts one-element arrays to Python numbers, which numpy 2.4 refuses.
needs_interpreter = pytest.mark.skipif(
    triton.__version__ < "3.7" and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0",
    reason=f"the interpreter of triton {triton.__version__} fails with numpy {numpy.__version__}",
)


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter's conversion for the time of a test; without the interpreter nothing is done."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def convert_as_gpus_do(data, source, target, rounding_mode):
        if source.name == "fp32" and target.name == "bf16":
            rounded = torch.from_numpy(data.view("float32").copy()).bfloat16()
            return rounded.view(torch.int16).numpy().view("uint16")
        return convert(data, source, target, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert_as_gpus_do)


def replace_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the calls of device functions what their kernel has done: up to half of the interpreter's time.

    A kernel and each device function that it calls put the interpreter's functions in the place of `triton.language`'s,
    for which they look through all of it; in a module that is replaced already they find nothing to do.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = import_module("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    core = import_module("triton.language.core")
    modules = (import_module("triton.language"), core)
    replace_language = interpreter._patch_lang

    def replace_what_is_left(function):
        seen = [value for value in function.__globals__.values() if any(value is module for module in modules)]
        if seen and not any(core.is_builtin(module.program_id) for module in seen):
            return interpreter._LangPatchScope()
        return replace_language(function)

    monkeypatch.setattr(interpreter, "_patch_lang", replace_what_is_left)


def run_kernels_as_a_gpu_would(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds as GPUs do; where it is off, kernels have no CPU to run on."""
    if "device" in request.fixturenames:
        device = request.getfixturevalue("device")
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("the Triton interpreter is off, as it is wherever there is a GPU; run with -m gpu")
    round_to_nearest(monkeypatch)
