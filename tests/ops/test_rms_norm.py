"""RMSNorm against an fp64 oracle, against the Hugging Face modules, and against everything autograd may hand it.

The eager yardstick is the Hugging Face formula (`reference`), which the first test proves to be bitwise theirs.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget
from interpreter import run_kernels_as_a_gpu_would
from rms_norm_cases import DTYPES, EPS, ROUNDINGS, check, kernel, make, measure, oracle_and_eager, run

from fastft.ops.rms_norm import reference, rms_norm

# 200 rows of 128 are 7 tiles, more than the programs the interpreter's one "multiprocessor" gets.
SHAPES = [(61, 1), (67, 7), (5, 11, 64), (200, 128), (13, 576), (3, 2880), (2, 3, 1031), (2, 16384)]


@pytest.fixture(autouse=True)
def kernels_can_run(request, monkeypatch):
    run_kernels_as_a_gpu_would(request, monkeypatch)


@pytest.fixture
def kernels():
    return import_module("fastft.ops.rms_norm.triton")


# ------------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "bf16_fp32"])
@pytest.mark.parametrize(
    ("family", "name", "rounding"),
    [
        ("llama", "LlamaRMSNorm", "llama"),
        ("qwen3", "Qwen3RMSNorm", "llama"),
        ("mistral", "MistralRMSNorm", "llama"),
        ("gpt_oss", "GptOssRMSNorm", "fp32_weight"),
        ("olmo2", "Olmo2RMSNorm", "fp32_weight"),
        ("gemma", "GemmaRMSNorm", "gemma"),
        ("gemma3", "Gemma3RMSNorm", "gemma"),
    ],
)
def test_reference_is_bitwise_hugging_face(family, name, rounding, dtypes, device):
    x, weight, dy = make((3, 5, 96), dtypes, device, rounding=rounding)
    module_class = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
    module = module_class(96, eps=1e-5).to(device)
    module.weight.data = weight.clone()
    theirs = x.clone().requires_grad_()
    y = module(theirs)
    y.backward(dy.to(y.dtype))
    ours = run(reference.rms_norm, x, weight, dy, rounding, eps=1e-5)
    for found, expected in zip(ours.values(), (y, theirs.grad, module.weight.grad), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_without_weight_only_x_hat_is_left(rounding, device):
    x, _, dy = make((4, 40), "bf16", device)
    check(x, None, dy, rounding)
    ones = torch.full((40,), 0.0 if rounding == "gemma" else 1.0, dtype=x.dtype, device=device)
    for impl in ("triton", "reference"):
        unscaled = rms_norm(x, None, EPS, rounding=rounding, impl=impl)
        assert torch.equal(unscaled, rms_norm(x, ones, EPS, rounding=rounding, impl=impl))


# ------------------------------------------------------------------------------------------------ error budget


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_dtypes_and_rounding_orders(rounding, dtypes, device, poisoned_empty):
    check(*make((6, 3, 72), dtypes, device, rounding=rounding), rounding)


@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_sizes(shape, dtypes, device, poisoned_empty):
    # One element has x_hat = +-1 and a dx that only eps keeps from cancelling; with a tiny one it would be noise.
    eps = 10.0 if shape[-1] == 1 else EPS
    # The error of a few numbers is luck, for the kernel as for eager torch, so narrow rows are drawn several times.
    draws = [measure(*make(shape, dtypes, device), "llama", eps) for _ in range(max(1, 64 // shape[-1]))]
    assert_within_budget(
        *(
            {name: torch.cat([values[name].detach() for values in role], dim=-1) for name in role[0]}
            for role in zip(*draws, strict=True)
        )
    )


@pytest.mark.parametrize("hidden_size", [1, 7, 128, 2880])
def test_one_row_is_the_first_of_many(hidden_size, device, poisoned_empty):
    x, weight, dy = make((40, hidden_size), "fp32", device)
    one, many = (run(kernel, x[:rows], weight, dy[:rows], "llama") for rows in (1, 40))
    assert torch.equal(one["y"], many["y"][:1])
    assert torch.equal(one["dx"], many["dx"][:1])
    torch.testing.assert_close(one["dweight"], (dy[0] * one["y"][0] / weight))


@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 8), (2, 0)], ids=str)
def test_empty(shape, impl, dtypes, device):
    x = torch.zeros(shape, dtype=DTYPES[dtypes][0], device=device, requires_grad=True)
    weight = torch.ones(shape[-1], dtype=x.dtype, device=device, requires_grad=True)
    y = rms_norm(x, weight, EPS, impl=impl)
    y.backward(torch.ones_like(y))
    assert y.shape == x.grad.shape == x.shape
    assert y.dtype == x.dtype
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("scale", [1e4, 6e4])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_large_fp16_activations_stay_finite(scale, rounding, device):
    x, weight, dy = make((4, 256), "fp16", device, rounding=rounding)
    x = (x.float().sign() * scale).half()
    check(x, weight, dy, rounding)


def test_zero_rows(device):
    x, weight, dy = make((4, 48), "fp32", device)
    x[1] = 0
    check(x, weight, dy, "llama")


# ------------------------------------------------------------------------------------------------ mutants


def test_dropped_eps_is_caught(device):
    x, weight, dy = make((5, 64), "bf16", device, scale=1e-3)
    oracle, eager = oracle_and_eager(x, weight, dy, "llama")
    assert_within_budget(run(kernel, x, weight, dy, "llama"), eager, oracle)
    assert_mutant_caught(run(kernel, x, weight, dy, "llama", eps=0.0), eager, oracle)


def test_missing_gemma_offset_is_caught(device):
    x, weight, dy = make((5, 64), "bf16", device, rounding="gemma")
    oracle, eager = oracle_and_eager(x, weight, dy, "gemma")
    assert_mutant_caught(run(kernel, x, weight, dy, "fp32_weight"), eager, oracle)


def test_wrong_gradients_are_caught(device):
    x, weight, dy = make((40, 64), "bf16", device)
    oracle, eager = oracle_and_eager(x, weight, dy, "llama")
    found = run(kernel, x, weight, dy, "llama")
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    projection_missing = (dy * weight.float() * rstd).to(x.dtype)
    one_row_missing = run(kernel, x[:-1], weight, dy[:-1], "llama")["dweight"]
    assert_mutant_caught(found | {"dx": projection_missing}, eager, oracle)
    assert_mutant_caught(found | {"dweight": one_row_missing}, eager, oracle)


# ------------------------------------------------------------------------------------------------ layouts


H = 320
LAYOUTS = {
    "row_gaps": lambda: torch.randn(6, 4, 500)[..., 7 : 7 + H],
    "every_other_row": lambda: torch.randn(12, 4, H)[::2],
    "expanded_rows": lambda: torch.randn(1, H).expand(6, 4, H),
    "one_value_expanded": lambda: torch.randn(()).expand(6, 4, H),
    "rows_transposed": lambda: torch.randn(4, 6, H).transpose(0, 1),
    "last_dim_transposed": lambda: torch.randn(6, H, 4).transpose(1, 2),
    "heads_of_fused_qkv": lambda: torch.randn(6, 8 * H)[:, H : 5 * H].unflatten(-1, (4, H)),
    "column_step": lambda: torch.randn(6, 4, 2 * H)[..., ::2],
    "size_one_dims": lambda: torch.randn(24, 1, 1, 400)[..., :H],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of", ["x", "dy"])
def test_any_layout_and_nothing_is_written(layout, of, device, poisoned_empty):
    special = LAYOUTS[layout]().to(device)
    plain = torch.randn(special.shape, device=device)
    x, dy = (special, plain) if of == "x" else (plain, special)
    weight = torch.randn(H, device=device)
    before = [tensor.clone() for tensor in (x, weight, dy)]
    check(x, weight, dy, "llama")
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((x, weight, dy), before, strict=True))


@pytest.mark.parametrize(
    ("tensor", "row_stride"),
    [
        (torch.empty(6, 4, 48), 48),
        (torch.empty(6, 4, 100)[..., 7:55], 100),
        (torch.empty(24, 1, 1, 60)[..., :48], 60),
        (torch.empty(1, 48).expand(6, 48), 0),
        (torch.empty(7, 2, 8)[:, 0], 16),
        (torch.empty(6, 4)[:, ::4], 4),
        (torch.empty(8), 8),
        (torch.empty(4, 6, 48).transpose(0, 1), None),
        (torch.empty(2, 3, 9, 8)[:, :, :4], None),
        (torch.empty(6, 96)[:, ::2], None),
    ],
    ids=lambda value: f"{list(value.shape)}{list(value.stride())}" if isinstance(value, torch.Tensor) else str(value),
)
def test_rows_are_copied_only_where_no_single_stride_leads_through_them(kernels, tensor, row_stride):
    rows, stride = kernels._as_rows(tensor)
    assert (rows is tensor) == (row_stride is not None)
    assert stride == (row_stride if row_stride is not None else tensor.shape[-1])


def test_long_indexing_changes_nothing(device, kernels, monkeypatch):
    inputs = make((200, 128), "bf16", device)
    short = run(kernel, *inputs, "llama")
    monkeypatch.setattr(kernels, "INT32_MAX", 1000)
    long = run(kernel, *inputs, "llama")
    assert all(torch.equal(short[name], long[name]) for name in short)


def test_strided_weight(device):
    x, _, dy = make((5, 64), "fp32", device)
    check(x, torch.randn(64, 2, device=device)[:, 0], dy, "llama")


def test_incoming_gradient_that_is_also_the_residuals(device):
    """x + norm(f(norm(x))): both branches receive the same gradient tensor, which a norm must not overwrite."""

    def block(function, x, first, second, projection):
        kept = []
        inner = function(x, first, EPS, "llama") @ projection
        normed = function(inner, second, EPS, "llama")
        normed.register_hook(kept.append)
        y = x + normed
        y.register_hook(kept.append)
        y.backward(dy)
        assert all(torch.equal(grad, dy) for grad in kept)
        return {"y": y, "dx": x.grad, "dfirst": first.grad, "dsecond": second.grad}

    dy = torch.randn(6, 64, device=device)
    leaves = [torch.randn(6, 64), torch.randn(64), torch.randn(64), torch.randn(64, 64) / 8]

    def fresh(dtype=torch.float32):
        return [leaf.to(device, dtype, copy=True).requires_grad_() for leaf in leaves]

    found, eager = block(kernel, *fresh()), block(reference.rms_norm, *fresh())
    dy = dy.double()
    assert_within_budget(found, eager, block(reference.rms_norm, *fresh(torch.float64)))


# ------------------------------------------------------------------------------------------------ autograd


@pytest.mark.parametrize("x_grad", [True, False], ids=["x", "x_frozen"])
@pytest.mark.parametrize("weight_grad", [True, False], ids=["weight", "weight_frozen"])
def test_frozen_inputs_cost_nothing(x_grad, weight_grad, device, kernels, monkeypatch, poisoned_empty):
    recorded, launched = [], kernels._launch_bwd
    monkeypatch.setattr(kernels, "_launch_bwd", lambda *launch: recorded.append(launch) or launched(*launch))
    x, weight, dy = make((200, 128), "fp32", device)
    oracle, eager = oracle_and_eager(x, weight, dy, "llama")
    x.requires_grad_(x_grad)
    weight.requires_grad_(weight_grad)
    y = kernel(x, weight, EPS, "llama")
    assert y.requires_grad == (x_grad or weight_grad)
    if not y.requires_grad:
        return
    y.backward(dy)
    [(_, (*_, dx, partials), _, _)] = recorded
    assert (dx is not None) == x_grad
    assert (partials is not None) == weight_grad
    found = {"y": y}
    found |= {"dx": x.grad} if x_grad else {}
    found |= {"dweight": weight.grad} if weight_grad else {}
    assert_within_budget(found, *({name: values[name] for name in found} for values in (eager, oracle)))


def test_saves_only_x_and_rstd(device):
    saved = []
    x, weight, _ = make((6, 64), "bf16", device)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        kernel(x.requires_grad_(), weight, EPS, "llama")
    assert saved[0].data_ptr() == x.data_ptr()
    assert [(tensor.shape, tensor.dtype) for tensor in saved[1:]] == [((6,), torch.float32)]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_in_a_checkpoint(use_reentrant, device):
    x, weight, dy = make((6, 64), "bf16", device)

    def checkpointed(x, weight, eps, rounding):
        return torch.utils.checkpoint.checkpoint(kernel, x, weight, eps, rounding, use_reentrant=use_reentrant)

    plain, recomputed = (run(function, x, weight, dy, "llama") for function in (kernel, checkpointed))
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_full_graph_compile(device):
    x, weight, dy = make((6, 64), "fp32", device)
    compiled = torch.compile(lambda *args: rms_norm(*args[:3], rounding=args[3]), fullgraph=True, backend="aot_eager")
    oracle, eager = oracle_and_eager(x, weight, dy, "gemma")
    assert_within_budget(run(compiled, x, weight, dy, "gemma"), eager, oracle)


# ------------------------------------------------------------------------------------------------ GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["x_strided", "dy_strided", "contiguous"])
def test_reach_past_int32(case):
    """Rows times stride beyond 2**31 elements; the last rows are the ones that would wrap around."""
    rows, hidden_size, width = (70_000, 64, 32_768) if case != "contiguous" else (2**20 + 3, 2048, 2048)

    def far():
        return torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")[:, :hidden_size]

    def near():
        return far() if case == "contiguous" else torch.zeros(rows, hidden_size, dtype=torch.bfloat16, device="cuda")

    x, dy = (far(), near()) if case == "x_strided" else (near(), far())
    x[-40:] = torch.randn(40, hidden_size, device="cuda").bfloat16()
    dy[-40:] = torch.randn(40, hidden_size, device="cuda").bfloat16()
    weight = torch.randn(hidden_size, device="cuda", dtype=torch.bfloat16)
    oracle, eager = oracle_and_eager(x[-40:], weight, dy[-40:], "llama")
    found = run(kernel, x, weight, dy, "llama")
    found |= {"y": found["y"][-40:], "dx": found["dx"][-40:]}
    assert_within_budget(found, eager, oracle)


@pytest.mark.gpu
def test_launches_on_the_tensors_device():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    with torch.cuda.device(0):
        check(*make((33, 576), "bf16", "cuda:1"), "llama")


@pytest.mark.gpu
def test_auto_on_the_gpu_is_triton():
    x, weight, _ = make((3, 64), "bf16", "cuda")
    assert rms_norm(x.requires_grad_(), weight, EPS).grad_fn.name() == "_RMSNormFunctionBackward"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8192, 8191])
def test_many_programs_sum_one_weight_gradient(rows):
    check(*make((rows, 2048), "bf16", "cuda"), "llama")
