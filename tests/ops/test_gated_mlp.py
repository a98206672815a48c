"""The gated activation and its projection against fp64: values, every gradient, checkpoints, and what is saved."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from budget import assert_mutant_caught, assert_within_budget
from interpreter import run_kernels_as_a_gpu_would
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastft.capability import probe
from fastft.errors import KernelInputError, UnsupportedOptionError
from fastft.ops.gated_mlp import gated, gated_linear, verdicts

WIDTH, N, RANK = 67, 53, 5
SCALING = 1.7
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMPLEMENTATIONS = ("triton", "reference")
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
LORA = ("gate", "up", "lora_A", "lora_B")
ALL = ("gate", "up", "weight", "bias", "lora_A", "lora_B")


@pytest.fixture(autouse=True)
def kernels_can_run(request, monkeypatch, poisoned_empty):
    run_kernels_as_a_gpu_would(request, monkeypatch)


def make(lead=(37,), dtype=torch.float32, device="cpu", size=WIDTH, adapter=True):
    """Halves of which many are where the activations bend, and an update as large as the base's output."""
    tensors = {
        "gate": 2 * torch.randn(*lead, size),
        "up": torch.randn(*lead, size),
        "weight": torch.randn(N, size) / size**0.5,
        "bias": torch.randn(N),
    }
    if adapter:
        tensors |= {"lora_A": torch.randn(RANK, size) / size**0.5, "lora_B": torch.randn(N, RANK) / RANK**0.5}
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def eager(gate, up, activation, weight, bias=None, lora_A=None, lora_B=None, scaling=SCALING):
    product = ACTIVATIONS[activation](gate) * up
    y = F.linear(product, weight, bias)
    return y if lora_A is None else y + F.linear(F.linear(product, lora_A), lora_B) * scaling


def fused(impl, gate, up, activation, weight, bias=None, lora_A=None, lora_B=None):
    return gated_linear(gate, up, activation, weight, bias, lora_A, lora_B, SCALING, impl=impl)


def gradients(function, tensors, activation, dy, trained):
    leaves = {name: value.detach().requires_grad_(name in trained) for name, value in tensors.items()}
    gate, up, *others = leaves.values()
    y = function(gate, up, activation, *others)
    y.backward(dy.to(y.dtype))
    assert all((leaf.grad is not None) == (name in trained) for name, leaf in leaves.items())
    return {"y": y.detach()} | {name: leaves[name].grad for name in trained}


def measure(tensors, activation, impl, trained=LORA, dy=None):
    """Ours, eager and the oracle."""
    dy = torch.randn(*tensors["gate"].shape[:-1], N, device=tensors["gate"].device) if dy is None else dy
    dy = dy.to(tensors["gate"].dtype)
    trained = [name for name in trained if name in tensors]
    wide = {name: value.double() for name, value in tensors.items()}
    return (
        gradients(lambda *args: fused(impl, *args), tensors, activation, dy, trained),
        gradients(eager, tensors, activation, dy, trained),
        gradients(eager, wide, activation, dy.double(), trained),
    )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("lead", [(37,), (3, 13), ()], ids=str)
