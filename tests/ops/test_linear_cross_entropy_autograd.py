"""What the loss computes and keeps, for whom, and what it does with odd batches, broken numbers and wrong arguments."""

from __future__ import annotations

import pytest
import torch
from interpreter import run_kernels_as_a_gpu_would
from linear_cross_entropy_cases import (
    IMPLEMENTATIONS,
    MEMORY,
    SIZE,
    TOKENS,
    TRAINED,
    VOCAB,
    eager,
    gradients,
    make,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fastft.capability import probe
from fastft.errors import KernelInputError, UnsupportedOptionError
from fastft.ops.linear_cross_entropy import linear_cross_entropy, token_log_probs, verdicts
from fastft.ops.linear_cross_entropy.chunks import Head, Way, chunk_rows, walk
from fastft.ops.linear_cross_entropy.rows import RowOptions
from fastft.ops.linear_cross_entropy.run import rows_for

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::linear", "aten::matmul")
ALL = [*IMPLEMENTATIONS, "reference"]


@pytest.fixture(autouse=True)
def kernels_can_run(request, monkeypatch, poisoned_empty):
    run_kernels_as_a_gpu_would(request, monkeypatch)


class Watched(TorchDispatchMode):
    """Counts products of matrices, and remembers the most numbers that a tensor with logits had."""

    def __init__(self):
        super().__init__()
        self.products, self.most_logits = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._schema.name in PRODUCTS:
            self.products.append(tuple(result.shape))
        # W^T has as many columns, and the rows of H.
        if isinstance(result, torch.Tensor) and result.ndim == 2 and SIZE != result.shape[0] < VOCAB <= result.shape[1]:
            self.most_logits = max(self.most_logits, result.numel())
        return result


LOGITS, DHIDDEN, DWEIGHT = (16, VOCAB), (16, SIZE), (VOCAB, SIZE)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("trained", "reduction", "forward", "backward"),
    [
        ((), "mean", [LOGITS], []),
        (("hidden",), "mean", [LOGITS, DHIDDEN], []),
        (("hidden",), "none", [LOGITS, DHIDDEN], []),
        (("weight",), "sum", [LOGITS, DWEIGHT], []),
        (("hidden", "weight"), "mean", [LOGITS, DHIDDEN, DWEIGHT], []),
        (("hidden", "weight"), "none", [LOGITS], [LOGITS, DHIDDEN, DWEIGHT]),
        (("weight",), "none", [LOGITS], [LOGITS, DWEIGHT]),
    ],
    ids=str,
)
def test_what_is_multiplied_when(device, trained, reduction, forward, backward, impl):
    """Of 32 tokens in two chunks: the second product of a kind is as large as the first."""
    tensors, targets = make(device=device, lead=(32,), ignored=0)
    hidden, weight, _ = (each.requires_grad_(name in trained) for name, each in tensors.items())
    with Watched() as watched:
        loss = linear_cross_entropy(
            hidden, weight, targets, reduction=reduction, impl=impl, max_logits_bytes=MEMORY[impl]
        )  # fmt: skip
    assert sorted(watched.products) == sorted(2 * forward)
    assert watched.most_logits <= 16 * 128
    if trained:
        with Watched() as watched:
            loss.sum().backward()
        assert sorted(watched.products) == sorted(2 * backward)
        assert watched.most_logits <= 16 * 128


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_without_gradients_none_are_made(device, impl):
    tensors, targets = make(device=device, lead=(32,), ignored=0)
    hidden, weight, _ = (each.requires_grad_() for each in tensors.values())
    for mode in (torch.no_grad, torch.inference_mode):
        for reduction in ("mean", "none"):
            with mode(), Watched() as watched:
                loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, impl=impl)
            assert watched.products == [(32, VOCAB)] and not loss.requires_grad
    with_gradient = linear_cross_entropy(hidden, weight, targets, reduction="none", impl=impl)
    assert torch.equal(with_gradient, loss)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_tokens_without_targets_are_dropped_before_the_products(device, impl):
    tensors, targets = make(device=device, lead=(96,), ignored=0)
    targets[5:90] = -100
    with Watched() as watched:
        linear_cross_entropy(*list(tensors.values())[:2], targets, impl=impl, num_valid=11)
    assert watched.products == [(11, VOCAB)]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_is_saved(device, reduction, impl):
    """Nothing as large as logits; a trained head's own gradient where the loss is one number; and hooks may move it."""
    tensors, targets = make(device=device)
    args = (tensors, targets, TRAINED, torch.rand(targets.shape if reduction == "none" else (), device=device))
    plain = gradients(linear_cross_entropy, *args, reduction=reduction, impl=impl)
    saved = []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hooked = gradients(linear_cross_entropy, *args, reduction=reduction, impl=impl)
    # A GPU is not asked how many there are.
    valid = int((targets != -100).sum()) if device.type == "cpu" else TOKENS
    large = [(TOKENS, SIZE)] if reduction == "none" else [(valid, SIZE), (VOCAB, SIZE)]
    assert sorted(shape for shape in saved if len(shape) > 1) == sorted(large)
    assert all(torch.equal(hooked[name], value) for name, value in plain.items())


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_used_twice_and_a_second_backward(device, reduction, impl):
    tensors, targets = make(device=device)
    leaves = [each.requires_grad_() for each in tensors.values()]
    hidden, weight, bias = leaves

    def losses(function, **options):
        return function(hidden, weight, targets, bias=bias, reduction=reduction, **options)

    weights = torch.rand(targets.shape, device=device) if reduction == "none" else torch.tensor(0.3, device=device)
    loss, expected = losses(linear_cross_entropy, impl=impl), losses(eager)
    for _ in range(2):
        found = torch.autograd.grad((0.37 * loss + weights * loss).sum(), leaves, retain_graph=True)
        stock = torch.autograd.grad((0.37 * expected + weights * expected).sum(), leaves, retain_graph=True)
        for value, other in zip(found, stock, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inputs_and_incoming_gradients_are_left_alone(device, reduction, impl):
    tensors, targets = make(device=device)
    leaves = {name: each.clone().requires_grad_() for name, each in tensors.items()}
    hidden, weight, bias = leaves.values()
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction, impl=impl)
    copies, upstream = (targets.clone(), loss.detach().clone()), torch.rand(loss.shape, device=device)
    before = upstream.clone()
    loss.backward(upstream)
    assert torch.equal(upstream, before) and torch.equal(targets, copies[0]) and torch.equal(loss, copies[1])
    assert all(torch.equal(leaves[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_write_between_forward_and_backward(device, impl):
    """Is an error where backward reads what was written, and nothing to it otherwise."""
    for reduction in ("none", "mean"):
        tensors, targets = make(device=device)
        hidden, weight, _ = (each.requires_grad_() for each in tensors.values())
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, impl=impl)
        with torch.no_grad():
            weight.mul_(2)
        if reduction == "none":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.sum().backward()
        else:
            loss.backward()


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("trained", [TRAINED, ("hidden",)], ids="+".join)
def test_no_target_at_all(device, trained, impl):
    """As torch has it: the mean of nothing is NaN, other losses are 0; gradients are zeros, and not None."""
    tensors, targets = make(device=device, ignored=1.1)
    none = torch.rand(targets.shape, device=device)
    cases = [({}, None), ({"reduction": "sum"}, 0.0), ({"num_items_in_batch": 9}, 0.0), ({"reduction": "none"}, 0.0)]
    for options, expected in cases:
        upstream = none if options.get("reduction") == "none" else none[0]
        found = gradients(linear_cross_entropy, tensors, targets, trained, upstream, impl=impl, **options)
        loss = found.pop("loss")
        assert loss.isnan().all() if expected is None else (loss == expected).all()
        assert expected is None or not any(value.any() for value in found.values())
        if impl != "reference":
            assert not any(value.any() for value in found.values())


@pytest.mark.parametrize("impl", ALL)
def test_one_target_and_no_token(device, impl):
    tensors, targets = make(device=device, ignored=1.1)
    targets[17] = 5
    one = torch.ones((), device=device)
    found = gradients(linear_cross_entropy, tensors, targets, TRAINED, one, impl=impl)
    for name, value in gradients(eager, tensors, targets, TRAINED, one).items():
        torch.testing.assert_close(found[name], value)
    tensors, targets = make(device=device, lead=(0, 3))
    found = gradients(linear_cross_entropy, tensors, targets, TRAINED, one, impl=impl, reduction="sum")
    assert found["loss"] == 0 and found["hidden"].shape == (0, 3, SIZE) and not found["weight"].any()
    assert token_log_probs(tensors["hidden"], tensors["weight"], targets, impl=impl).shape == (0, 3)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("number", [7, 7.0, torch.tensor(7), torch.tensor([7.0])], ids=repr)
def test_num_items_in_batch_may_be_any_number(device, number, impl):
    tensors, targets = make(device=device)
    hidden, weight, _ = tensors.values()
    total = linear_cross_entropy(hidden, weight, targets, reduction="sum", impl=impl)
    for reduction in ("mean", "sum"):
        loss = linear_cross_entropy(
            hidden, weight, targets, num_items_in_batch=number, reduction=reduction, impl=impl
        )  # fmt: skip
        torch.testing.assert_close(loss, total / 7)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_broken_numbers_are_not_hidden(device, number, impl):
    tensors, targets = make(device=device, ignored=0)
    tensors["hidden"][3, 2] = number
    upstream = torch.ones(targets.shape, device=device)
    found = gradients(linear_cross_entropy, tensors, targets, ("hidden",), upstream, reduction="none", impl=impl)
    for value in (found["loss"], found["hidden"]):
        broken = value.reshape(TOKENS, -1).isnan().all(-1)
        assert broken[3] and broken.sum() == 1
    assert linear_cross_entropy(tensors["hidden"], tensors["weight"], targets, impl=impl).isnan()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_is_told_of_ignored_tokens_does_not_matter(device, impl):
    """A loss of theirs is nothing even where its upstream gradient is infinite, or they are NaN themselves."""
    tensors, targets = make(device=device)
    ignored = targets == -100
    upstream = torch.ones(targets.shape, device=device)
    args = (linear_cross_entropy, tensors, targets, ("hidden", "weight"))
    expected = gradients(*args, upstream, reduction="none", impl=impl)
    tensors["hidden"][ignored] = float("nan")
    found = gradients(*args, upstream.masked_fill(ignored, float("inf")), reduction="none", impl=impl)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rows_that_are_walked_over_without_a_target_do_not_matter(device, impl):
    """As on a GPU that nobody told how many there are."""
    tensors, targets = make(device=device)
    hidden, weight, _ = tensors.values()
    hidden, targets = hidden.reshape(-1, SIZE).clone(), targets.reshape(-1)
    way = Way(rows_for(device, torch.float32, impl).kernel, RowOptions(), torch.float32, 2**12)
    expected = walk(Head(hidden, weight, None, targets, None), way, (True, True, False))
    hidden[targets == -100] = float("nan")
    found = walk(Head(hidden, weight, None, targets, None), way, (True, True, False))
    assert torch.equal(found[0].losses, expected[0].losses)
    assert all(torch.equal(a, b) for a, b in zip(found[1][:2], expected[1][:2], strict=True))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_target_out_of_range_is_an_error_or_nan(device, impl):
    tensors, targets = make(device=device, ignored=0)
    hidden, weight, _ = tensors.values()
    for wrong in (VOCAB, -1):
        targets[4] = wrong
        with pytest.raises(KernelInputError, match=f"weight has {VOCAB} rows"):
            linear_cross_entropy(hidden, weight, targets, impl=impl, check_targets=True)
        if device.type == "cpu":
            with pytest.raises(KernelInputError, match="targets from"):
                linear_cross_entropy(hidden, weight, targets, impl=impl)
        rows = _rows_of(impl, hidden @ weight.t(), targets)
        for value in rows:
            broken = value.reshape(TOKENS, -1).isnan().all(-1)
            assert broken[4] and broken.sum() == 1


def _rows_of(impl, logits, targets):
    from fastft.ops.linear_cross_entropy.chunks import _outputs
    from fastft.ops.linear_cross_entropy.rows import RowOptions
    from fastft.ops.linear_cross_entropy.run import rows_for

    outputs = _outputs(len(targets), logits.dtype, logits.device, False)
    kernel = rows_for(logits.device, logits.dtype, impl).kernel
    kernel(logits, logits.shape[1], targets, RowOptions(), outputs, with_gradient=True)
    return outputs.losses, logits


def test_what_the_host_knows_of_the_number_of_targets(device):
    tensors, targets = make(device=device, ignored=0)
    hidden, weight, _ = tensors.values()
    targets[::2] = -100
    expected = linear_cross_entropy(hidden, weight, targets, impl="triton")
    for known in (TOKENS // 2, TOKENS - 3, TOKENS, 10 * TOKENS):
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, num_valid=known), expected)
    if device.type == "cpu":
        with pytest.raises(KernelInputError, match="after they are shifted"):
            linear_cross_entropy(hidden, weight, targets, num_valid=3)
    else:
        assert linear_cross_entropy(hidden, weight, targets, num_valid=3).isnan()


def test_no_second_derivative(device):
    tensors, targets = make(device=device)
    hidden, weight, _ = (each.requires_grad_() for each in tensors.values())
    for loss in (linear_cross_entropy(hidden, weight, targets), token_log_probs(hidden, weight, targets).sum()):
        with pytest.raises(UnsupportedOptionError, match="loss=False"):
            torch.autograd.grad(loss, hidden, create_graph=True)


def test_compiled_it_is_plain_torch(device):
    tensors, targets = make(device=device)
    hidden, weight, bias = tensors.values()

    def loss(hidden, weight, bias, targets):
        return linear_cross_entropy(hidden, weight, targets, bias=bias, softcap=5.0)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden, weight, bias, targets), loss(hidden, weight, bias, targets))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"targets": torch.zeros(TOKENS + 1, dtype=torch.int64)}, KernelInputError, r"\[..., H\] and \[...\]"),
        ({"targets": torch.zeros(TOKENS)}, KernelInputError, "give them int64"),
        ({"weight": torch.zeros(VOCAB, SIZE + 1)}, KernelInputError, r"needs \[V, 37\]"),
        ({"weight": torch.zeros(0, SIZE)}, KernelInputError, "weight has shape"),
        ({"weight": torch.zeros(VOCAB, SIZE, dtype=torch.float16)}, KernelInputError, "use autocast"),
        ({"weight": torch.zeros(VOCAB, SIZE, device="meta")}, KernelInputError, "weight on meta"),
        ({"hidden": torch.zeros(TOKENS, SIZE, dtype=torch.int32)}, KernelInputError, "give it fp16"),
        ({"bias": torch.zeros(VOCAB + 1)}, KernelInputError, "bias has shape"),
        ({"num_items_in_batch": torch.ones(2)}, KernelInputError, "one number"),
        ({"num_items_in_batch": 3, "reduction": "none"}, UnsupportedOptionError, "divides a sum"),
        ({"reduction": "average"}, UnsupportedOptionError, "none, sum, mean"),
        ({"softcap": -1.0}, UnsupportedOptionError, "softcap=-1.0"),
        ({"label_smoothing": 1.5}, UnsupportedOptionError, "from 0 to 1"),
        ({"z_loss": -1.0}, UnsupportedOptionError, "z_loss"),
        ({"num_valid": -1}, UnsupportedOptionError, "num_valid=-1"),
        ({"max_logits_bytes": 0}, UnsupportedOptionError, "max_logits_bytes=0"),
        ({"impl": "cutlass"}, UnsupportedOptionError, "'chunked'"),
    ],
)
def test_what_does_not_fit_is_refused(changes, error, words):
    tensors, targets = make()
    with pytest.raises(error, match=words):
        linear_cross_entropy(**{**tensors, "targets": targets, **changes})


