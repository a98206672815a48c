"""The addition fused with an RMSNorm: what autograd may do with it, and which implementation runs."""

from __future__ import annotations

import gc
import weakref
from importlib import import_module

import pytest
import torch
from add_rms_norm_cases import NAMES, check, inputs, kernel, measure, run
from budget import assert_within_budget
from interpreter import run_kernels_as_a_gpu_would
from rms_norm_cases import EPS

from fastft.capability import DeviceFacts, SoftwareFacts, assess
from fastft.errors import KernelInputError, UnsupportedOptionError
from fastft.ops.rms_norm import add_rms_norm, add_verdicts, reference, rms_norm


@pytest.fixture(autouse=True)
def kernels_can_run(request, monkeypatch):
    run_kernels_as_a_gpu_would(request, monkeypatch)


@pytest.fixture
def kernels():
    return import_module("fastft.ops.rms_norm.triton")


# ------------------------------------------------------------------------------------------------ autograd


@pytest.mark.parametrize("used", ["h", "y", "hy"])
@pytest.mark.parametrize(
    "trained",
    [("x",), ("residual",), ("weight",), ("x", "residual"), ("x", "weight"), ("x", "residual", "weight")],
    ids="_".join,
)
def test_only_what_is_needed_is_computed(trained, used, device, kernels, monkeypatch, poisoned_empty):
    recorded, launched = [], kernels._launch_bwd
    monkeypatch.setattr(kernels, "_launch_bwd", lambda *launch: recorded.append(launch) or launched(*launch))
    if trained == ("weight",):
        used = "y"  # h has no gradient then
    found = check(inputs((200, 128), "fp32", device), used=used, trained=trained)
    assert set(found) == {"h", "y"} | {f"d{name}" for name in trained if name != "weight" or "y" in used}
    if used == "h":
        assert not recorded
        return
    [(_, (_, dh, *_, dx, partials), _, _)] = recorded
    assert (dx is not None) == bool({"x", "residual"} & set(trained))
    assert (dh is not None) == (dx is not None and "h" in used)
    assert (partials is not None) == ("weight" in trained)


@pytest.mark.parametrize("trained", [(), ("x",), ("residual",), ("weight",)], ids="_".join)
def test_outputs_require_a_gradient_as_in_eager(trained, device):
    case = inputs((6, 64), "fp32", device)
    leaves = [case[name].requires_grad_(name in trained) for name in NAMES[:3]]
    found, expected = (function(*leaves, EPS, "llama") for function in (kernel, reference.add_rms_norm))
    assert [each.requires_grad for each in found] == [each.requires_grad for each in expected]
    with torch.no_grad():
        assert not any(each.requires_grad for each in kernel(*leaves, EPS, "llama"))


def _written_into(leaves, function):
    """Gradients of both leaves after one more was added to the first one's, in place."""
    h, y = function(*leaves)
    torch.autograd.backward([h, y], [torch.ones_like(h), torch.ones_like(y)])
    before = leaves[1].grad.clone()
    leaves[0].grad.add_(1.0)
    return before, leaves[1].grad


class _Aliased(torch.autograd.Function):
    """Hands out two tensors over one memory, where the op hands out one tensor twice."""

    @staticmethod
    def forward(ctx, x, residual):
        return x + residual, x - residual

    @staticmethod
    def backward(ctx, dh, dy):
        dx = dh + dy
        return dx, dx.detach()


@pytest.mark.parametrize("used", ["h", "hy"])
def test_a_leafs_gradient_is_its_own(used, device):
    """Autograd takes a gradient over as a leaf's if nobody else holds it; optimizers write into those."""
    case = inputs((6, 64), "fp32", device)
    leaves = [case[name].requires_grad_() for name in ("x", "residual")]

    def fused(x, residual):
        h, y = kernel(x, residual, case["weight"], EPS, "llama")
        return (h, y) if used == "hy" else (h, h)

    before, after = _written_into(leaves, fused)
    assert torch.equal(before, after)
    assert leaves[0].grad.data_ptr() != leaves[1].grad.data_ptr()

    for leaf in leaves:
        leaf.grad = None
    before, after = _written_into(leaves, _Aliased.apply)
    assert not torch.equal(before, after), "the mutant shares no memory, so this test proves nothing"


