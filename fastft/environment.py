"""What is there: a device as its driver describes it, and the software around it. Facts only, no decisions.

Reading them is the only part of the capability probe that touches a driver or looks for a package, and every way in
which that can fail ends here: a missing driver, a broken wheel, an import hook that refuses.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass

import torch

from .errors import UnsupportedOptionError

# Optional packages worth reporting: label -> top-level module, submodule. They are looked for, never imported.
PACKAGES = {
    "flash_attn": ("flash_attn", "flash_attn_interface"),  # 2.x; flash-attn-4 alone also makes a `flash_attn` folder
    "flash_attn_3": ("flash_attn_interface", None),
    "flash_attn_4": ("flash_attn", "cute"),
    "xformers": ("xformers", None),
    "bitsandbytes": ("bitsandbytes", None),
}

# What a missing driver, a broken wheel or a CPU-only build raises: torch asserts when it was built without CUDA.
DRIVER_ERRORS = (RuntimeError, AssertionError, OSError)
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the driver says about one device; zero where it says nothing."""

    kind: str  # "cpu", "cuda", "hip", or the torch device type of anything else
    index: int = 0  # torch's index, which counts visible devices only
    name: str = ""  # for people; no decision reads it
    arch: tuple[int, int] = (0, 0)  # CUDA compute capability; (0, 0) everywhere else, ROCm included
    gcn_arch: str = ""  # ROCm architecture, such as "gfx942"
    sm_count: int = 0
    warp_size: int = 0  # threads
    total_memory: int = 0  # bytes; of the slice under MIG
    shared_memory_per_block: int = 0  # bytes, the opt-in limit
    l2_bytes: int = 0
    unified_memory: bool = False  # GPU and CPU share one physical memory

    @property
    def architecture(self) -> str:
        """The architecture as compilers write it: "sm90", "gfx942", or the kind of device."""
        if self.kind == "cuda":
            return f"sm{self.arch[0]}{self.arch[1]}"
        return self.gcn_arch or self.kind


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    """What is installed; the defaults describe a complete installation, for tests that describe devices."""

    torch_version: str = ""
    torch_architectures: tuple[str, ...] = ()  # what this torch build carries kernels for; empty when unknown
    flash_attention_built: bool = True  # PyTorch's own FlashAttention-2
    triton_version: str = ""
    triton_problem: str = ""  # why Triton cannot be used at all; empty when it can
    triton_interpreter: bool = False  # TRITON_INTERPRET=1
    packages_found: tuple[str, ...] = ()  # keys of PACKAGES


def no_gpu_because() -> str:
    """Why no GPU can be used, or nothing when one can. It makes no CUDA context."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch build has no GPU support"
    try:
        return "" if torch.cuda.is_available() else "no GPU is visible to torch"
    except DRIVER_ERRORS as error:
        return f"the GPU driver failed ({first_line(error)})"


def read_device(kind: str, index: int) -> DeviceFacts:
    """What torch says about the device `kind:index`.

    Raises:
        UnsupportedOptionError: the driver fails on that GPU.
    """
    if kind != "cuda":
        return DeviceFacts(kind, index)
    try:
        properties = torch.cuda.get_device_properties(index)
    except DRIVER_ERRORS as error:
        raise UnsupportedOptionError(
            f"GPU {index} cannot be used: its driver failed ({first_line(error)}); use 'cpu' or repair the driver"
        ) from error
    return device_facts(properties, index, is_hip=torch.version.hip is not None)


def device_facts(properties: object, index: int, is_hip: bool) -> DeviceFacts:
    """Turn torch's device properties into facts; what a torch version does not report is zero."""

    def number(name: str, otherwise: int = 0) -> int:
        return int(getattr(properties, name, otherwise))

    return DeviceFacts(
        kind="hip" if is_hip else "cuda",
        index=index,
        name=str(getattr(properties, "name", "")),
        # ROCm reports gfx942 as (9, 4); comparing that with a compute capability would grant Hopper's features.
        arch=(0, 0) if is_hip else (number("major"), number("minor")),
        gcn_arch=str(getattr(properties, "gcnArchName", "")).split(":")[0] if is_hip else "",
        sm_count=number("multi_processor_count"),
        warp_size=number("warp_size", 64 if is_hip else 32),
        total_memory=number("total_memory"),
        shared_memory_per_block=number("shared_memory_per_block_optin", number("shared_memory_per_block")),
        l2_bytes=number("L2_cache_size"),
        unified_memory=bool(number("is_integrated")),
    )


def read_software(kind: str = "cpu") -> SoftwareFacts:
    """What is installed, as far as it matters to a device of this kind; Triton is imported only where it can run."""
    interpreter = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    # Importing Triton fixes whether its library is interpreted, so a CPU probe must leave that choice open.
    version, problem = _triton_version(wanted=kind == "cuda" or interpreter, compiled=not interpreter)
    return SoftwareFacts(
        torch_version=torch.__version__,
        torch_architectures=tuple(torch.cuda.get_arch_list()) if kind == "cuda" else (),
        flash_attention_built=_has_torch_fa2(),
        triton_version=version,
        triton_problem=problem,
        triton_interpreter=interpreter,
        packages_found=tuple(label for label, (module, part) in PACKAGES.items() if is_installed(module, part)),
    )


def _has_torch_fa2() -> bool:
    available = getattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    return hasattr(torch.ops.aten, "_flash_attention_forward") and bool(available())


def _triton_version(wanted: bool, compiled: bool) -> tuple[str, str]:
    """Triton's version and what is wrong with it, one of them empty."""
    if not is_installed("triton"):
        return "", "Triton is not installed"
    if not wanted:
        return "", ""
    try:
        import triton
        import triton.language  # a damaged wheel fails here first
    except _IMPORT_ERRORS as error:
        return "", f"Triton is installed but cannot be imported ({first_line(error)})"
    # Without one the first launch dies; Triton for Windows brings its own.
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or sys.platform == "win32"
    if compiled and not has_compiler:
        return "", "Triton needs a C compiler to build its launcher; install gcc or set CC"
    return triton.__version__, ""


def is_installed(module: str, part: str | None = None) -> bool:
    """Whether a package (or a submodule of it) can be found; nothing of it is imported, so a broken one is harmless."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # an import hook that refuses, or a stub without a spec
        return False
    if spec is None or part is None:
        return spec is not None
    # find_spec("flash_attn.cute") would import flash_attn; searching its folders does not.
    return importlib.machinery.PathFinder.find_spec(part, spec.submodule_search_locations or []) is not None


def first_line(error: BaseException) -> str:
    """An error in one line, for a reason."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
