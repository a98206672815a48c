"""What a device can run, with a reason for every yes and every no.

    read_device, read_software  ->  facts       (environment.py)
    assess(facts)               ->  verdicts    a pure function, so every decision is tested without the hardware
    probe(device)               ->  both, cached per device

Nothing happens at import. No decision looks at a device's name, and the environment's list of visible devices is
never parsed: torch's own indices are the only ones used, so a MIG slice reports its own memory and SM count
whatever its identifier looks like.

The module can be called, as `fastft.capability(device)`, which is `probe(device)`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

from .environment import (
    DRIVER_ERRORS,
    DeviceFacts,
    SoftwareFacts,
    first_line,
    no_gpu_because,
    read_device,
    read_software,
)
from .errors import UnsupportedOptionError

__all__ = ["DeviceFacts", "GPUCapability", "SoftwareFacts", "Verdict", "assess", "probe"]

# Compute capabilities that fastft has been run on, and those that the tests cross-compile its kernels for, with Triton
# 3.6 and newer (3.6 cannot assemble for sm110).
_RUN_ON = frozenset({(9, 0)})
_COMPILED_FOR = frozenset(divmod(arch, 10) for arch in (70, 75, 80, 86, 87, 89, 100, 103, 120, 121))
_ALWAYS_THERE = ("cpu", "meta")  # device types without a driver or an index


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something can be used, and why; true exactly when it can."""

    available: bool
    reason: str

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("a verdict needs a reason, for a yes as much as for a no")

    def __bool__(self) -> bool:
        return self.available


@dataclass(frozen=True, slots=True)
class GPUCapability:
    """Everything fastft decides from about one device (a CPU has one too). Immutable, hashable, picklable."""

    device: DeviceFacts
    software: SoftwareFacts
    torch_kernels: Verdict  # does this torch build carry code for the device
    triton: Verdict
    tensor_core_dots: Verdict  # does tl.dot reach the tensor cores
    fp16: Verdict
    bf16: Verdict  # in hardware: torch's emulation on older GPUs does not count
    fp8: Verdict
    tma: Verdict
    unified_memory: Verdict
    engines: tuple[tuple[str, Verdict], ...]  # attention engines, best first
    notices: tuple[str, ...]  # what a user should be told once

    @property
    def attention_engines(self) -> Mapping[str, Verdict]:
        """Attention engine -> verdict, best first."""
        return dict(self.engines)

    def supports_dtype(self, dtype: torch.dtype) -> Verdict:
        """Whether the device computes in `dtype` itself."""
        if dtype == torch.bfloat16:
            return self.bf16
        if dtype == torch.float16:
            return self.fp16
        if dtype.is_floating_point and dtype.itemsize == 1:
            return self.fp8
        return Verdict(True, f"{_short(dtype)} needs nothing special")

    def triton_for(self, dtype: torch.dtype) -> Verdict:
        """Whether a Triton kernel without dots can run here on tensors of `dtype`."""
        if not self.triton:
            return self.triton
        supported = self.supports_dtype(dtype)
        return self.triton if supported else Verdict(False, f"no Triton kernel in {_short(dtype)}: {supported.reason}")

    def verdicts(self) -> Mapping[str, Verdict]:
        """Every verdict by name, attention engines included as "attention: <engine>"."""
        names = ("torch_kernels", "triton", "tensor_core_dots", "fp16", "bf16", "fp8", "tma", "unified_memory")
        return {
            **{name: getattr(self, name) for name in names},
            **{f"attention: {name}": verdict for name, verdict in self.engines},
        }

    def summary(self) -> list[tuple[str, str, str]]:
        """Rows (name, "yes" or "no", reason) for printing."""
        return [(name, "yes" if verdict else "no", verdict.reason) for name, verdict in self.verdicts().items()]


# ------------------------------------------------------------------------------------------------ verdicts


def assess(device: DeviceFacts, software: SoftwareFacts) -> GPUCapability:
    """Judge what can run, from facts alone.

    Args:
        device: what the driver says.
        software: what is installed.

    Returns:
        The record; it touches no driver and imports nothing.
    """
    triton = _triton(device, software)
    torch_kernels = _torch_kernels(device, software)
    return GPUCapability(
        device=device,
        software=software,
        torch_kernels=torch_kernels,
        triton=triton,
        tensor_core_dots=_tensor_core_dots(device, software, triton),
        fp16=_fp16(device),
        bf16=_bf16(device),
        fp8=_from_arch(device, (8, 9), "fp8 tensor cores"),
        tma=_from_arch(device, (9, 0), "the tensor memory accelerator"),
        unified_memory=_unified_memory(device),
        engines=(
            ("fa2", _fa2(device, software)),
            ("sdpa", Verdict(True, "PyTorch's attention, one call per document; runs on any device")),
            ("reference", Verdict(True, "plain torch; runs on any device")),
        ),
        notices=_notices(device, torch_kernels, triton),
    )


