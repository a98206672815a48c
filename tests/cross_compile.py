"""Compiles every kernel of fastft for every GPU architecture, on a machine without a GPU.

    python cross_compile.py RESULT.json WORKER WORKERS

Run as a process of its own, without TRITON_INTERPRET: under it `triton.jit` gives objects that cannot be compiled. A
module with kernels says how it is used by `compile_cases()`, which yields (kernel, signature, constexprs, num_warps).
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError

ARCHITECTURES = (70, 75, 80, 86, 87, 89, 90, 100, 103, 120, 121)
TENSOR_CORE_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, BLOCK: tl.constexpr):
    """Proves that the check for tensor cores sees them where they are used, and their absence on sm75."""
    rows = tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    product = tl.dot(tl.load(a_ptr + rows * BLOCK + cols), tl.load(b_ptr + rows * BLOCK + cols))
    tl.store(c_ptr + rows * BLOCK + cols, product)


def compile_cases() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], int]]:
    signature = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "BLOCK": "constexpr"}
    yield dot_kernel, signature, {"BLOCK": 64}, 4


def kernel_modules() -> list[ModuleType]:
    """This module, and every module under fastft.ops that defines a kernel or says that it has some."""
    ops = importlib.import_module("fastft.ops")
    names = [info.name for info in pkgutil.walk_packages(ops.__path__, "fastft.ops.")]
    modules = [importlib.import_module(name) for name in names]
    return [sys.modules[__name__], *(m for m in modules if hasattr(m, "compile_cases") or kernels_of(m))]


def full_name(kernel: Any) -> str:
    return f"{kernel.__module__}.{kernel.__name__}"


def kernels_of(module: ModuleType) -> set[str]:
    """Names of the module's kernels: by convention they end in _kernel, and functions that kernels call do not."""
    return {
        full_name(value)
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }


def compile_case(case: tuple[Any, dict[str, str], dict[str, Any], int], arch: int) -> dict[str, Any]:
    kernel, signature, constexprs, num_warps = case
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or "stride" in name]
    aligned = [i for i in aligned if list(signature.values())[i] != "constexpr"]
    source = ASTSource(kernel, signature, constexprs, {(i,): [["tt.divisibility", 16]] for i in aligned})
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})
    return {
        "shared": compiled.metadata.shared,
        # Exact products of fp32 and fp64 are made of FMA where there are no tensor cores for them, on purpose.
        "has_dot": any("tt.dot " in line and "6> *" in line for line in compiled.asm["ttir"].splitlines()),
        "tensor_cores": any(name in compiled.asm["ptx"] for name in TENSOR_CORE_INSTRUCTIONS),
        "cubin_bytes": len(compiled.asm["cubin"]),
    }


def runs_on(signature: dict[str, str], arch: int) -> bool:
    """Turing has no bf16; fastft takes the reference there."""
    return arch >= 80 or not any("bf16" in kind for kind in signature.values())


def main(result: str, worker: int, workers: int) -> None:
    modules = kernel_modules()
    cases = [
        (number, case)
        for module in modules
        for number, case in enumerate(module.compile_cases() if hasattr(module, "compile_cases") else ())
    ]
    uncovered = set().union(*map(kernels_of, modules)) - {full_name(case[0]) for _, case in cases}
    tasks = [(number, case, arch) for number, case in cases for arch in ARCHITECTURES if runs_on(case[1], arch)]
    compiled = []
    for number, case, arch in tasks[worker::workers]:
        name = f"{full_name(case[0])}[{number}]"
        try:
            facts = compile_case(case, arch)
        except (TritonError, RuntimeError) as error:  # one kernel that does not compile must not hide the others
            facts = {"error": f"{type(error).__name__}: {error}"[:2000]}
        dtypes = sorted({kind for kind in case[1].values() if kind[0] == "*"})
        compiled.append({"kernel": name, "arch": arch, "dtypes": dtypes, **facts})
    Path(result).write_text(json.dumps({"compiled": compiled, "uncovered": sorted(uncovered)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