@pytest.mark.parametrize("order", ["x_first", "residual_first"])
def test_gradients_that_others_are_added_to(order, device):
    """Autograd adds the gradients of a tensor in place where it may; the other input's must not change by that."""

    def block(function, dtype):
        stream, projection = (leaf.to(device, dtype, copy=True).requires_grad_() for leaf in leaves)
        x, residual = (stream @ projection, stream * 1.5) if order == "x_first" else (stream * 1.5, stream @ projection)
        extra = x.sin().sum() + (residual * residual).sum() + x.cos().sum() + (residual * 0.5).sum()
        kept = []
        for tensor in (x, residual):
            tensor.retain_grad()
            tensor.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))
        h, y = function(x, residual, weight.to(dtype), EPS, "llama")
        ((h * dh.to(dtype)).sum() + (y * y).sum() + extra + h.sum()).backward()
        assert all(torch.equal(gradient, before) for gradient, before in kept)
        return {"h": h, "y": y, "dx": x.grad, "dr": residual.grad, "ds": stream.grad, "dp": projection.grad}

    leaves = [torch.randn(6, 64), torch.randn(64, 64) / 8]
    weight, dh = torch.randn(64, device=device), torch.randn(6, 64, device=device)
    found, eager = block(kernel, torch.float32), block(reference.add_rms_norm, torch.float32)
    assert_within_budget(found, eager, block(reference.add_rms_norm, torch.float64))


def test_one_tensor_as_both_inputs(device):
    case = inputs((6, 64), "fp32", device)

    def doubled(function):
        x = case["x"].detach().requires_grad_()
        h, y = function(x, x, case["weight"], EPS, "llama")
        torch.autograd.backward([h, y], [case["dh"], case["dy"]])
        return h, y, x.grad

    for found, expected in zip(doubled(kernel), doubled(reference.add_rms_norm), strict=True):
        torch.testing.assert_close(found, expected)


def test_several_backwards_add_up(device):
    case = inputs((6, 64), "fp32", device)
    leaves = [case[name].requires_grad_() for name in NAMES[:3]]
    h, y = kernel(*leaves, EPS, "llama")
    for _ in range(2):
        torch.autograd.backward([h, y], [case["dh"], case["dy"]], retain_graph=True)
    once = run(kernel, case)
    for name, leaf in zip(("dx", "dresidual", "dweight"), leaves, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * once[name])


def test_saves_only_h_and_rstd(device):
    saved = []
    case = inputs((6, 64), "bf16", device)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        h, _ = kernel(case["x"].requires_grad_(), case["residual"], case["weight"], EPS, "llama")
    assert saved[0].data_ptr() == h.data_ptr()
    assert [(tensor.shape, tensor.dtype) for tensor in saved[1:]] == [((6,), torch.float32)]


def test_the_graph_does_not_keep_itself_alive(device):
    """A node that kept its own output by reference would: h is one."""
    gc.collect()
    gc.disable()
    try:
        case = inputs((6, 64), "fp32", device)
        h, y = kernel(case["x"].requires_grad_(), case["residual"], case["weight"], EPS, "llama")
        node = weakref.ref(h.grad_fn)
        assert node() is y.grad_fn
        del h, y
        assert node() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("written", ["h", "weight"])
def test_a_write_before_backward_is_refused(written, device):
    case = inputs((6, 64), "fp32", device)
    h, y = kernel(case["x"].requires_grad_(), case["residual"], case["weight"], EPS, "llama")
    with torch.no_grad():
        (h if written == "h" else case["weight"]).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("output", [0, 1], ids=["h", "y"])
def test_create_graph_is_refused(output, device):
    case = inputs((3, 8), "fp32", device)
    x = case["x"].requires_grad_()
    outputs = kernel(x, case["residual"], case["weight"], EPS, "llama")
    with pytest.raises(UnsupportedOptionError, match=r"create_graph=True.*rms_norm=False"):
        torch.autograd.grad(outputs[output].sum(), x, create_graph=True)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_in_a_checkpoint(use_reentrant, device):
    case = inputs((6, 64), "bf16", device)

    def checkpointed(*args):
        return torch.utils.checkpoint.checkpoint(kernel, *args, use_reentrant=use_reentrant)

    plain, recomputed = run(kernel, case), run(checkpointed, case)
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_full_graph_compile(device):
    case = inputs((6, 64), "fp32", device)
    compiled = torch.compile(
        lambda *args: add_rms_norm(*args[:4], rounding=args[4]), fullgraph=True, backend="aot_eager"
    )
    _, eager, oracle = measure(case)
    assert_within_budget(run(compiled, case), eager, oracle)