def _from_arch(device: DeviceFacts, needed: tuple[int, int], feature: str) -> Verdict:
    if device.kind == "hip":
        return Verdict(False, f"{feature}: not run on ROCm yet")
    if device.kind != "cuda":
        return Verdict(False, f"{feature}: needs an NVIDIA GPU, this is a device of type {device.kind}")
    if device.arch < needed:
        return Verdict(False, f"{feature}: needs sm{needed[0]}{needed[1]}, this is {device.architecture}")
    return Verdict(True, f"{feature}: {device.architecture} has it")


def _maturity(device: DeviceFacts) -> str:
    if device.arch in _RUN_ON:
        return f"compiled for and run on {device.architecture}"
    if device.arch in _COMPILED_FOR:
        return f"compiled, not run on {device.architecture} yet"
    return f"neither compiled for nor run on {device.architecture} yet"


def _triton(device: DeviceFacts, software: SoftwareFacts) -> Verdict:
    if device.kind == "hip":
        return Verdict(False, f"not run on ROCm yet ({device.architecture})")
    if device.kind not in ("cpu", "cuda"):
        return Verdict(False, f"not run on devices of type {device.kind} yet")
    if software.triton_problem:
        return Verdict(False, software.triton_problem)
    if device.kind == "cpu" and not software.triton_interpreter:
        return Verdict(False, "Triton has no CPU backend; TRITON_INTERPRET=1 runs its kernels slowly, for tests")
    if device.kind == "cuda" and device.arch < (7, 0):
        return Verdict(False, f"Triton needs sm70, this is {device.architecture}")
    if software.triton_interpreter:
        return Verdict(True, f"Triton {software.triton_version}, interpreted (TRITON_INTERPRET=1): slow, for tests")
    return Verdict(True, f"Triton {software.triton_version}, {_maturity(device)}")


def _tensor_core_dots(device: DeviceFacts, software: SoftwareFacts, triton: Verdict) -> Verdict:
    if not triton:
        return Verdict(False, f"no Triton: {triton.reason}")
    if software.triton_interpreter:
        return Verdict(False, "the Triton interpreter has no tensor cores")
    if device.arch < (8, 0):
        return Verdict(False, f"Triton compiles tl.dot to scalar FMA for {device.architecture}; needs sm80")
    return Verdict(True, f"Triton compiles tl.dot to tensor-core instructions for {device.architecture}")


def _fp16(device: DeviceFacts) -> Verdict:
    if device.kind == "cuda" and device.arch < (5, 3):
        return Verdict(False, f"half-precision arithmetic needs sm53, this is {device.architecture}")
    if device.kind == "cuda" and device.arch < (7, 0):
        return Verdict(True, f"{device.architecture} computes in fp16, without tensor cores")
    return Verdict(True, f"torch computes in fp16 on {device.architecture}")


def _bf16(device: DeviceFacts) -> Verdict:
    if device.kind == "cuda":
        return _from_arch(device, (8, 0), "bf16 in hardware")
    if device.kind == "hip" and not device.gcn_arch.startswith(("gfx90a", "gfx94", "gfx95")):
        return Verdict(False, f"bf16: not known to be stable on {device.architecture}")
    return Verdict(True, f"torch computes in bf16 on {device.architecture}")


def _unified_memory(device: DeviceFacts) -> Verdict:
    if device.kind not in ("cuda", "hip"):
        return Verdict(False, "no GPU, so no second memory to share")
    if device.unified_memory:
        return Verdict(True, "GPU and CPU share one memory (integrated), so offloading would save nothing")
    return Verdict(False, "the GPU has its own memory")


def _fa2(device: DeviceFacts, software: SoftwareFacts) -> Verdict:
    needed = _from_arch(device, (8, 0), "PyTorch's own FlashAttention-2")
    if needed and not software.flash_attention_built:
        return Verdict(False, f"this torch build ({software.torch_version}) has no FlashAttention-2")
    if needed:
        where = f"run on {device.architecture}" if device.arch in _RUN_ON else f"not run on {device.architecture} yet"
        return Verdict(True, f"PyTorch's own FlashAttention-2 with cu_seqlens (fp16, bf16), {where}")
    return needed


