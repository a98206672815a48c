"""lora_linear_group: several projections of one input as one node, and the copies of A and B it remembers."""

from __future__ import annotations

import copy
import functools
import gc
import itertools

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fastft.errors import KernelInputError
from fastft.ops import adapter_casts
from fastft.ops.adapter_casts import AdapterCasts
from fastft.ops.lora_linear import lora_linear_group, reference
from fastft.ops.rope import rope_qk, rope_qk_
from fastft.ops.rope.in_place import in_place_verdict

K = 67
SIZES = ((53, 5, 1.7), (41, 8, 0.6), (64, 3, 1.7))  # N, r and the scaling
NAMES = ("weights", "biases", "lora_As", "lora_Bs")
fused = functools.partial(lora_linear_group, impl="fused")


def make(count=3, lead=(37,), dtype=torch.float32, device="cpu", biased=True, sizes=SIZES):
    layers = [
        (
            torch.randn(n, K) / K**0.5,
            torch.randn(n) if biased else None,
            torch.randn(r, K) / K**0.5,
            torch.randn(n, r) / r**0.5,
        )
        for n, r, _ in sizes[:count]
    ]
    to = functools.partial(convert, dtype=dtype, device=device)
    x = to(torch.randn(*lead, K))
    return x, *(list(map(to, items)) for items in zip(*layers, strict=True)), [s for *_, s in sizes[:count]]


def convert(tensor, dtype, device):
    return None if tensor is None else tensor.to(device, dtype)


def by_reference(x, *parameters):
    return tuple(reference.lora_linear(x, *layer) for layer in zip(*parameters, strict=True))


def run(function, arguments, dys, trainable=("x", *NAMES)):
    """Outputs and gradients by name. A dy that is None is an output that nobody uses."""
    x, *parameters, scalings = arguments
    leaves = {"x": x.detach().requires_grad_("x" in trainable)}
    grouped = []
    for name, tensors in zip(NAMES, parameters, strict=True):
        group = [
            t if t is None else t.detach().requires_grad_(name in trainable or f"{name}{i}" in trainable)
            for i, t in enumerate(tensors)
        ]
        leaves |= {f"{name}{i}": t for i, t in enumerate(group) if t is not None}
        grouped.append(group)
    ys = function(leaves["x"], *grouped, scalings)
    used = [(y, dy.to(y.dtype)) for y, dy in zip(ys, dys, strict=True) if dy is not None and y.requires_grad]
    torch.autograd.backward([y for y, _ in used], [dy for _, dy in used])
    gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {f"y{i}": y.detach() for i, y in enumerate(ys)} | gradients


def gradients_for(arguments):
    x, weights = arguments[:2]
    return [torch.randn(*x.shape[:-1], w.shape[0], device=x.device).to(x.dtype) for w in weights]


def widened(arguments):
    x, *parameters, scalings = arguments
    return x.double(), *([None if t is None else t.double() for t in tensors] for tensors in parameters), scalings


