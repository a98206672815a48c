"""The addition before an RMSNorm, fused with it: both outputs and all gradients against an fp64 oracle.

What it shares with the norm alone (row strides, launch sizes, weights of other dtypes) is tested there in more depth.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from add_rms_norm_cases import NAMES, check, inputs, kernel, measure, run
from budget import assert_mutant_caught, assert_within_budget
from interpreter import run_kernels_as_a_gpu_would
from rms_norm_cases import DTYPES, EPS, ROUNDINGS

from fastft.ops.rms_norm import add_rms_norm, rms_norm


@pytest.fixture(autouse=True)
def kernels_can_run(request, monkeypatch):
    run_kernels_as_a_gpu_would(request, monkeypatch)


@pytest.fixture
def kernels():
    return import_module("fastft.ops.rms_norm.triton")


# ------------------------------------------------------------------------------------------------ error budget


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_dtypes_and_rounding_orders(rounding, dtypes, device, poisoned_empty):
    found = check(inputs((6, 3, 72), dtypes, device, rounding), rounding)
    assert set(found) == {"h", "y", "dx", "dresidual", "dweight"}
    assert torch.equal(found["dx"], found["dresidual"])


@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(67, 7), (5, 11, 64), (200, 128), (1, 2880), (2, 3, 1031), (2, 16384)], ids=str)
def test_sizes(shape, dtypes, device, poisoned_empty):
    # The error of a few numbers is luck, for the kernel as for eager torch, so narrow rows are drawn several times.
    draws = [measure(inputs(shape, dtypes, device)) for _ in range(max(1, 64 // shape[-1]))]
    assert_within_budget(
        *(
            {name: torch.cat([values[name] for values in role], dim=-1) for name in role[0]}
            for role in zip(*draws, strict=True)
        )
    )


@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16", "bf16_fp32"])
@pytest.mark.parametrize("hidden_size", [40, 2048])
def test_h_is_the_eager_sum_and_y_the_norm_of_h(hidden_size, dtypes, device):
    """To the bit: a memory plan makes y of a kept h again, by the norm alone."""
    case = inputs((37, hidden_size), dtypes, device)
    h, y = kernel(*(case[name] for name in NAMES[:3]), EPS, "llama")
    assert torch.equal(h, case["residual"] + case["x"])
    assert torch.equal(y, rms_norm(h, case["weight"], EPS, impl="triton"))


@pytest.mark.parametrize("hidden_size", [7, 128, 2880])
def test_one_row_is_the_first_of_many(hidden_size, device, poisoned_empty):
    case = inputs((40, hidden_size), "fp32", device)
    one = run(kernel, {name: tensor if name == "weight" else tensor[:1] for name, tensor in case.items()})
    many = run(kernel, case)
    assert all(torch.equal(one[name], many[name][:1]) for name in ("h", "y", "dx", "dresidual"))


def test_rows_that_cancel(device):
    case = inputs((4, 48), "fp32", device)
    case["residual"][1] = -case["x"][1]
    assert not check(case)["h"][1].any()


def test_without_weight(device):
    check(inputs((4, 40), "bf16", device) | {"weight": None})


@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 8), (2, 0)], ids=str)
def test_empty(shape, impl, dtypes, device):
    x, residual = (torch.zeros(shape, dtype=DTYPES[dtypes][0], device=device, requires_grad=True) for _ in range(2))
    weight = torch.ones(shape[-1], dtype=x.dtype, device=device, requires_grad=True)
    h, y = add_rms_norm(x, residual, weight, EPS, impl=impl)
    (h + y).sum().backward()
    assert h.shape == y.shape == x.grad.shape == residual.grad.shape == x.shape
    assert h.dtype == y.dtype == x.dtype
    assert torch.equal(weight.grad, torch.zeros_like(weight))


# ------------------------------------------------------------------------------------------------ mutants


def test_wrong_results_are_caught(device):
    case = inputs((40, 64), "bf16", device)
    found, eager, oracle = measure(case)
    assert_within_budget(found, eager, oracle)
    for mutant in (
        {"h": case["residual"]},
        {"y": rms_norm(case["residual"], case["weight"], EPS)},
        {"dx": run(kernel, case, used="y")["dx"]},  # dh is forgotten
        {"dresidual": case["dh"].bfloat16()},  # the norm's share is
        {"dx": found["dx"] * 1.02},
        {"dweight": run(kernel, case | {"dh": case["dy"], "dy": case["dh"]})["dweight"]},
    ):
        assert_mutant_caught(found | mutant, eager, oracle)


# ------------------------------------------------------------------------------------------------ layouts

H = 320
LAYOUTS = {
    "row_gaps": lambda: torch.randn(6, 4, 500)[..., 7 : 7 + H],
    "expanded_rows": lambda: torch.randn(1, H).expand(6, 4, H),
    "one_value_expanded": lambda: torch.randn(()).expand(6, 4, H),
    "rows_transposed": lambda: torch.randn(4, 6, H).transpose(0, 1),
    "column_step": lambda: torch.randn(6, 4, 2 * H)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of", ["x", "residual", "dh", "dy"])
def test_any_layout_and_nothing_is_written(layout, of, device, poisoned_empty):
    case = {name: torch.randn(6, 4, H, device=device) for name in NAMES} | {"weight": torch.randn(H, device=device)}
    case[of] = LAYOUTS[layout]().to(device)
    before = {name: tensor.clone() for name, tensor in case.items()}
    found = check(case)
    assert all(torch.equal(case[name], before[name]) for name in case)
    assert found["h"].is_contiguous() and found["y"].is_contiguous()


@pytest.mark.parametrize("strided", ["residual", "dh"])
def test_long_indexing_changes_nothing(strided, device, kernels, monkeypatch):
    """By the reach of each tensor: only this one's is beyond the limit."""
    case = inputs((200, 128), "bf16", device)
    case[strided] = torch.nn.functional.pad(case[strided].bfloat16(), (0, 384))[:, :128]
    launches = []

    def recorded(launch):
        return lambda *args: launches.append(args[3]["LONG_INDEXING"]) or launch(*args)

    for name in ("_launch_fwd", "_launch_bwd"):
        monkeypatch.setattr(kernels, name, recorded(getattr(kernels, name)))
    short = run(kernel, case)
    monkeypatch.setattr(kernels, "INT32_MAX", 200 * 128)
    long = run(kernel, case)
    assert launches == [False, False, strided == "residual", strided == "dh"]
    assert all(torch.equal(short[name], long[name]) for name in short)