def _torch_kernels(device: DeviceFacts, software: SoftwareFacts) -> Verdict:
    if device.kind != "cuda":
        return Verdict(True, f"torch runs on {device.architecture}")
    if not software.torch_architectures:
        return Verdict(True, "assumed: this torch build does not list its architectures")
    for name in software.torch_architectures:
        if _runs_on(name, device.arch):
            return Verdict(True, f"this torch build carries {name}, which runs on {device.architecture}")
    carried = ", ".join(software.torch_architectures)
    return Verdict(False, f"this torch build carries {carried}, none of which runs on {device.architecture}")


def _runs_on(built_for: str, arch: tuple[int, int]) -> bool:
    """Whether code that torch lists as "sm_90", "sm_90a" or "compute_90" runs on a compute capability."""
    kind, _, digits = built_for.rstrip("af").partition("_")
    if not digits.isdigit():
        return False
    built = divmod(int(digits), 10)
    if built_for.endswith("a"):  # uses features of that one architecture
        return built == arch
    # Machine code runs on the same major version from its minor on; PTX ("compute") on anything newer.
    return built <= arch and (kind == "compute" or built[0] == arch[0])


def _notices(device: DeviceFacts, torch_kernels: Verdict, triton: Verdict) -> tuple[str, ...]:
    notices = []
    if not torch_kernels:
        notices.append(f"{torch_kernels.reason}: install a torch build for {device.architecture}")
    if device.kind != "cpu" and not triton:
        notices.append(f"fastft runs on plain torch here: {triton.reason}")
    return tuple(notices)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------ probing


def probe(device: torch.device | str | int | None = None) -> GPUCapability:
    """Find out what a device can run.

    Args:
        device: a torch device, its name, the index of a GPU, or None for the current GPU if there is one and the
            CPU otherwise (a notice then says why). A GPU without an index is the current one.

    Returns:
        The record, cached per device type and index.

    Raises:
        UnsupportedOptionError: the device does not exist here, or its driver fails.
    """
    if device is None:
        return _probe_best()
    try:
        asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedOptionError(f"{device!r} is not a torch device; use 'cpu', 'cuda' or 'cuda:0'") from error
    return _probe(asked.type, _current_index(asked) if asked.index is None else asked.index)


@functools.cache
def _probe(kind: str, index: int) -> GPUCapability:
    if kind not in _ALWAYS_THERE:
        _check_exists(torch.device(kind, index))
    elif index != 0:
        raise UnsupportedOptionError(f"device '{kind}:{index}' does not exist; use '{kind}'")
    return assess(read_device(kind, index), read_software(kind))


def _probe_best() -> GPUCapability:
    problem = no_gpu_because()
    if not problem:
        try:
            return _probe("cuda", torch.cuda.current_device())
        except (*DRIVER_ERRORS, UnsupportedOptionError) as error:  # visible, yet it cannot be initialised
            problem = first_line(error)
    on_cpu = _probe("cpu", 0)
    return dataclasses.replace(on_cpu, notices=(f"running on the CPU: {problem}", *on_cpu.notices))


def _current_index(asked: torch.device) -> int:
    if asked.type in _ALWAYS_THERE:
        return 0
    _check_usable(asked)
    try:
        return torch.get_device_module(asked).current_device()
    except DRIVER_ERRORS as error:
        raise UnsupportedOptionError(f"device '{asked}' cannot be used: {first_line(error)}; use 'cpu'") from error


def _check_usable(asked: torch.device) -> None:
    problem = no_gpu_because() if asked.type == "cuda" else _no_accelerator_because(asked)
    if problem:
        raise UnsupportedOptionError(f"device '{asked}' cannot be used: {problem}; use 'cpu'")


def _check_exists(asked: torch.device) -> None:
    _check_usable(asked)
    count = torch.get_device_module(asked).device_count()
    if asked.index >= count:
        raise UnsupportedOptionError(
            f"device '{asked}' does not exist: torch sees {count} of that type; indices count visible devices from 0"
        )


def _no_accelerator_because(asked: torch.device) -> str:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != asked.type or not torch.accelerator.is_available():
        return f"torch finds no device of type {asked.type}"
    return ""


class _CallableModule(ModuleType):
    """Lets `fastft.capability` be the function users call and the submodule that Python binds to the same name."""

    def __call__(self, device: torch.device | str | int | None = None) -> GPUCapability:
        return probe(device)


sys.modules[__name__].__class__ = _CallableModule
