"""Losses of a head and every gradient against fp64: dtypes, sizes, options, reductions, and what a token is told."""

from __future__ import annotations

import pytest
import torch
from budget import assert_mutant_caught, assert_within_budget
from interpreter import run_kernels_as_a_gpu_would
from linear_cross_entropy_cases import (
    DTYPES,
    IMPLEMENTATIONS,
    MEMORY,
    SMALL,
    TRAINED,
    VOCAB,
    eager,
    gradients,
    logits_of,
    make,
    measure,
)

from fastft.ops.linear_cross_entropy import linear_cross_entropy, token_log_probs


@pytest.fixture(autouse=True)
def kernels_can_run(request, monkeypatch, poisoned_empty):
    run_kernels_as_a_gpu_would(request, monkeypatch)


def with_error(results, name, factor):
    return {**results, name: results[name] * factor}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0], ids=str)
@pytest.mark.parametrize("trained", [TRAINED, ("hidden",)], ids="+".join)
def test_losses_of_tokens_and_their_gradients(device, dtype, softcap, trained, impl):
    """Each token has an upstream gradient of its own; with a cap the logits lie far beyond it."""
    tensors, targets = make(dtype, device, spread=60.0 if softcap else 3.0)
    found, stock, oracle = measure(tensors, targets, impl, trained, reduction="none", softcap=softcap)
    assert_within_budget(found, stock, oracle)
    for name in ("loss", *trained):
        assert_mutant_caught(with_error(found, name, 1.05), stock, oracle)
    upstream = torch.ones((), device=device).expand(targets.shape)
    unweighted = measure(tensors, targets, impl, trained, upstream, reduction="none", softcap=softcap)[0]
    for name in trained:
        assert_mutant_caught({**found, name: unweighted[name]}, stock, oracle)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"num_items_in_batch": 53}], ids=str)
@pytest.mark.parametrize("chunks", ["one", "many"])
def test_reductions(device, dtype, options, chunks, impl):
    tensors, targets = make(dtype, device)
    upstream = torch.tensor(0.37, device=device)
    budget = 2**20 if chunks == "one" else None
    found, stock, oracle = measure(tensors, targets, impl, upstream=upstream, max_logits_bytes=budget, **options)
    assert_within_budget(found, stock, oracle)
    assert_mutant_caught(with_error(found, "weight", 1 / 0.37), stock, oracle)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"label_smoothing": 1.0, "z_loss": 0.02},
        {"z_loss": 0.01},
        {"logit_scale": 0.0625, "softcap": 0.5},
        {"logit_scale": -1.5},
        {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 2.0, "logit_scale": 1.3},
    ],
    ids=str,
)
def test_options(device, options, reduction, impl):
    tensors, targets = make(device=device)
    found, stock, oracle = measure(tensors, targets, impl, reduction=reduction, **options)
    assert_within_budget(found, stock, oracle)
    plain = measure(tensors, targets, impl, reduction=reduction)[0]
    assert_mutant_caught({**found, "hidden": plain["hidden"]}, stock, oracle)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("vocab", "size"), [(1, 5), (2, 1), (3, 7), (64, 64), (8195, 3)], ids=str)