def test_values_and_gradients(device, dtype, activation, lead, impl):
    """Drawn several times, and of one token each tensor is one row: errors of single numbers are luck."""
    draws = [measure(make(lead, dtype, device), activation, impl) for _ in range(2 if lead else 4)]
    found, stock, _ = draws[0]
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        name: (value.dtype, value.shape) for name, value in stock.items()
    }

    def together(results):
        rows = (lambda x: x.reshape(-1, x.shape[-1])) if lead else (lambda x: x.reshape(1, -1))
        return {name: torch.cat([rows(result[name]) for result in results]) for name in found}

    found, stock, oracle = map(together, zip(*draws, strict=True))
    assert_within_budget(found, stock, oracle)
    assert_mutant_caught({**found, "gate": found["gate"] * 1.05}, stock, oracle)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "trained",
    [ALL, ("weight",), ("lora_A",), ("lora_B",), ("gate", "lora_B"), ("up", "weight"), ("gate", "up"), ("bias",)],
    ids="+".join,
)
def test_whatever_is_trained(device, trained, impl):
    assert_within_budget(*measure(make(device=device), "silu", impl, trained))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("trained", [("gate", "up", "weight", "bias"), ("gate", "up"), ("weight",)], ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_an_adapter(device, dtype, trained, impl):
    assert_within_budget(*measure(make(dtype=dtype, device=device, adapter=False), "gelu", impl, trained))


@pytest.mark.parametrize("size", [1, 16, 128, 256, 512, 768, 3000])
def test_sizes(device, size):
    """One tile and several, even cuts and tiles that are not full; a row of one number is measured as one of all."""
    results = measure(make((41,), device=device, size=size), "silu", "triton", ALL)
    assert_within_budget(*({name: value.flatten() for name, value in result.items()} for result in results))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_and_expanded_inputs(device, dtype):
    both = torch.randn(4, 9, 2 * WIDTH, device=device).to(dtype)
    row = torch.randn(1, WIDTH, device=device).to(dtype)
    halves = [both.chunk(2, -1), (both[..., ::2], both[..., 1::2])]
    halves += [
        (both[..., :WIDTH].transpose(0, 1), both[..., WIDTH:].transpose(0, 1)),
        (row.expand(33, WIDTH), both[0, :1, :WIDTH].expand(33, WIDTH)),
    ]
    for gate, up in halves:
        dy = 1 + 0.5 * torch.randn(*gate.shape[:-1], N, device=device)  # equal rows would leave sums that cancel
        assert_within_budget(
            *measure(make(dtype=dtype, device=device) | {"gate": gate, "up": up}, "silu", "triton", dy=dy)
        )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_expanded_and_strided_gradients(device, impl):
    tensors = make((6, 7), device=device)
    tensors["lora_B"] = tensors["lora_B"].abs()
    for dy in (
        torch.ones((), device=device).expand(6, 7, N),
        torch.rand(6, 7, 1, device=device).expand(6, 7, N),
        torch.randn(7, 6, N, device=device).transpose(0, 1),
        torch.randn(6, 7, 2 * N, device=device)[..., ::2],
    ):
        assert_within_budget(*measure(tensors, "silu", impl, ALL, dy=dy))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_activation_alone(device, dtype, impl):
    tensors = {name: value for name, value in make((5, 9), dtype, device).items() if name in ("gate", "up")}
    upstream = torch.randn(5, 1, WIDTH, device=device).to(dtype).expand(5, 9, WIDTH)

    def run(function, tensors):
        leaves = {name: value.detach().requires_grad_() for name, value in tensors.items()}
        y = function(*leaves.values())
        y.backward(upstream.to(y.dtype))
        return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}

    found = run(lambda gate, up: gated(gate, up, "silu", impl=impl), tensors)
    stock = run(lambda gate, up: F.silu(gate) * up, tensors)
    oracle = run(lambda gate, up: F.silu(gate) * up, {name: value.double() for name, value in tensors.items()})
    assert_within_budget(found, stock, oracle)
    if impl == "reference":
        assert all(torch.equal(found[name], stock[name]) for name in stock)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_and_undefined_numbers(device, activation, impl):
    gate = torch.tensor([[0.0, -1e4, 1e4, -60000.0, 60000.0, float("inf"), float("nan"), 1.0]], device=device)
    gate = gate.requires_grad_()
    up = torch.ones_like(gate)
    y = gated(gate, up, activation, impl=impl)
    y.backward(torch.ones_like(y))
    expected = gate.detach().clone().requires_grad_()
    stock = ACTIVATIONS[activation](expected)
    stock.backward(torch.ones_like(stock))
    if impl == "triton":
        assert y[0, 5] == float("inf")  # torch's vectorised gelu makes NaN of it on CPUs
    torch.testing.assert_close(y[:, 6:], stock[:, 6:], equal_nan=True)
    torch.testing.assert_close(y[:, :5], stock[:, :5])
    torch.testing.assert_close(gate.grad[:, :5], expected.grad[:, :5])
    assert gate.grad[0, 6].isnan()