def measure(arguments, dys=None, trainable=("x", *NAMES), function=fused):
    dys = gradients_for(arguments) if dys is None else dys
    oracle_dys = [None if dy is None else dy.double() for dy in dys]
    eager = run(by_reference, arguments, dys, trainable)
    found = run(function, arguments, dys, trainable)
    oracle = run(by_reference, widened(arguments), oracle_dys, trainable)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in eager.items()}
    return found, eager, oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lead", [(37,), (3, 13)], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_values_and_gradients(device, count, biased, lead, dtype, poisoned_empty):
    assert_within_budget(*measure(make(count, lead, dtype, device, biased)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_scaling_and_rank(device, dtype, poisoned_empty):
    assert_within_budget(*measure(make(dtype=dtype, device=device, sizes=((53, 8, 1.7), (41, 8, 1.7), (64, 8, 1.7)))))


@pytest.mark.parametrize("unused", [c for n in (1, 2) for c in itertools.combinations(range(3), n)], ids=str)
def test_unused_outputs(device, unused):
    arguments = make(lead=(3, 13), device=device)
    dys = [None if i in unused else dy for i, dy in enumerate(gradients_for(arguments))]
    found, eager, oracle = measure(arguments, dys)
    assert_within_budget(found, eager, oracle)
    for i in unused:
        assert not any(f"d{name}{i}" in found for name in NAMES)


@pytest.mark.parametrize(
    "trainable",
    [
        *([c for n in range(1, 5) for c in itertools.combinations(("x", *NAMES), n)]),
        ("lora_As1",),
        ("lora_Bs2",),
        ("x", "lora_As0", "lora_Bs1"),
        ("weights1", "biases2"),
    ],
    ids="-".join,
)
def test_frozen_combinations(trainable):
    assert_within_budget(*measure(make(lead=(3, 11)), trainable=trainable))


def swapped(x, weights, biases, As, Bs, scalings):
    return fused(x, weights, biases, As, Bs, [scalings[1], *scalings[1:]])


def without_second_A(x, weights, biases, As, Bs, scalings):
    return fused(x, weights, biases, [As[0], As[1].detach() + 0 * As[1], As[2]], Bs, scalings)


@pytest.mark.parametrize("mutant", [swapped, without_second_A])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mutants_are_caught(mutant, dtype):
    assert_mutant_caught(*measure(make(dtype=dtype), function=mutant))


def test_writes_neither_inputs_nor_gradients(device):
    arguments = make(lead=(3, 11), device=device)
    dys = gradients_for(arguments)
    tensors = [arguments[0], *itertools.chain(*arguments[1:5]), *dys]
    before = [tensor.clone() for tensor in tensors]
    run(fused, arguments, dys)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_gradients_of_A_are_no_views():
    found = run(fused, make(), gradients_for(make()))
    assert not any(found[f"dlora_As{i}"]._is_view() for i in range(3))


def trained(arguments):
    """fp32 adapters on a frozen bf16 base, as TRL trains."""
    x, weights, biases, As, Bs, scalings = arguments
    weights, biases = ([None if t is None else t.bfloat16() for t in ts] for ts in (weights, biases))
    As, Bs = ([torch.nn.Parameter(t) for t in ts] for ts in (As, Bs))
    return x.bfloat16().requires_grad_(), weights, biases, As, Bs, scalings


def test_autocast_with_fp32_adapters(device):
    arguments = trained(make(lead=(2, 41), device=device))
    dys = [dy.bfloat16() for dy in gradients_for(arguments)]

    def call(function, *args):
        with torch.autocast(device.type, torch.bfloat16):
            return function(*args)

    trainable = ("x", "lora_As", "lora_Bs")
    found = run(functools.partial(call, functools.partial(fused, casts=AdapterCasts())), arguments, dys, trainable)
    eager = run(functools.partial(call, by_reference), arguments, dys, trainable)
    oracle = run(by_reference, widened(arguments), [dy.double() for dy in dys], trainable)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in eager.items()}
    assert_within_budget(found, eager, oracle)


def test_outputs_may_be_rotated_in_place(device):
    """As RoPE does to q and k, which share a node with v."""
    sizes = ((4 * 8, 5, 1.7), (2 * 8, 5, 1.7), (2 * 8, 5, 1.7))
    arguments = make(lead=(2, 7), device=device, sizes=sizes)
    dys = gradients_for(arguments)
    angles = torch.randn(7, 4, device=device)

    def rotated(rotate, x, *parameters):
        q, k, v = fused(x, *parameters)
        assert q.grad_fn.name() == "_LoRALinearBackward"
        if rotate is rope_qk_:
            assert in_place_verdict(q) and in_place_verdict(k) and in_place_verdict(v)
        q, k = rotate(q, k, angles.cos(), angles.sin(), head_dim=8)
        return q, k, v

    expected = run(functools.partial(rotated, rope_qk), arguments, dys)
    found = run(functools.partial(rotated, rope_qk_), arguments, dys)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def count_casts(monkeypatch):
    calls = []
    original = adapter_casts.cast
    monkeypatch.setattr(adapter_casts, "cast", lambda *args: calls.append(1) or original(*args))
    return calls


def autocast_loss(store, arguments, checkpointed):
    def block(x):
        with torch.autocast("cpu", torch.bfloat16):
            return sum(y.float().square().sum() for y in fused(torch.sin(x), *arguments[1:], casts=store))

    return checkpoint(block, arguments[0], use_reentrant=False) if checkpointed else block(arguments[0])


def test_recomputation_uses_the_copies_of_its_forward(monkeypatch):
    calls, store, arguments = count_casts(monkeypatch), AdapterCasts(), trained(make())
    expected = torch.autograd.grad(autocast_loss(None, arguments, False), [arguments[0], *arguments[3]])
    for repetition in (1, 2):
        loss = autocast_loss(store, arguments, True)
        assert len(calls) == repetition
        found = torch.autograd.grad(loss, [arguments[0], *arguments[3]])
        assert len(calls) == repetition
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    both = [autocast_loss(store, arguments, True) for _ in range(2)]
    sum(both).backward()
    assert len(calls) == 4


def test_what_changed_is_copied_anew(monkeypatch):
    """Even in a recomputation, if the change can be seen; and in every forward, since some cannot."""
    calls, store, arguments = count_casts(monkeypatch), AdapterCasts(), trained(make())
    with torch.no_grad():
        for change in (lambda A: A.data.add_(1), lambda A: A.add_(1), lambda A: None):
            change(arguments[3][1])
            found = autocast_loss(store, arguments, False)
            assert torch.equal(found, autocast_loss(None, arguments, False))
    assert len(calls) == 3
    loss = autocast_loss(store, arguments, True)
    with torch.no_grad():
        arguments[4][2].add_(1)
    loss.backward()
    assert len(calls) == 5


def test_copies_are_not_kept_longer_than_their_adapters():
    store, arguments = AdapterCasts(), trained(make())
    autocast_loss(store, arguments, False).backward()
    assert len(store) == 1 and len(copy.deepcopy(store)) == 0
    del arguments
    gc.collect()
    assert len(store) == 0


def test_copies_of_inference_mode_are_not_kept():
    store, arguments = AdapterCasts(), trained(make())
    loss = autocast_loss(store, arguments, True)
    with torch.inference_mode():
        autocast_loss(store, arguments, False)
    assert len(store) == 0
    loss.backward()
    with torch.inference_mode():
        inside = trained(make())
    with torch.no_grad():
        autocast_loss(store, inside, False)
        autocast_loss(store, inside, False)


def test_one_layer_of_the_compute_dtype_is_not_copied():
    (_, _, _, As, Bs, _), store = make(1, dtype=torch.bfloat16), AdapterCasts()
    A, (B,) = store.get(As, Bs, torch.bfloat16)
    assert A is As[0] and B is Bs[0] and len(store) == 0


@pytest.mark.parametrize("ops_to_save", [None, ["mm"], ["mm", "addmm"]], ids=str)
def test_checkpointing(device, ops_to_save):
    context = {}
    if ops_to_save:
        kept = [getattr(torch.ops.aten, name).default for name in ops_to_save]
        context["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
    store, arguments = AdapterCasts(), make(lead=(2, 31), device=device)
    dys = gradients_for(arguments)

    def block(x, *parameters):
        return tuple(y.square() for y in fused(torch.sin(x), *parameters, casts=store))

    def checkpointed(*args):
        return checkpoint(block, *args, use_reentrant=False, **context)

    expected, found = run(block, arguments, dys), run(checkpointed, arguments, dys)
    for name, value in expected.items():
        tolerance = 1e-4 if ops_to_save else 0.0
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_leaves_no_copies():
    store, arguments = AdapterCasts(), trained(make())
    autocast_loss(store, arguments, False)
    with Passing():
        autocast_loss(store, arguments, False)
    assert len(store) == 0


GEMMS = frozenset(("aten::mm", "aten::addmm", "aten::addmm_"))
PASSES = frozenset(("aten::copy_", "aten::_foreach_copy_", "aten::cat", "aten::mul", "aten::add", "aten::add_"))


def launches(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    names = GEMMS | PASSES
    outer = [e for e in profile.events() if e.name in names and not (e.cpu_parent and e.cpu_parent.name in names)]
    return sum(e.name in GEMMS for e in outer), sum(e.name in PASSES for e in outer)


def test_launches_of_a_group():
    """q, k and v as TRL trains: GEMMs, and one copy of all adapters."""
    arguments = trained(make(lead=(2, 64), biased=False, sizes=((80, 8, 2.0), (40, 8, 2.0), (40, 8, 2.0))))
    x = arguments[0] * 1
    dys = [dy.bfloat16() for dy in gradients_for(arguments)]
    ys = []

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            ys.extend(fused(x, *arguments[1:], casts=AdapterCasts()))

    assert launches(forward) == (7, 1)  # t; y_i and its update
    leaves = [x, *arguments[3], *arguments[4]]
    gemms, passes = launches(lambda: torch.autograd.grad(ys, leaves, dys))
    # g_i, dx in four, dA, dB_i. Without out_dtype, which only CUDA has, dA and dB_i are cast.
    assert (gemms, passes) == (11, 4)


@pytest.mark.parametrize("broken", ["empty", "lengths", "shape"])
def test_refuses_what_does_not_fit(broken):
    x, weights, biases, As, Bs, scalings = make()
    if broken == "empty":
        weights, biases, As, Bs, scalings = [], [], [], [], []
    elif broken == "lengths":
        biases = biases[:2]
    else:
        As[1] = torch.zeros(8, K + 1)
    with pytest.raises(KernelInputError, match="lora_A has shape" if broken == "shape" else "as many of each"):
        lora_linear_group(x, weights, biases, As, Bs, scalings)
