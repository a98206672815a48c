"""The capability probe: every verdict of described devices, and that reading the real one is safe anywhere."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from described_devices import DESCRIBED, GIB, H100, INSTALLED

import fastft.capability as capability_module
from fastft import environment
from fastft.capability import DeviceFacts, GPUCapability, Verdict, assess, probe
from fastft.environment import device_facts, is_installed, read_software
from fastft.errors import UnsupportedOptionError

ROOT = Path(capability_module.__file__).parents[1]

#                    triton, dots, fp16, bf16, fp8, tma, unified, fa2
EXPECTED = {
    "T4":              "yes   no   yes   no    no   no   no   no",
    "RTX 2080":        "yes   no   yes   no    no   no   no   no",
    "A100":            "yes   yes  yes   yes   no   no   no   yes",
    "RTX 4090 laptop": "yes   yes  yes   yes   yes  no   no   yes",
    "H100":            "yes   yes  yes   yes   yes  yes  no   yes",
    "H100 MIG slice":  "yes   yes  yes   yes   yes  yes  no   yes",
    "H200":            "yes   yes  yes   yes   yes  yes  no   yes",
    "B200":            "yes   yes  yes   yes   yes  yes  no   yes",
    "DGX Spark":       "yes   yes  yes   yes   yes  yes  yes  yes",
    "MI300":           "no    no   yes   yes   no   no   no   no",
    "GTX 1070":        "no    no   yes   no    no   no   no   no",
    "CPU":             "no    no   yes   yes   no   no   no   no",
    "CPU interpreted": "yes   no   yes   yes   no   no   no   no",
}  # fmt: skip
COLUMNS = ("triton", "tensor_core_dots", "fp16", "bf16", "fp8", "tma", "unified_memory", "attention: fa2")


@pytest.mark.parametrize("name", EXPECTED)
def test_every_verdict_of_a_described_device(name: str) -> None:
    capability = DESCRIBED[name]
    answers = {row: answer for row, answer, _ in capability.summary()}
    expected = dict(zip(COLUMNS, EXPECTED[name].split(), strict=True))
    assert {column: answers.pop(column) for column in COLUMNS} == expected
    assert answers == {"torch_kernels": "yes", "attention: sdpa": "yes", "attention: reference": "yes"}
    assert all(reason for _, _, reason in capability.summary())


@pytest.mark.parametrize("name", DESCRIBED)
def test_no_verdict_reads_the_name_the_memory_or_the_sm_count(name: str) -> None:
    capability = DESCRIBED[name]
    renamed = dataclasses.replace(capability.device, name="H200", sm_count=1, total_memory=1)
    assert assess(renamed, capability.software).summary() == capability.summary()


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("T4", "triton", "compiled, not run on sm75 yet"),
        ("T4", "tensor_core_dots", "scalar FMA"),
        ("T4", "bf16", "needs sm80, this is sm75"),
        ("A100", "triton", "compiled, not run on sm80 yet"),
        ("H200", "triton", "compiled for and run on sm90"),
        ("H200", "attention: fa2", "bf16), run on sm90"),
        ("A100", "attention: fa2", "bf16), not run on sm80 yet"),
        ("H200", "tensor_core_dots", "tensor-core instructions for sm90"),
        ("B200", "triton", "compiled, not run on sm100 yet"),
        ("DGX Spark", "triton", "compiled, not run on sm121 yet"),
        ("DGX Spark", "unified_memory", "offloading would save nothing"),
        ("MI300", "triton", "not run on ROCm yet (gfx942)"),
        ("MI300", "attention: fa2", "not run on ROCm yet"),
        ("GTX 1070", "triton", "needs sm70, this is sm61"),
        ("CPU", "triton", "TRITON_INTERPRET=1"),
        ("CPU interpreted", "triton", "interpreted"),
    ],
)
def test_reasons_name_the_cause(name: str, row: str, words: str) -> None:
    assert words in DESCRIBED[name].verdicts()[row].reason


def test_old_and_unknown_gpus_get_a_notice_instead_of_an_exception() -> None:
    assert DESCRIBED["GTX 1070"].notices == ("fastft runs on plain torch here: Triton needs sm70, this is sm61",)
    assert "not run on ROCm yet" in DESCRIBED["MI300"].notices[0]
    assert DESCRIBED["A100"].notices == DESCRIBED["CPU"].notices == ()
    future = assess(DeviceFacts("cuda", arch=(13, 0)), INSTALLED)
    assert "neither compiled for nor run on sm130 yet" in future.triton.reason


def test_dtype_verdicts() -> None:
    t4, h200 = DESCRIBED["T4"], DESCRIBED["H200"]
    assert not t4.supports_dtype(torch.bfloat16)
    assert not t4.triton_for(torch.bfloat16)
    assert "bfloat16" in t4.triton_for(torch.bfloat16).reason
    assert t4.triton_for(torch.float16) == t4.triton
    assert t4.triton_for(torch.float32) == t4.triton
    assert h200.triton_for(torch.bfloat16) == h200.triton
    assert h200.supports_dtype(torch.float8_e4m3fn)
    assert not DESCRIBED["A100"].supports_dtype(torch.float8_e4m3fn)
    assert not DESCRIBED["MI300"].triton_for(torch.float32)


def test_torch_build_without_kernels_for_the_gpu_is_told() -> None:
    cuda13 = dataclasses.replace(INSTALLED, torch_architectures=("sm_75", "sm_80", "sm_90", "sm_120a", "compute_120"))

    def built(arch: tuple[int, int]) -> Verdict:
        return assess(DeviceFacts("cuda", arch=arch), cuda13).torch_kernels

    assert built((8, 6)).reason == "this torch build carries sm_80, which runs on sm86"
    assert built((12, 0)).reason == "this torch build carries sm_120a, which runs on sm120"
    assert built((12, 1)).reason == "this torch build carries compute_120, which runs on sm121"  # PTX, by the driver
    assert built((13, 0)).available
    assert not built((6, 1))
    assert not built((10, 0))
    assert "install a torch build for sm61" in assess(DeviceFacts("cuda", arch=(6, 1)), cuda13).notices[0]


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"triton_problem": "Triton is not installed"}, "triton"),
        ({"triton_problem": "Triton is not installed"}, "tensor_core_dots"),
        ({"flash_attention_built": False}, "attention: fa2"),
    ],
)
def test_missing_software_turns_a_yes_into_a_no(change: dict, row: str) -> None:
    assert DESCRIBED["H200"].verdicts()[row]
    assert not assess(H100, dataclasses.replace(INSTALLED, **change)).verdicts()[row]


# ------------------------------------------------------------------------------------------------ the record


@pytest.mark.parametrize("name", DESCRIBED)
def test_record_is_frozen_hashable_and_copies(name: str) -> None:
    capability = DESCRIBED[name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        capability.bf16 = Verdict(True, "because")  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        capability.device.arch = (9, 0)  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(capability)) == copy.deepcopy(capability) == capability
    assert hash(capability) == hash(copy.deepcopy(capability))


def test_attention_engines_are_best_first_and_changing_the_mapping_changes_nothing() -> None:
    engines = DESCRIBED["H200"].attention_engines
    assert list(engines) == ["fa2", "sdpa", "reference"]
    assert isinstance(engines, dict)
    engines.clear()
    assert DESCRIBED["H200"].attention_engines["fa2"]


def test_verdict_is_true_exactly_when_available_and_needs_a_reason() -> None:
    assert Verdict(True, "it can")
    assert not Verdict(False, "it cannot")
    with pytest.raises(ValueError, match="reason"):
        Verdict(True, "")


# ------------------------------------------------------------------------------------------------ probing


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    """Probes inside the test see what it simulates, and later tests do not."""
    capability_module._probe.cache_clear()
    yield
    capability_module._probe.cache_clear()


def _raise(error: Exception) -> Callable:
    def raising(*args: object, **kwargs: object) -> None:
        raise error

    return raising


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, fresh_probe: None) -> pytest.MonkeyPatch:
    """torch.cuda reports an H100's MIG slice and a T4, the T4 being current."""
    shared = {"warp_size": 32, "L2_cache_size": 4 << 20, "is_integrated": 0, "shared_memory_per_block": 48 << 10}
    properties = [
        types.SimpleNamespace(
            name="H100 MIG 1g.10gb", major=9, minor=0, multi_processor_count=16, total_memory=10 * GIB,
            shared_memory_per_block_optin=227 << 10, **shared,
        ),
        types.SimpleNamespace(name="T4", major=7, minor=5, multi_processor_count=40, total_memory=15 * GIB, **shared),
    ]  # fmt: skip
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    for name, value in {"is_available": True, "device_count": 2, "current_device": 1, "get_arch_list": []}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    return monkeypatch