# ------------------------------------------------------------------------------------------------ choice


def _gpu(arch):
    return assess(DeviceFacts("cuda", arch=arch, sm_count=100), SoftwareFacts("2.13", "3.9"))


@pytest.mark.parametrize(
    ("capability", "options", "expected", "reason"),
    [
        (_gpu((9, 0)), {}, "triton", ""),
        (_gpu((9, 0)), {"residual_dtype": torch.bfloat16}, "triton", ""),
        (_gpu((9, 0)), {"residual_dtype": torch.float32}, "reference", "residual is torch.float32, x torch.bfloat16"),
        (_gpu((9, 0)), {"alike": False}, "reference", "differ in shape"),
        (_gpu((9, 0)), {"weight_dtype": torch.float64}, "reference", "fp64"),
        (_gpu((7, 5)), {}, "reference", "bf16"),
        (assess(DeviceFacts("cpu"), SoftwareFacts("2.13", "3.9")), {}, "reference", ""),
    ],
)
def test_auto_takes_the_first_that_can_run(capability, options, expected, reason):
    found = add_verdicts(capability, torch.bfloat16, hidden_size=4096, **options)
    assert next(name for name, verdict in found.items() if verdict) == expected
    assert reason in found["triton"].reason


@pytest.mark.parametrize(
    ("x_dtype", "residual_dtype", "x_shape", "residual_shape"),
    [
        (torch.bfloat16, torch.float32, (4, 3, 32), (4, 3, 32)),
        (torch.float32, torch.float16, (4, 3, 32), (4, 3, 32)),
        (torch.float32, torch.float32, (4, 3, 32), (3, 32)),
        (torch.float32, torch.float32, (4, 3, 1), (4, 3, 32)),
    ],
)
def test_other_dtypes_and_shapes_are_torchs(x_dtype, residual_dtype, x_shape, residual_shape, device):
    x = torch.randn(x_shape, device=device).to(x_dtype).requires_grad_()
    residual = torch.randn(residual_shape, device=device).to(residual_dtype).requires_grad_()
    weight = torch.randn(32, device=device)
    h, y = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(h, residual + x)
    assert torch.equal(y, rms_norm(h, weight, EPS))
    (h + y).sum().backward()
    assert (x.grad.dtype, x.grad.shape) == (x_dtype, x_shape)
    assert (residual.grad.dtype, residual.grad.shape) == (residual_dtype, residual_shape)
    with pytest.raises(UnsupportedOptionError, match="add_rms_norm='triton' cannot run here: residual"):
        add_rms_norm(x, residual, weight, EPS, impl="triton")


X = torch.ones(3, 8)


@pytest.mark.parametrize(
    ("x", "residual", "weight", "options", "error", "message"),
    [
        (X, torch.ones(3, 7), None, {}, KernelInputError, r"residual \[3, 7\] cannot be added to x \[3, 8\]"),
        (X, torch.ones(3, 8, device="meta"), None, {}, KernelInputError, "x is on cpu, residual on meta"),
        (X, X.long(), None, {}, KernelInputError, "residual has dtype torch.int64"),
        (X, X, torch.ones(7), {}, KernelInputError, r"add_rms_norm: weight has shape \[7\].*needs \[8\]"),
        (torch.tensor(1.0), torch.tensor(1.0), None, {}, KernelInputError, "no dimension"),
        (X, X, None, {"rounding": "t5"}, UnsupportedOptionError, "unknown rounding 't5'"),
        (X, X, None, {"impl": "cuda"}, UnsupportedOptionError, "unknown implementation 'cuda'"),
        (X.double(), X.double(), None, {"impl": "triton"}, UnsupportedOptionError, "precision of fp64.*'reference'"),
    ],
)
def test_errors_say_what_and_why(x, residual, weight, options, error, message):
    with pytest.raises(error, match=message):
        add_rms_norm(x, residual, weight, EPS, **options)
