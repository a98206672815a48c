"""out += a @ b in one pass over out, against the same in fp64; and who does it."""

from __future__ import annotations

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget
from interpreter import run_kernels_as_a_gpu_would

from fastft.ops import low_rank_update
from fastft.ops.low_rank_update import add_low_rank_
from fastft.ops.triton_low_rank import add_low_rank_ as launch


@pytest.fixture(autouse=True)
def kernels_can_run(request, monkeypatch, poisoned_empty):
    run_kernels_as_a_gpu_would(request, monkeypatch)


def draw(T, N, r, dtype, device, *, a="plain", b="transposed", seed=0):
    """Operands as layers have them: a part of the columns of t, B as it lies in memory or A."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    out, nan = normal(T, N), torch.nan
    thin = normal(T, r)
    if a == "columns":
        wide = torch.full((T, 2 * r + 3), nan, dtype=dtype, device=device)
        wide[:, r : 2 * r] = thin
        thin = wide[:, r : 2 * r]
    other = normal(N, r, scale=r**-0.5).t() if b == "transposed" else normal(r, N, scale=r**-0.5)
    if b == "strided":
        apart = torch.full((2 * r, 3 * N), nan, dtype=dtype, device=device)
        apart[::2, ::3] = other
        other = apart[::2, ::3]
    return out, thin, other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((130, 256, 16), {}),
        ((67, 77, 8), {"a": "columns"}),
        ((1, 129, 1), {"b": "plain"}),
        ((129, 5, 3), {"b": "strided"}),
        ((40, 300, 48), {"a": "columns", "b": "plain"}),
        ((33, 144, 64), {"a": "columns", "b": "strided"}),
    ],
    ids=str,
)
def test_sums_are_within_the_budget(shape, layout, dtype, device):
    found, eager, oracle = {}, {}, {}
    for seed in range(3):
        out, a, b = draw(*shape, dtype, device, **layout, seed=seed)
        oracle[str(seed)] = out.double() + a.double() @ b.double()
        eager[str(seed)] = out + a @ b
        launch(out, a, b)
        found[str(seed)] = out
    assert_within_budget(found, eager, oracle)
    assert_mutant_caught({**found, "0": found["0"] * 1.05}, eager, oracle)


def test_what_is_not_finite_stays_where_it_is(device):
    out, a, b = draw(70, 90, 16, torch.float16, device)
    out[3, 7], a[5], b[:, 2] = torch.nan, torch.inf, torch.nan
    expected = torch.zeros(70, 90, dtype=torch.bool, device=device)
    expected[3, 7] = expected[5] = True
    expected[:, 2] = True
    launch(out, a, b)
    assert torch.equal(~out.isfinite(), expected)


def test_nothing_beyond_the_rows_is_written(device):
    memory = torch.full((200, 96), 7.0, dtype=torch.bfloat16, device=device)
    _, a, b = draw(130, 96, 16, torch.bfloat16, device)
    launch(memory[:130], a, b)
    assert (memory[130:] == 7).all() and not (memory[:130] == 7).all()


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_who_adds(device_type, monkeypatch):
    """Only what the kernel is made for goes to it; the result is the same."""
    launched = []
    monkeypatch.setattr(low_rank_update, "FEWEST_ELEMENTS", 4096)
    monkeypatch.setattr(low_rank_update, "_runs_on", lambda device, dtype: device_type == "cuda")
    monkeypatch.setattr("fastft.ops.triton_low_rank.add_low_rank_", lambda *args: launched.append(args))
    cpu = torch.device("cpu")
    served = [
        draw(64, 64, 16, torch.bfloat16, cpu),
        draw(64, 64, 48, torch.float16, cpu, a="columns", b="plain"),
    ]
    out, a, b = draw(64, 64, 16, torch.bfloat16, cpu)
    left = [
        draw(64, 64, 16, torch.float32, cpu),
        draw(64, 64, 65, torch.bfloat16, cpu),
        draw(8, 64, 16, torch.bfloat16, cpu),
        (out.t(), a, b),
        (out.clone(), a.t().contiguous().t(), b),
    ]
    for operands in served:
        add_low_rank_(*operands)
    assert len(launched) == (len(served) if device_type == "cuda" else 0)
    for out, a, b in left:
        expected = out + a @ b
        found = add_low_rank_(out, a, b)
        assert found is out
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert len(launched) == (len(served) if device_type == "cuda" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_matrices_on_a_gpu(dtype):
    device = torch.device("cuda")
    assert low_rank_update._runs_on(device, dtype)
    for T, N, r in ((8185, 8192, 16), (8192, 2048, 48), (4099, 3001, 64)):
        out, a, b = draw(T, N, r, dtype, device, a="columns")
        oracle, eager = out.double() + a.double() @ b.double(), out + a @ b
        found = add_low_rank_(out, a, b)
        assert_within_budget({"out": found}, {"out": eager}, {"out": oracle})