def test_probe_reads_torch_indices_and_the_slice(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setenv("CUDA_VISIBLE_DEVICES", "MIG-3f1c,GPU-77aa")
    slice_of_h100 = probe(0).device
    assert (slice_of_h100.kind, slice_of_h100.index, slice_of_h100.arch) == ("cuda", 0, (9, 0))
    assert (slice_of_h100.sm_count, slice_of_h100.total_memory) == (16, 10 * GIB)
    assert (slice_of_h100.shared_memory_per_block, slice_of_h100.l2_bytes) == (227 << 10, 4 << 20)
    assert probe("cuda:1").device.shared_memory_per_block == 48 << 10


def test_probe_is_cached_per_device_however_it_is_named(two_gpus: pytest.MonkeyPatch) -> None:
    assert probe() is probe("cuda") is probe("cuda:1") is probe(1) is probe(torch.device("cuda", 1))
    assert probe(1) is not probe(0)
    two_gpus.setattr(torch.cuda, "get_device_properties", _raise(AssertionError("asked again")))
    assert probe(0).device.arch == (9, 0)
    two_gpus.setattr(torch.cuda, "current_device", lambda: 0)
    assert probe() is probe(0)


@pytest.mark.parametrize("device", [2, "cuda:2", torch.device("cuda", 7), -1, "cuda:-1", "gpu", "cpu:1", "xpu"])
def test_device_that_does_not_exist_is_refused(two_gpus: pytest.MonkeyPatch, device: object) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"use '|indices count"):
        probe(device)  # type: ignore[arg-type]


