"""Triton's interpreter, made to round fp32 to bf16 as GPUs do, and to lose less time.

The interpreter (3.6 to 3.9) cuts the low bits off, which doubles the error of every bf16 store and of every rounding
inside a kernel; the error budget, rightly, does not accept that. GPUs round to the nearest even.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy
import pytest
import torch
import triton

MOST_REMEMBERED = 4096

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


def lose_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the interpreter what it does again and again, for each operation of each program: most of its time.

    No number that a kernel computes depends on any of it. Without the interpreter nothing is done.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter, core = import_module("triton.runtime.interpreter"), import_module("triton.language.core")
    _replace_language_once(monkeypatch, interpreter, core)
    _skip_checks_that_nobody_reads(monkeypatch, interpreter)
    _make_types_once(monkeypatch, interpreter, core)


def _replace_language_once(monkeypatch: pytest.MonkeyPatch, interpreter: Any, core: Any) -> None:
    """Let the interpreter's functions stay where the first launch puts them, in the place of `triton.language`'s.

    Otherwise each launch and each call of a device function looks through all of it for what to replace.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    modules = (import_module("triton.language"), core)
    replace_language = interpreter._patch_lang

    @_remembered
    def modules_seen(namespace: dict[str, Any]) -> list[Any]:
        return [value for value in namespace.values() if any(value is module for module in modules)]

    def replace_what_is_left(function):
        seen = modules_seen(function.__globals__)
        if not seen or any(core.is_builtin(module.program_id) for module in seen):
            replace_language(function)  # never restored: nothing else in these processes is made of it
        return interpreter._LangPatchScope()

    monkeypatch.setattr(interpreter, "_patch_lang", replace_what_is_left)


def _skip_checks_that_nobody_reads(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Spare each sum and product of integers being computed again in int64.

    It is for an assertion about overflow, which is left out unless somebody debugs.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def _make_types_once(monkeypatch: pytest.MonkeyPatch, interpreter: Any, core: Any) -> None:
    """Let one object stand for all types of blocks that are equal: they are compared by value and never change."""
    types: dict[tuple[int, ...], Any] = {}
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__

    def one_of_its_kind(cls, element_ty, shape):
        # The type remembered holds the one of its elements, whose id therefore stays its own.
        key = (id(element_ty), *(getattr(size, "value", size) for size in shape))
        found = types.get(key)
        if found is None:
            if len(types) > MOST_REMEMBERED:
                types.clear()
            found = object.__new__(cls)
            make_type(found, element_ty, shape)
            types[key] = found
        return found

    @_remembered
    def attributes(type):
        tensor = object.__new__(core.tensor)
        make_tensor(tensor, None, type)
        return vars(tensor)

    def make_tensor_from_type(self, handle, type):
        vars(self).update(attributes(type), handle=handle)

    monkeypatch.setattr(core.block_type, "__new__", one_of_its_kind)
    monkeypatch.setattr(core.block_type, "__init__", lambda self, element_ty, shape: None)
    monkeypatch.setattr(core.tensor, "__init__", make_tensor_from_type)
    monkeypatch.setattr(interpreter, "_get_np_dtype", _remembered(interpreter._get_np_dtype))


def _remembered(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function` of one argument, called once for each object that it is given."""
    results: dict[int, tuple[Any, Any]] = {}  # of an id: the object, which has it as long as it is kept here, and ours

    def remember(argument):
        found = results.get(id(argument))
        if found is None:
            if len(results) > MOST_REMEMBERED:
                results.clear()
            found = results[id(argument)] = (argument, function(argument))
        return found[1]

    return remember


def run_kernels_as_a_gpu_would(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds as GPUs do; where it is off, kernels have no CPU to run on."""
    if "device" in request.fixturenames:
        device = request.getfixturevalue("device")
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("the Triton interpreter is off, as it is wherever there is a GPU; run with -m gpu")
    round_to_nearest(monkeypatch)