@pytest.mark.parametrize("lead", [(0,), (2, 0)], ids=str)
def test_no_tokens(device, lead):
    found, stock, _ = measure(make(lead, device=device), "silu", "auto", ALL)
    for name, value in stock.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_under_autocast(device, impl):
    """fp32 adapters and a bf16 base, as trainers have them: computed in bf16, gradients in the tensors' own dtypes."""
    tensors = make(dtype=torch.bfloat16, device=device)
    tensors |= {name: tensors[name].float() for name in ("lora_A", "lora_B")}
    dy = torch.randn(37, N, device=device).bfloat16()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = gradients(lambda *args: fused(impl, *args), tensors, "silu", dy, LORA)
        stock = gradients(eager, tensors, "silu", dy, LORA)
    oracle = gradients(eager, {name: value.double() for name, value in tensors.items()}, "silu", dy.double(), LORA)
    assert found["y"].dtype == torch.bfloat16 and found["lora_A"].dtype == found["lora_B"].dtype == torch.float32
    assert_within_budget(found, stock, oracle)


class Counted(TorchDispatchMode):
    """Counts products of matrices by the shape of the result."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._schema.name in ("aten::mm", "aten::addmm", "aten::linear", "aten::addmm_"):
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("adapter", [True, False])
def test_a_checkpoint_stops_before_the_projection(device, adapter, impl):
    tensors = make(device=device, adapter=adapter)
    trained = LORA if adapter else ("gate", "up", "weight", "bias")
    dy = torch.randn(37, N, device=device)

    def checkpointed(gate, up, activation, *others):
        def layer(gate, up):
            return fused(impl, gate * 1, up * 1, activation, *others)

        return checkpoint(layer, gate, up, use_reentrant=False)

    plain = gradients(lambda *args: fused(impl, *args), tensors, "silu", dy, [n for n in trained if n in tensors])
    with Counted() as counted:
        gradients(checkpointed, tensors, "silu", dy, [name for name in trained if name in tensors])
    assert counted.shapes.count((37, N)) == (2 if adapter else 1)  # of forward alone: y, and y with the update
    # The mode makes the fused op write nothing in place, which rounds otherwise: numbers are those of another run.
    silent = gradients(checkpointed, tensors, "silu", dy, [name for name in trained if name in tensors])
    assert all(torch.equal(silent[name], value) for name, value in plain.items())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_gate_and_up_are_all_that_is_saved(device, impl):
    tensors = {name: value.requires_grad_(name in LORA) for name, value in make(device=device).items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        y = fused(impl, *list(tensors.values())[:2], "silu", *list(tensors.values())[2:])
    assert saved == [(37, WIDTH), (37, WIDTH)]
    grads = torch.autograd.grad(y.sum(), [tensors[name] for name in LORA])
    plain = fused(impl, *list(tensors.values())[:2], "silu", *list(tensors.values())[2:])
    assert all(map(torch.equal, grads, torch.autograd.grad(plain.sum(), [tensors[name] for name in LORA])))


def test_the_product_is_gone_after_forward(device):
    tensors = {name: value.requires_grad_(name in LORA) for name, value in make(device=device).items()}
    before = {id(x) for x in gc.get_objects() if type(x) is torch.Tensor}
    y = fused("triton", *list(tensors.values())[:2], "silu", *list(tensors.values())[2:])
    gc.collect()
    kept = [x for x in gc.get_objects() if type(x) is torch.Tensor and id(x) not in before]
    assert not any(x.shape == (37, WIDTH) for x in kept)
    node = weakref.ref(y.grad_fn)
    del y, kept
    assert node() is None  # no cycle: memory is free when the output is


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_graph_serves_more_than_one_backward(device, impl):
    tensors = {name: value.requires_grad_() for name, value in make(device=device).items()}
    gate, up, *others = tensors.values()
    y = fused(impl, gate, up, "silu", *others)
    first, second = torch.randn_like(y), torch.randn_like(y)
    of_adapter = torch.autograd.grad(y, [tensors["lora_A"]], first, retain_graph=True)
    of_first = torch.autograd.grad(y, list(tensors.values()), first, retain_graph=True)
    of_second = torch.autograd.grad(y, list(tensors.values()), second)
    both = torch.autograd.grad(fused(impl, gate, up, "silu", *others), list(tensors.values()), first + second)
    assert torch.equal(of_adapter[0], of_first[4])
    for one, other, total in zip(of_first, of_second, both, strict=True):
        torch.testing.assert_close(one + other, total, rtol=1e-4, atol=1e-4)  # sums of fp32 in another order


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_inputs_and_incoming_gradients_are_left_alone(device, impl):
    tensors = make(device=device)
    leaves = {name: value.clone().requires_grad_() for name, value in tensors.items()}
    gate, up, *others = leaves.values()
    dy = torch.randn(37, N, device=device)
    upstream = dy.clone()
    y = fused(impl, gate, up, "silu", *others)
    copy = y.detach().clone()
    y.backward(upstream)
    assert torch.equal(upstream, dy) and torch.equal(y, copy)
    assert all(torch.equal(leaves[name], value) for name, value in tensors.items())


def test_a_write_between_forward_and_backward_is_an_error(device):
    for written in ("gate", "weight"):
        tensors = {name: value.requires_grad_(name in LORA) for name, value in make(device=device).items()}
        gate, up, *others = tensors.values()
        y = fused("triton", gate, up, "silu", *others)
        with torch.no_grad():
            tensors[written].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_no_second_derivative(device):
    tensors = {name: value.requires_grad_() for name, value in make(device=device).items()}
    gate, up, *others = tensors.values()
    for y in (fused("triton", gate, up, "silu", *others), gated(gate, up, "silu", impl="triton")):
        with pytest.raises(UnsupportedOptionError, match="gated_mlp=False"):
            torch.autograd.grad(y.sum(), gate, create_graph=True)


def test_compiled_it_is_plain_torch(device):
    tensors = make(device=device)
    gate, up, *others = tensors.values()
    compiled = torch.compile(lambda *args: gated_linear(*args[:2], "silu", *args[2:], SCALING), backend="aot_eager")
    torch.testing.assert_close(compiled(gate, up, *others), eager(gate, up, "silu", *others))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"up": torch.zeros(36, WIDTH)}, KernelInputError, "one shape"),
        ({"up": torch.zeros(37, WIDTH, dtype=torch.float16)}, KernelInputError, "dtype"),
        ({"weight": torch.zeros(N, WIDTH + 1)}, KernelInputError, r"weight has shape \[53, 68\]"),
        ({"bias": torch.zeros(N + 1)}, KernelInputError, "bias has shape"),
        ({"lora_B": None}, KernelInputError, "both or neither"),
        ({"lora_B": torch.zeros(N, RANK + 1)}, KernelInputError, "lora_B has shape"),
        ({"weight": torch.zeros(N, WIDTH, dtype=torch.float64)}, KernelInputError, "use autocast"),
        ({"weight": torch.zeros(N, WIDTH, device="meta")}, KernelInputError, "weight on meta"),
    ],
)
def test_what_does_not_fit_is_refused(changes, error, words):
    gate, up, *others = (make() | changes).values()
    with pytest.raises(error, match=words):
        fused("auto", gate, up, "silu", *others)


def test_unknown_options_are_refused():
    gate, up, *_ = make().values()
    with pytest.raises(UnsupportedOptionError, match="silu, gelu, gelu_tanh"):
        gated(gate, up, "mish")
    with pytest.raises(UnsupportedOptionError, match="'triton'"):
        gated(gate, up, "silu", impl="cutlass")
    with pytest.raises(UnsupportedOptionError, match="precision of fp64"):
        gated(gate.double(), up.double(), "silu", impl="triton")


def test_which_implementation_comes_first():
    assert next(iter(verdicts(probe(torch.device("cpu")), torch.float32))) == "reference"


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31():
    """Places in the last row do not fit 32 bits."""
    stride = 2**31 // 2 + 64
    gate, up = (torch.zeros(2 * stride + WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    gate, up = (x.as_strided((3, WIDTH), (stride, 1)).normal_() for x in (gate, up))
    tensors = make(dtype=torch.bfloat16, device="cuda") | {"gate": gate, "up": up}
    dy = torch.randn(3, N, device="cuda")
    near = measure({**tensors, "gate": gate.contiguous(), "up": up.contiguous()}, "silu", "triton", dy=dy)
    far = measure(tensors, "silu", "triton", dy=dy)
    assert all(torch.equal(far[0][name], value) for name, value in near[0].items())