# ------------------------------------------------------------------------------------------------ GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("far", ["residual", "dh"])
def test_reach_past_int32(far):
    """Rows times stride beyond 2**31 elements; the last rows are the ones that would wrap around."""
    rows, hidden_size, width = 70_000, 64, 32_768
    case = {name: torch.zeros(rows, hidden_size, dtype=torch.bfloat16, device="cuda") for name in NAMES}
    case[far] = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")[:, :hidden_size]
    for name in NAMES:
        case[name][-40:] = torch.randn(40, hidden_size, device="cuda").bfloat16()
    case["weight"] = torch.randn(hidden_size, device="cuda", dtype=torch.bfloat16)
    _, eager, oracle = measure({name: case[name] if name == "weight" else case[name][-40:] for name in NAMES})
    found = run(kernel, case)
    assert_within_budget({n: v if n == "dweight" else v[-40:] for n, v in found.items()}, eager, oracle)


@pytest.mark.gpu
def test_auto_on_the_gpu_is_triton():
    case = inputs((3, 64), "bf16", "cuda")
    h, y = add_rms_norm(case["x"].requires_grad_(), case["residual"], case["weight"], EPS)
    assert h.grad_fn.name() == y.grad_fn.name() == "_AddRMSNormFunctionBackward"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8192, 8191])
def test_many_programs_sum_one_weight_gradient(rows):
    check(inputs((rows, 2048), "bf16", "cuda"))