def test_sizes(device, vocab, size, impl):
    """A row of one block, of part of one, and of one and a little."""
    tensors, targets = make(device=device, lead=(19,), vocab=vocab, size=size)
    draws = [measure(tensors, targets, impl, reduction="none", max_logits_bytes=2**19)]
    for _ in range(4 if vocab < VOCAB else 0):  # few numbers a tensor: measured as one row of those of several draws
        draws.append(measure(*make(device=device, lead=(19,), vocab=vocab, size=size), impl, reduction="none"))
    assert_within_budget(
        *(
            {name: torch.cat([each[name].flatten() for each in results]) for name in results[0]}
            for results in zip(*draws, strict=True)
        )
    )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_every_token_counts_for_another_ignore_index(device, impl):
    tensors, targets = make(device=device, ignored=0)
    targets[::4] = 7
    for reduction in ("mean", "none"):
        found, stock, oracle = measure(tensors, targets, impl, reduction=reduction, ignore_index=7)
        assert_within_budget(found, stock, oracle)
        assert not found["hidden"][::4].any()
        assert_mutant_caught(measure(tensors, targets, impl, reduction=reduction)[0], stock, oracle)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_and_expanded_inputs(device, dtype, impl):
    tensors, _ = make(dtype, device)
    weight = tensors["weight"]
    wide = torch.randn(4, 9, 2 * weight.shape[1], device=device).to(dtype)
    hiddens = [
        wide[..., ::2], wide[:, :-1, : weight.shape[1]], wide[..., : weight.shape[1]].transpose(0, 1),
        torch.randn(16, 1, weight.shape[1], device=device).to(dtype).expand(16, 3, -1),
    ]  # fmt: skip
    for hidden in hiddens:
        targets = torch.randint(0, VOCAB, hidden.shape[1:-1], device=device).expand(hidden.shape[:-1])
        case = tensors | {"hidden": hidden, "weight": weight.t().contiguous().t()}
        results = measure(case, targets, impl, reduction="none")
        assert_within_budget(*({**result, "loss": result["loss"].flatten()} for result in results))
        assert_within_budget(*measure(case, targets, impl))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_chunks_change_nothing(device, impl):
    tensors, targets = make(device=device)
    upstream = torch.randn(targets.shape, device=device)
    for options in ({"reduction": "none"}, {"reduction": "none", "trained": ("hidden",)}, {"upstream": torch.ones(())}):
        options = {"upstream": upstream} | options
        one = measure(tensors, targets, impl, max_logits_bytes=2**24, **options)[0]
        for budget in (1, SMALL):
            many = measure(tensors, targets, impl, max_logits_bytes=budget, **options)[0]
            for name, value in one.items():
                torch.testing.assert_close(many[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_their_neighbours(device, dtype):
    """Bit for bit, and whatever the padding holds."""
    from fastft.ops.linear_cross_entropy.chunks import _outputs
    from fastft.ops.linear_cross_entropy.rows import RowOptions
    from fastft.ops.linear_cross_entropy.triton import cross_entropy_rows_

    logits, targets = 5 * torch.randn(12, 128, device=device).to(dtype), torch.arange(12, device=device) * 8
    targets[3] = -100
    logits[:, VOCAB:] = float("nan")

    def run(rows):
        buffer, outputs = logits[rows].clone(), _outputs(len(logits[rows]), dtype, device, True)
        cross_entropy_rows_(
            buffer, VOCAB, targets[rows], RowOptions(softcap=4.0), outputs, with_gradient=True
        )  # fmt: skip
        return buffer[:, :VOCAB], outputs.losses, *outputs.statistics

    whole = run(slice(None))
    assert all(each.isfinite().all() for each in whole)
    for rows in (slice(0, 5), slice(5, 12)):
        assert all(torch.equal(part, all_rows[rows]) for part, all_rows in zip(run(rows), whole, strict=True))


@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "reference"])
@pytest.mark.parametrize("vocab", [VOCAB, 8195])
def test_what_a_token_is_told(device, vocab, impl):
    tensors, targets = make(device=device, lead=(3, 7), vocab=vocab, size=5, spread=8.0)
    hidden, weight, bias = tensors.values()
    bias[1] = float("-inf")  # a forbidden token has no part in anything
    targets[0, :2] = torch.tensor([0, -100])
    scaling = {"softcap": 20.0, "logit_scale": 0.7} if vocab == VOCAB else {}
    loss, told = linear_cross_entropy(
        hidden, weight, targets, bias=bias, return_statistics=True, reduction="none", impl=impl, **scaling
    )  # fmt: skip
    logits = logits_of(torch.nn.functional.linear(hidden.double(), weight.double(), bias.double()), **scaling)
    log_p, valid = logits.log_softmax(-1), targets != -100
    expected = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0)).sum(-1)
    assert all(each.shape == (3, 7) and not each.requires_grad for each in told)
    torch.testing.assert_close(told.log_probs.double(), expected * valid, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(told.entropy.double(), entropy * valid, rtol=2e-5, atol=2e-5)
    assert torch.equal(told.argmax, logits.argmax(-1).masked_fill(~valid, -1))
    assert torch.equal(-loss[valid], told.log_probs[valid])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_first_of_the_largest_logits(device, impl):
    hidden, weight = torch.ones(1, 1, device=device), torch.zeros(9001, 1, device=device)
    weight[[8500, 300, 8900]] = 2
    targets = torch.zeros(1, dtype=torch.int64, device=device)
    told = token_log_probs(hidden, weight, targets, return_statistics=True, impl=impl)[1]
    assert told.argmax.item() == 300


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("trained", [("hidden", "weight"), ("hidden",)], ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities(device, dtype, trained, impl):
    tensors, targets = make(dtype, device, lead=(3, 11))
    del tensors["bias"]
    options = {"temperature": 0.7, "logit_scale": 0.5, "softcap": 4.0}
    upstream = torch.randn(targets.shape, device=device)

    def eager_log_probs(*args, **kwargs):
        return -eager(*args, reduction="none", **kwargs)

    wide = {name: value.double() for name, value in tensors.items()}
    results = [
        gradients(
            token_log_probs, tensors, targets, trained, upstream, impl=impl, max_logits_bytes=MEMORY[impl], **options
        ),
        gradients(eager_log_probs, tensors, targets, trained, upstream, **options),
        gradients(eager_log_probs, wide, targets, trained, upstream.double(), **options),
    ]
    assert_within_budget(*results)
    assert_mutant_caught(with_error(results[0], "hidden", -1), *results[1:])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_tied_embeddings(device, impl):
    tensors, targets = make(device=device)
    tokens = torch.randint(0, VOCAB, targets.shape, device=device)
    weight = tensors["weight"]

    def tied(function, weight, **options):
        weight = weight.detach().requires_grad_()
        function(torch.tanh(weight[tokens]), weight, targets, **options).backward()
        return {"weight": weight.grad}

    found = tied(linear_cross_entropy, weight, impl=impl)
    stock, oracle = tied(eager, weight), tied(eager, weight.double())
    assert_within_budget(found, stock, oracle)


@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "reference"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(device, low, impl):
    tensors, targets = make(device=device)
    upstream = torch.rand(targets.shape, device=device)
    args = (tensors, targets, TRAINED, upstream)
    with torch.autocast(device.type, dtype=low):
        found = gradients(linear_cross_entropy, *args, impl=impl, reduction="none")
        stock = gradients(eager, *args, reduction="none")
    wide = {name: value.double() for name, value in tensors.items()}
    oracle = gradients(eager, wide, targets, TRAINED, upstream.double(), reduction="none")
    assert all(found[name].dtype == torch.float32 for name in found)
    assert (found["loss"] - oracle["loss"]).abs().max() > 1e-5  # in the low dtype
    assert_within_budget(found, stock, oracle)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_mean_over_many_tokens_is_not_lost_in_fp16(device, impl):
    """Gradients of logits divided by 2**24 would be nothing in fp16."""
    tensors, targets = make(device=device)
    wide = {name: value.double() for name, value in tensors.items()}
    args = (targets, TRAINED, torch.ones((), device=device))
    with torch.autocast(device.type, dtype=torch.float16):
        found = gradients(linear_cross_entropy, tensors, *args, impl=impl, num_items_in_batch=2**24)
        stock = gradients(eager, tensors, *args, num_items_in_batch=2**24)
    oracle = gradients(eager, wide, *args, num_items_in_batch=2**24)
    for name in TRAINED:
        scale = oracle[name].abs().max()
        assert (found[name] - oracle[name]).abs().max() < 0.01 * scale < (stock[name] - oracle[name]).abs().max()


def test_fp64(device):
    tensors, targets = make(torch.float64, device)
    upstream = torch.rand(targets.shape, dtype=torch.float64, device=device)
    for reduction, grad in (("none", upstream), ("mean", upstream[0])):
        args = (tensors, targets, TRAINED, grad)
        found = gradients(linear_cross_entropy, *args, reduction=reduction, max_logits_bytes=2**13)
        for name, value in gradients(eager, *args, reduction=reduction).items():
            torch.testing.assert_close(found[name], value)
