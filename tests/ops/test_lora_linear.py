"""lora_linear against fp64: values, every gradient, autocast, checkpoints, and the passes it is there to avoid."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fastft.capability import probe
from fastft.errors import KernelInputError, UnsupportedOptionError
from fastft.ops.lora_linear import lora_linear, reference, verdicts

K, N, RANK = 67, 53, 5
SCALING = 1.7  # no power of two: a rounding of the scaling would show
NAMES = ("x", "weight", "bias", "lora_A", "lora_B")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
fused = functools.partial(lora_linear, impl="fused")


def make(lead=(37,), dtype=torch.float32, device="cpu", in_features=K, out_features=N, rank=RANK):
    """Inputs of such sizes that the update is as large as the base's output."""
    tensors = {
        "x": torch.randn(*lead, in_features),
        "weight": torch.randn(out_features, in_features) / in_features**0.5,
        "bias": torch.randn(out_features),
        "lora_A": torch.randn(rank, in_features) / in_features**0.5,
        "lora_B": torch.randn(out_features, rank) / rank**0.5,
    }
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def run(function, tensors, dy, trainable=NAMES, scaling=SCALING):
    leaves = {
        name: None if tensor is None else tensor.detach().requires_grad_(name in trainable)
        for name, tensor in tensors.items()
    }
    y = function(*leaves.values(), scaling)
    y.backward(dy.to(y.dtype))
    gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf is not None and name in trainable}
    assert all(leaf is None or leaf.grad is None for name, leaf in leaves.items() if name not in trainable)
    return {"y": y.detach()} | gradients


def widened(tensors):
    return {name: None if tensor is None else tensor.double() for name, tensor in tensors.items()}


