"""Launches of Triton kernels: remembered by everything that Triton specialises for, and by nothing less."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastft.ops import launching
from fastft.ops.launching import Launcher


class FakeKernel:
    """Stands in for a JIT kernel with parameters x_ptr, y_ptr, n, scale, BLOCK; notes every launch."""

    arg_names = ("x_ptr", "y_ptr", "n", "scale", "BLOCK")

    def __init__(self, interprets: bool = False) -> None:
        self.compilations, self.launches, self.interprets = [], [], interprets

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.launches.append((grid, args))
            if self.interprets:
                return None
            self.compilations.append(constants)
            return FakeCompiled(self)

        return run


class FakeCompiled:
    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launches.append((grid, args))


CONSTANTS = {"BLOCK": 64, "num_warps": 4}


def test_the_second_launch_goes_to_the_compiled_kernel_with_its_own_arguments():
    kernel = FakeKernel()
    launch = Launcher(kernel)
    x, y, z = torch.zeros(8), torch.zeros(8), torch.zeros(8)
    launch(3, (x, y), (8, 0.5), CONSTANTS)
    launch(5, (z, y), (8, 0.5), CONSTANTS)
    assert kernel.compilations == [CONSTANTS]
    [(first_grid, first), (second_grid, second)] = kernel.launches
    assert first_grid == (3,) and first[0] is x and first[1] is y and first[2:] == (8, 0.5)
    assert second_grid == (5, 1, 1) and second[0] is z and second[1] is y and second[2:] == (8, 0.5, 64)


@pytest.mark.parametrize(
    "other",
    [
        ((torch.zeros(8).half(), torch.zeros(8)), (8, 0.5), CONSTANTS),
        ((torch.zeros(8), torch.zeros(9)[1:]), (8, 0.5), CONSTANTS),  # not on a 16-byte boundary
        ((torch.zeros(8), None), (8, 0.5), CONSTANTS),
        ((torch.zeros(8), torch.zeros(8)), (1, 0.5), CONSTANTS),
        ((torch.zeros(8), torch.zeros(8)), (2**40, 0.5), CONSTANTS),
        ((torch.zeros(8), torch.zeros(8)), (8, 0.25), CONSTANTS),
        ((torch.zeros(8), torch.zeros(8)), (8, 0.5), {**CONSTANTS, "BLOCK": 32}),
        ((torch.zeros(8), torch.zeros(8)), (8, 0.5), {**CONSTANTS, "num_warps": 8}),
    ],
    ids=["dtype", "alignment", "none", "one", "wide", "float", "constant", "warps"],
)
def test_whatever_differs_goes_through_triton_again(other):
    kernel = FakeKernel()
    launch = Launcher(kernel)
    launch(1, (torch.zeros(8), torch.zeros(8)), (8, 0.5), CONSTANTS)
    launch(1, *other)
    assert len(kernel.compilations) == 2


def test_other_numbers_of_a_kind_go_to_the_same_compiled_kernel():
    kernel = FakeKernel()
    launch = Launcher(kernel)
    x, y = torch.zeros(8), torch.zeros(8)
    for n in (8, 9, 27, 32, 48, 1, 2**31 - 1, 2**31 + 3, 2**40 + 3, -5, -16):
        launch(1, (x, y), (n, 0.5), CONSTANTS)
        launch(1, (x, y), (n, 0.5), CONSTANTS)
    assert len(kernel.compilations) == 4  # any, a multiple of 16, one, and of 64 bits
    assert [args[2] for _, args in kernel.launches[4:6]] == [27, 27]


def test_the_interpreter_compiles_nothing_to_remember():
    kernel = FakeKernel(interprets=True)
    launch = Launcher(kernel)
    for _ in range(3):
        launch(2, (torch.zeros(8), None), (8, 0.5), CONSTANTS)
    assert [grid for grid, _ in kernel.launches] == [(2,)] * 3


class OnSecondGPU:
    """Stands in for a tensor there, as far as a launch looks at it."""

    dtype = torch.float32

    def get_device(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return 0


def test_a_launch_happens_under_the_tensors_device_and_is_remembered_for_it(monkeypatch):
    """Stands in for a machine with two GPUs; tests that need a real one are skipped elsewhere."""
    current, seen = [0], []

    class Device:
        def __init__(self, index) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *error) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    kernel = FakeKernel()
    launched = kernel.launches.append
    kernel.launches = SimpleNamespace(append=lambda launch: seen.append(current[0]) or launched(launch))
    launch = Launcher(kernel)
    for _ in range(2):  # by Triton, then directly
        launch(1, (OnSecondGPU(), None), (8, 0.5), CONSTANTS)
    current[0] = 1
    launch(1, (OnSecondGPU(), None), (8, 0.5), CONSTANTS)
    assert seen == [1, 1, 1] and current == [1]
    assert len(kernel.compilations) == 1
    launch(1, (torch.zeros(8), None), (8, 0.5), CONSTANTS)
    assert len(kernel.compilations) == 2


def test_many_sizes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(launching, "_MOST_REMEMBERED", 4)
    launch = Launcher(FakeKernel())
    for numbers in [(n, 0.5) for n in range(10)] + [(n, 0.5 + n) for n in range(10)]:
        launch(1, (torch.zeros(8), None), numbers, CONSTANTS)
        assert len(launch._compiled) <= 4 and len(launch._kinds) <= 4


@pytest.mark.gpu
def test_launches_on_a_gpu_agree_with_tritons_own():
    """Rows of two strides and alignments, in turn, each several times."""
    from fastft.ops.rms_norm.triton import _launch_fwd, launch_forward

    weight = torch.rand(64, device="cuda")
    wide = torch.randn(33, 65, device="cuda")
    inputs = [torch.randn(37, 64, device="cuda"), wide[:, 1:], wide[:, :64], torch.randn(37, 64, device="cuda")]
    remembered = len(_launch_fwd._compiled)
    for _ in range(3):
        for x in inputs:
            y, _ = launch_forward(x, weight, 1e-6, "llama")
            torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))
    assert len(_launch_fwd._compiled) == remembered + 3