def test_probe_of_a_cpu_beside_gpus_leaves_them_alone(two_gpus: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "current_device", "get_device_properties", "get_arch_list"):
        two_gpus.setattr(torch.cuda, name, _raise(AssertionError("touched")))
    assert probe("cpu").device.kind == "cpu"
    assert probe("cpu").notices == ()
    assert not probe("meta").triton


@pytest.mark.parametrize("error", [RuntimeError("CUDA unknown error\ndetails"), OSError("libcuda.so.1: not found")])
@pytest.mark.parametrize("failing", ["is_available", "current_device", "get_device_properties"])
def test_failing_driver_falls_back_to_the_cpu_with_a_notice(
    two_gpus: pytest.MonkeyPatch, error: Exception, failing: str
) -> None:
    two_gpus.setattr(torch.cuda, failing, _raise(error))
    capability = probe()
    assert capability.device.kind == "cpu"
    assert capability.notices[0].startswith("running on the CPU: ")
    assert str(error).splitlines()[0] in capability.notices[0]
    assert "details" not in capability.notices[0]
    with pytest.raises(UnsupportedOptionError, match="use 'cpu'"):
        probe("cuda")


def test_no_visible_gpu(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(torch.cuda, "is_available", lambda: False)
    assert probe().notices == ("running on the CPU: no GPU is visible to torch",)


def test_rocm_device_is_not_mistaken_for_hopper() -> None:
    # ROCm reports gfx942 as 9.4, and its architecture name carries feature flags.
    properties = types.SimpleNamespace(name="MI300X", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-")
    facts = device_facts(properties, 0, is_hip=True)
    assert (facts.kind, facts.arch, facts.architecture) == ("hip", (0, 0), "gfx942")
    assert not assess(facts, INSTALLED).tma


def test_integrated_gpu_has_unified_memory() -> None:
    facts = device_facts(types.SimpleNamespace(name="GB10", major=12, minor=1, is_integrated=1), 0, is_hip=False)
    assert assess(facts, INSTALLED).unified_memory


def test_module_is_the_public_function_too() -> None:
    assert isinstance(capability_module("cpu"), GPUCapability)  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------ software


def test_missing_c_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    assert "install gcc or set CC" in read_software("cuda").triton_problem


def test_triton_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_installed", lambda *names: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "cannot be imported" in read_software("cuda").triton_problem


def test_absent_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_installed", lambda *names: False)
    software = read_software("cuda")
    assert (software.triton_problem, software.packages_found) == ("Triton is not installed", ())


@pytest.fixture
def broken_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """flash-attn (2 and 4), flash-attn 3 and xformers, each of which fails when it is imported."""
    for module in ("flash_attn", "flash_attn/cute", "xformers"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
    for module in ("flash_attn/flash_attn_interface", "flash_attn_interface"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_broken_attention_wheels_are_found_and_never_imported(broken_packages: Path) -> None:
    found = read_software("cuda").packages_found
    assert {"flash_attn", "flash_attn_3", "flash_attn_4", "xformers"} <= set(found)
    assert not {"flash_attn", "flash_attn.cute", "flash_attn_interface", "xformers"} & set(sys.modules)
    assert assess(H100, read_software("cuda")).verdicts().keys() == DESCRIBED["H100"].verdicts().keys()


def test_flash_attn_4_alone_is_not_taken_for_flash_attn_2(broken_packages: Path) -> None:
    (broken_packages / "flash_attn" / "__init__.py").unlink()
    (broken_packages / "flash_attn" / "flash_attn_interface.py").unlink()
    found = read_software("cuda").packages_found
    assert "flash_attn_4" in found
    assert "flash_attn" not in found


def test_refusing_import_hook_means_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuse:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] in ("flash_attn", "xformers"):
                raise ImportError(f"{name} is blocked")

    monkeypatch.setattr(sys, "meta_path", [Refuse(), *sys.meta_path])
    assert not is_installed("flash_attn", "cute")
    assert not is_installed("xformers")
    monkeypatch.setitem(sys.modules, "xformers", types.ModuleType("xformers"))  # a stub: it has no spec
    assert not is_installed("xformers")


# ------------------------------------------------------------------------------------------------ fresh processes


def _run(code: str, **environment_changes: str) -> str:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment_changes}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_makes_no_cuda_context_and_loads_no_kernel_library() -> None:
    code = """
import sys, torch
before = {name.partition(".")[0] for name in sys.modules}
import fastft.capability
added = {name.partition(".")[0] for name in sys.modules} - before
print(torch.cuda.is_initialized(), added & {"triton", "transformers", "flash_attn", "xformers", "bitsandbytes"})
"""
    assert _run(code) == "False set()"


def test_probing_the_cpu_leaves_the_interpreter_to_be_chosen_later() -> None:
    code = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
from fastft.capability import probe
print(probe("cpu").triton.available, "triton" in sys.modules)
"""
    assert _run(code) == "False False"


@pytest.mark.parametrize("visible", ["", "MIG-0fe2f3a1-7d43-5b0c-8a1e-1f6a3c1b2d4e", "GPU-5a3b1c2d", "0,-1,1", "0,0"])
def test_any_list_of_visible_devices_is_survived(visible: str) -> None:
    code = """
import torch
from fastft.capability import probe
capability = probe()
print(capability.device.kind == "cpu" or torch.cuda.is_available(), all(capability.summary()[0]))
"""
    assert _run(code, CUDA_VISIBLE_DEVICES=visible) == "True True"


@pytest.mark.gpu
def test_real_gpu_agrees_with_torch() -> None:
    facts = probe("cuda").device
    properties = torch.cuda.get_device_properties(facts.index)
    assert facts.arch == torch.cuda.get_device_capability()
    assert facts.total_memory == torch.cuda.mem_get_info()[1] or facts.total_memory == properties.total_memory
    assert facts.shared_memory_per_block >= 48 << 10
    assert facts.warp_size == 32
    assert facts.sm_count > 0
    assert facts.l2_bytes > 0