def measure(tensors, dy=None, trainable=NAMES, function=fused):
    out_features = tensors["weight"].shape[0]
    if dy is None:
        dy = torch.randn(*tensors["x"].shape[:-1], out_features, device=tensors["x"].device)
    eager = run(reference.lora_linear, tensors, dy, trainable)
    found = run(function, tensors, dy, trainable)
    oracle = run(reference.lora_linear, widened(tensors), dy.to(eager["y"].dtype).double(), trainable)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in eager.items()}
    return found, eager, oracle


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(37,), (1,), (3, 13), (2, 1, 7), ()], ids=str)
def test_values_and_gradients(device, dtype, lead, poisoned_empty):
    assert_within_budget(*measure(make(lead, dtype, device)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("in_features", "out_features", "rank"), [(64, 96, 8), (31, 129, 40)])
def test_odd_sizes(device, dtype, in_features, out_features, rank):
    assert_within_budget(*measure(make((41,), dtype, device, in_features, out_features, rank)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("in_features", "out_features", "rank"), [(1, 47, 40), (47, 1, 40), (47, 53, 1)])
def test_sizes_of_one(device, dtype, in_features, out_features, rank):
    """The relative error of a row of one number is luck, so each tensor is measured as a single row."""
    results = measure(make((41,), dtype, device, in_features, out_features, rank))
    assert_within_budget(*({name: value.flatten() for name, value in result.items()} for result in results))


def test_no_bias(device):
    assert_within_budget(*measure(make(device=device) | {"bias": None}))


@pytest.mark.parametrize("lead", [(0,), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tokens(device, lead, dtype):
    found, eager, _ = measure(make(lead, dtype, device))
    for name, value in eager.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs(device, dtype):
    """Sliced, transposed and expanded x; weights that are slices of larger ones."""
    tensors = make(dtype=dtype, device=device)
    tensors["weight"] = torch.cat([tensors["weight"]] * 2, dim=1)[:, K:]
    tensors["lora_A"] = tensors["lora_A"].t().contiguous().t()
    wide = torch.randn(4, 9, 2 * K, device=device).to(dtype)
    row = torch.randn(1, K, device=device).to(dtype)
    for x in (wide[..., :K], wide[..., ::2], wide[..., :K].transpose(0, 1), row.expand(33, K)):
        dy = 1 + 0.5 * torch.randn(*x.shape[:-1], N, device=device)  # equal rows of x would leave sums that cancel
        assert_within_budget(*measure(tensors | {"x": x}, dy))


def test_expanded_and_strided_dy(device):
    tensors = make((6, 7), torch.float32, device)
    tensors["lora_B"] = tensors["lora_B"].abs()  # equal rows of dy meet whole columns of B: no sum of those may cancel
    for dy in (
        torch.ones((), device=device).expand(6, 7, N),  # of y.sum()
        torch.rand(N, device=device).expand(6, 7, N),
        torch.rand(6, 7, 1, device=device).expand(6, 7, N),
        torch.randn(7, 6, N, device=device).transpose(0, 1),
        torch.randn(6, 7, 2 * N, device=device)[..., ::2],
    ):
        assert_within_budget(*measure(tensors, dy))


@pytest.mark.parametrize("trainable", [c for n in range(1, 6) for c in itertools.combinations(NAMES, n)], ids="-".join)
def test_frozen_combinations(trainable):
    assert_within_budget(*measure(make((3, 11)), trainable=trainable))


def test_writes_neither_inputs_nor_gradients(device):
    tensors = make((3, 11), device=device)
    dy = torch.randn(3, 11, N, device=device)
    before = {name: tensor.clone() for name, tensor in tensors.items()} | {"dy": dy.clone()}
    run(fused, tensors, dy)
    for name, tensor in (tensors | {"dy": dy}).items():
        assert torch.equal(tensor, before[name]), name


def test_output_may_be_written_in_place(device):
    for lead in ((7,), (2, 7)):
        tensors = {name: tensor.requires_grad_() for name, tensor in make(lead, device=device).items()}
        y = fused(*tensors.values(), SCALING)
        y.mul_(2.0)
        y.sum().backward()
        expected = torch.full((N,), 2.0 * y[..., 0].numel(), device=device)
        torch.testing.assert_close(tensors["bias"].grad, expected)


MUTANTS = {
    "no scaling": lambda x, w, b, A, B, s: fused(x, w, b, A, B, 1.0),
    "no update": lambda x, w, b, A, B, s: fused(x, w, b, A, B, 0.0),
    "scaling of A's gradient alone": lambda x, w, b, A, B, s: fused(x, w, b, A * s - (A * (s - 1)).detach(), B, s),
    "scaling of B's gradient alone": lambda x, w, b, A, B, s: fused(x, w, b, A, B * s - (B * (s - 1)).detach(), s),
    "x sees no adapter": lambda x, w, b, A, B, s: fused(x, w, b, A, B, 0.0) + fused(x.detach(), w * 0, None, A, B, s),
    "no bias": lambda x, w, b, A, B, s: fused(x, w, b * 0, A, B, s),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutants_are_caught(mutant, dtype):
    assert_mutant_caught(*measure(make(dtype=dtype), function=mutant))


def under_autocast(function, dtype):
    def call(*args):
        with torch.autocast(args[0].device.type, dtype):
            return function(*args)

    return call


@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_with_fp32_adapters(device, base_dtype):
    """As TRL trains: bf16 under autocast, the adapters fp32 masters with fp32 gradients."""
    tensors = make((2, 41), device=device)
    for name in ("x", "weight", "bias"):
        tensors[name] = tensors[name].to(base_dtype)
    dy = torch.randn(2, 41, N, device=device).bfloat16()
    eager = run(under_autocast(reference.lora_linear, torch.bfloat16), tensors, dy)
    found = run(under_autocast(fused, torch.bfloat16), tensors, dy)
    oracle = run(reference.lora_linear, widened(tensors), dy.double())
    assert found["y"].dtype == torch.bfloat16
    assert found["dlora_A"].dtype == found["dlora_B"].dtype == torch.float32
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in eager.items()}
    assert_within_budget(found, eager, oracle)
    mutant = run(under_autocast(MUTANTS["x sees no adapter"], torch.bfloat16), tensors, dy)
    assert_mutant_caught(mutant, eager, oracle)


def test_autocast_leaves_fp64_alone(device):
    tensors = make(dtype=torch.float64, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        found, _, oracle = measure(tensors)
    for name, value in oracle.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_autocast_around_backward_lowers_nothing(device):
    tensors = {name: tensor.requires_grad_() for name, tensor in make(device=device).items()}
    dy = torch.randn(37, N, device=device)
    expected = run(fused, tensors, dy)
    y = fused(*tensors.values(), SCALING)
    with torch.autocast(device.type, torch.bfloat16):
        y.backward(dy)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.grad, expected[f"d{name}"]), name


def passes(function, elements):
    """The elementwise ops, and the copies, over at least so many elements, forward and backward."""
    elementwise = {"aten::copy_", "aten::mul", "aten::mul_", "aten::add", "aten::add_", "aten::sum", "aten::fill_"}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        function()
    return [
        event.name
        for event in profile.events()
        if event.name in elementwise and event.input_shapes and math.prod(event.input_shapes[0]) >= elements
    ]


@pytest.mark.parametrize("biased", [False, True])
def test_passes_over_the_output(biased):
    """Nothing goes over [T, N] or [T, K] but GEMMs, as TRL trains; the formula of PEFT does."""
    tensors = make((2, 64), torch.bfloat16, in_features=96, out_features=80, rank=4)
    tensors |= {name: tensors[name].float() for name in ("lora_A", "lora_B")}
    leaves = {name: tensor.requires_grad_(name not in ("weight", "bias")) for name, tensor in tensors.items()}
    leaves = leaves if biased else leaves | {"bias": None}
    leaves["x"] = leaves["x"] * 1  # whose gradient autograd need not copy into a leaf
    dy = torch.randn(2, 64, 80).bfloat16()

    def step(function):
        y = under_autocast(function, torch.bfloat16)(*leaves.values(), SCALING)
        torch.autograd.grad(y, [leaves[name] for name in ("x", "lora_A", "lora_B")], dy)

    bias_of_cpu_addmm = ["aten::copy_"] if biased else []  # a GEMM's epilogue on a GPU
    assert passes(lambda: step(fused), 128 * 80) == bias_of_cpu_addmm
    assert {"aten::mul", "aten::add"} <= set(passes(lambda: step(reference.lora_linear), 128 * 80))


def test_saves_no_copy_of_x_and_no_parameter():
    tensors = {name: tensor.requires_grad_(name != "weight") for name, tensor in make((2, 64)).items()}
    saved = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor),
    ):
        fused(*tensors.values(), SCALING)
    x = tensors["x"].untyped_storage().data_ptr()
    fresh = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() != x]
    assert len(saved) == 2
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in fresh] == [((128, RANK), torch.bfloat16)]


