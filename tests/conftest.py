"""Shared fixtures. Without a GPU the Triton kernels run in the interpreter; it has to be chosen before triton loads."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from interpreter import lose_less_time


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the libraries, which live as long as the process, out of every search for garbage: 0.3 s each with them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: at the end one process would work on it while the others have nothing left."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        lose_less_time(monkeypatch)
        yield


@pytest.fixture(params=[pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device a test runs on: the CPU by default, the GPU under `pytest -m gpu`."""
    return torch.device(request.param)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills every uninitialised allocation with NaN, so that an element nobody wrote is found."""

    def poison(function):
        def wrapper(*args, **kwargs):
            tensor = function(*args, **kwargs)
            if not tensor.is_floating_point() or tensor.device.type == "meta" or tensor.requires_grad:
                return tensor
            return tensor.fill_(float("nan"))

        return wrapper

    with torch.device("cpu"):
        torch.empty(0)  # torch remembers what makes tensors, for `with torch.device(...)`, and must not remember ours
    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