def test_other_refusals():
    tensors, targets = make(torch.float64)
    with pytest.raises(UnsupportedOptionError, match="precision of fp64"):
        linear_cross_entropy(tensors["hidden"], tensors["weight"], targets, impl="triton")
    with pytest.raises(UnsupportedOptionError, match="temperature=0"):
        token_log_probs(tensors["hidden"], tensors["weight"], targets, temperature=0)


def test_which_implementation_comes_first():
    assert list(verdicts(probe(torch.device("cpu")), torch.float32)) == ["chunked", "reference", "triton"]


def test_chunks_are_few_equal_and_within_their_memory():
    for num_rows, vocab_size, budget in ((8192, 151936, 2**30), (5000, 32001, 2**26), (300, 262144, 2**22), (7, 50, 1)):
        rows = chunk_rows(num_rows, vocab_size, budget)
        assert rows >= 1 and (rows * vocab_size <= budget or rows == 1)
        assert rows % 128 == 0 or rows < 128
        chunks, fewest = -(-num_rows // rows), -(-num_rows * vocab_size // budget)
        assert chunks == num_rows or chunks <= 1.5 * fewest + 1
    assert chunk_rows(8192, 151936, 2**30) == 4096  # 5 GB in bf16 would be one chunk, 2 GiB are two