def test_saves_nothing_it_does_not_need():
    saved = []
    tensors = make()
    tensors["lora_B"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        fused(*tensors.values(), SCALING)
    assert [tuple(tensor.shape) for tensor in saved] == [(37, RANK)]


@pytest.mark.parametrize("ops_to_save", [None, ["mm"], ["mm", "addmm"]], ids=str)
def test_checkpointing(device, ops_to_save):
    """Gradients are the same bits, or one rounding apart; selective checkpointing finds the GEMM it is told to keep."""
    aten = torch.ops.aten
    context = {}
    if ops_to_save:
        kept = [getattr(aten, name).default for name in ops_to_save]
        context["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)

    def block(*args):
        return fused(torch.sin(args[0]), *args[1:]).square()

    def checkpointed(*args):
        return checkpoint(block, *args, use_reentrant=False, **context)

    tensors, dy = make((2, 31), device=device), torch.randn(2, 31, N, device=device)
    for case in (tensors, tensors | {"bias": None}):
        expected, found = run(block, case, dy), run(checkpointed, case, dy)
        for name, value in expected.items():
            # Under the dispatch mode the scaling is a step of its own, one rounding apart.
            tolerance = 1e-4 if ops_to_save else 0.0
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


class Recorder(TorchDispatchMode):
    """The names of the ops that run below autograd."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_does_not_repeat_what_it_kept():
    kept = [torch.ops.aten.mm.default]
    context = functools.partial(create_selective_checkpoint_contexts, kept)
    tensors = {
        name: tensor.requires_grad_() for name, tensor in (make() | {"bias": None}).items() if tensor is not None
    }

    def block(x, weight, lora_A, lora_B):
        return fused(x, weight, None, lora_A, lora_B, SCALING).square()

    with Recorder() as forward:
        y = checkpoint(block, *tensors.values(), use_reentrant=False, context_fn=context)
    with Recorder() as backward:
        y.sum().backward()
    assert forward.ops.count("mm") == 2
    assert backward.ops.count("mm") == 5  # g, dx, dA, dB, dW


def test_the_reference_can_be_asked_for():
    tensors = make()
    y = lora_linear(*tensors.values(), SCALING, impl="reference")
    assert torch.equal(y, reference.lora_linear(*tensors.values(), SCALING))
    with pytest.raises(UnsupportedOptionError, match="choose one of"):
        lora_linear(*tensors.values(), SCALING, impl="triton")


def test_auto_is_fused():
    found = verdicts(probe("cpu"), torch.float32)
    assert list(found) == ["fused", "reference"] and all(found.values())
    tensors = make()
    y = lora_linear(tensors.pop("x").requires_grad_(), *tensors.values(), SCALING)
    assert "LoRALinear" in y.grad_fn.name()


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("x", torch.zeros(4, K + 1), "x has shape"),
        ("x", torch.zeros(()), "need the shapes"),
        ("lora_A", torch.zeros(RANK, K + 1), "lora_A has shape"),
        ("lora_B", torch.zeros(N, RANK + 1), "lora_B has shape"),
        ("bias", torch.zeros(N + 1), "bias has shape"),
        ("weight", torch.zeros(N), "need the shapes"),
        ("lora_A", torch.zeros(RANK, K, dtype=torch.bfloat16), "use autocast"),
        ("weight", torch.zeros(N, K, device="meta"), "weight on meta"),
        ("x", torch.zeros(4, K, dtype=torch.int64), "give it"),
    ],
)
def test_refuses_what_does_not_fit(name, replacement, message):
    with pytest.raises(KernelInputError, match=message):
        lora_linear(*(make() | {name: replacement}).values(), SCALING)
