"""Every kernel compiles for every architecture from sm70 to sm121, fits its shared memory and uses its tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from fastft import capability

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason=f"Triton is for Linux, this is {sys.platform}"),
]

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 2
KIB = 1024
# Shared memory that one block may opt in to, CUDA C++ Programming Guide, technical specifications per architecture.
SHARED_MEMORY = {
    70: 96 * KIB, 75: 64 * KIB, 80: 163 * KIB, 86: 99 * KIB, 87: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB,
    103: 227 * KIB, 120: 99 * KIB, 121: 99 * KIB,
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Any]:
    """What was compiled, once for all tests: the folder above that of a pytest-xdist process belongs to all of them."""
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    folder = tmp_path_factory.getbasetemp().parent if parallel else tmp_path_factory.mktemp("cross_compile")
    with FileLock(folder / "cross_compile.lock"):
        outputs = [folder / f"cross_compile_{worker}.json" for worker in range(WORKERS)]
        if not all(output.exists() for output in outputs):
            compile_all(outputs, cache=folder / "triton_cache")
    loaded = [json.loads(output.read_text()) for output in outputs]
    compiled = [entry for part in loaded for entry in part["compiled"]]
    return {"compiled": compiled, "uncovered": loaded[0]["uncovered"]}


def compile_all(outputs: list[Path], cache: Path) -> None:
    """Run one process for each output, without the interpreter and with a fresh cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # the same instructions, in a twentieth less time
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    program = str(ROOT / "tests" / "cross_compile.py")
    workers = [
        subprocess.Popen(
            [sys.executable, program, str(output), str(number), str(len(outputs))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, output in enumerate(outputs)
    ]
    for worker in workers:
        printed, _ = worker.communicate(timeout=1800)  # beside others on a busy machine
        assert worker.returncode == 0, printed


def problems(entry: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel; empty when nothing is."""
    name, arch = f"{entry['kernel']} for sm{entry['arch']}", entry["arch"]
    if "error" in entry:
        return [f"{name} does not compile: {entry['error']}"]
    found = []
    if entry["cubin_bytes"] == 0:
        found.append(f"{name}: no machine code")
    if entry["shared"] > SHARED_MEMORY[arch]:
        found.append(f"{name}: {entry['shared']} bytes of shared memory, a block has {SHARED_MEMORY[arch]}")
    if entry["has_dot"] and arch >= 80 and not entry["tensor_cores"]:
        found.append(f"{name}: its dot does not use the tensor cores")
    if arch < 80 and any("bf16" in dtype for dtype in entry["dtypes"]):
        found.append(f"{name}: bf16 on an architecture without it")
    return found


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_kernels_compile_fit_and_use_tensor_cores(results, arch):
    entries = [entry for entry in results["compiled"] if entry["arch"] == arch]
    assert len(entries) > 1, "nothing but the probe was compiled"
    assert [problem for entry in entries for problem in problems(entry)] == []


def test_what_the_capability_record_calls_compiled_is_compiled_here():
    assert {major * 10 + minor for major, minor in capability._COMPILED_FOR | capability._RUN_ON} == set(SHARED_MEMORY)


def test_every_kernel_has_a_case(results):
    assert results["uncovered"] == [], "kernels that compile_cases() of their module leaves out"
    assert any(entry["kernel"].startswith("fastft.ops.rms_norm.") for entry in results["compiled"])


def test_the_probe_shows_where_dots_reach_the_tensor_cores(results):
    probe = {entry["arch"]: entry for entry in results["compiled"] if ".dot_kernel" in entry["kernel"]}
    assert all(entry["has_dot"] for entry in probe.values())
    assert {arch: entry["tensor_cores"] for arch, entry in probe.items()} == {
        arch: arch >= 80 for arch in SHARED_MEMORY
    }


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"error": "PTXASError: no"}, "does not compile: PTXASError"),
        ({"shared": 99 * KIB + 1}, "101377 bytes of shared memory, a block has 101376"),
        ({"tensor_cores": False}, "does not use the tensor cores"),
        ({"arch": 75, "tensor_cores": False, "dtypes": ["*bf16"], "shared": 0}, "bf16 on an architecture without it"),
        ({"cubin_bytes": 0}, "no machine code"),
    ],
)
def test_the_check_complains(change, complaint):
    good = {"kernel": "k", "arch": 86, "dtypes": ["*bf16"], "shared": 99 * KIB, "has_dot": True, "tensor_cores": True}
    found = problems(good | {"cubin_bytes": 100} | change)
    assert [complaint in problem for problem in found] == ([True] if complaint else [])
