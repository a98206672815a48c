"""The head's loss at the sizes of real models: vocabularies, offsets past 2**31, memory, synchronisation, fp32 sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from budget import assert_mutant_caught, assert_within_budget
from linear_cross_entropy_cases import make, measure

from fastft.ops.linear_cross_entropy import linear_cross_entropy, token_log_probs
from fastft.ops.linear_cross_entropy.chunks import _outputs
from fastft.ops.linear_cross_entropy.reference import cross_entropy_rows_ as plain_rows_
from fastft.ops.linear_cross_entropy.rows import RowOptions
from fastft.ops.linear_cross_entropy.triton import cross_entropy_rows_

pytestmark = pytest.mark.gpu

VOCABULARIES = (32000, 65537, 129920, 151936, 262144)
GIB = 2**30


@pytest.fixture(autouse=True)
def free_memory_after():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0], ids=str)
def test_losses_and_gradients(vocab, dtype, softcap):
    tensors, targets = make(dtype, "cuda", lead=(257,), size=128, vocab=vocab, spread=60.0 if softcap else 3.0)
    for options in ({"reduction": "none"}, {"reduction": "mean"}, {"reduction": "none", "trained": ("hidden",)}):
        # 100 rows a chunk
        budget = 100 * (vocab + 64) * dtype.itemsize
        results = measure(tensors, targets, "triton", max_logits_bytes=budget, softcap=softcap, **options)
        assert_within_budget(*results)
        assert_mutant_caught({**results[0], "hidden": results[0]["hidden"] * 1.05}, *results[1:])


@pytest.mark.parametrize("trained", [("hidden", "weight"), ("hidden",)], ids="+".join)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_waits_for_the_device(trained, reduction):
    tensors, targets = make(torch.bfloat16, "cuda", lead=(512,), size=64, vocab=1000)
    num_valid = int((targets != -100).sum())
    for warm in (True, False):
        leaves = {name: each.detach().requires_grad_(name in trained) for name, each in tensors.items()}
        num_items = torch.tensor(400.0, device="cuda") if reduction == "mean" else None
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            for known in (num_valid, None):
                loss, _ = linear_cross_entropy(
                    leaves["hidden"], leaves["weight"], targets, num_valid=known, num_items_in_batch=num_items,
                    reduction=reduction, return_statistics=True, impl="triton",
                )  # fmt: skip
                loss.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_wrong_number_of_targets_makes_the_loss_nan():
    tensors, targets = make(device="cuda", ignored=0)
    hidden, weight, _ = (each.requires_grad_() for each in tensors.values())
    targets[::2] = -100
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(hidden, weight, targets, num_valid=3, reduction=reduction)
        assert loss.isnan().any()
        (dhidden,) = torch.autograd.grad(loss.sum(), hidden)
        assert dhidden.isnan().any()


def test_a_target_out_of_range_is_nan_and_no_illegal_access():
    tensors, targets = make(device="cuda", ignored=0)
    targets[[4, 9]] = torch.tensor([2**40, -3], device="cuda")
    loss = token_log_probs(tensors["hidden"], tensors["weight"], targets, impl="triton")
    assert loss.isnan().nonzero().flatten().tolist() == [4, 9]


def test_rows_farther_apart_than_two_to_the_31():
    stride, vocab = 2**30 + 2**10, 1000
    storage = torch.zeros(2 * stride + 1024, dtype=torch.bfloat16, device="cuda")
    far = storage.as_strided((3, 1024), (stride, 1))
    far.normal_()
    near, targets = far.clone(), torch.tensor([3, 999, 0], device="cuda")
    results = []
    for logits in (near, far):
        outputs = _outputs(3, torch.bfloat16, logits.device, True)
        cross_entropy_rows_(logits, vocab, targets, RowOptions(), outputs, with_gradient=True)
        results.append((logits[:, :vocab], outputs.losses, *outputs.statistics))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_logits_and_weights_past_two_to_the_31():
    """8,200 tokens of 262,144 logits in one chunk, and a head of as many numbers: 4.3 GB each, and five of them."""
    tokens, vocab = 8200, 262144
    hidden = torch.randn(tokens, tokens, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(vocab, tokens, dtype=torch.bfloat16, device="cuda").div_(30).requires_grad_()
    targets = torch.randint(vocab - 1000, vocab, (tokens,), device="cuda")
    losses = linear_cross_entropy(hidden, weight, targets, reduction="sum", max_logits_bytes=6 * GIB, impl="triton")
    dhidden, dweight = torch.autograd.grad(losses, (hidden, weight))
    last = slice(tokens - 5, tokens)
    with torch.no_grad():
        logits = F.linear(hidden, weight)
        chunk = logits[last].float()
        p = chunk.softmax(-1)
        p[torch.arange(5), targets[last]] -= 1
        expected = (p.to(torch.bfloat16) @ weight).float()
        torch.testing.assert_close(dhidden[last].float(), expected, rtol=0.03, atol=0.03)
        outputs = _outputs(tokens, torch.bfloat16, hidden.device, False)
        for start in range(0, tokens, 512):
            span = slice(start, min(start + 512, tokens))
            part = outputs.slice(span.start, span.stop)
            plain_rows_(logits[span], vocab, targets[span], RowOptions(), part, with_gradient=True)
        torch.testing.assert_close(losses, outputs.losses.sum(), rtol=1e-4, atol=0)
        rows = dweight[-7:].float()
        torch.testing.assert_close(rows, (logits[:, -7:].t() @ hidden).float(), rtol=0.03, atol=0.1)


def test_a_trained_head_is_summed_in_fp32():
    """Over 32 chunks; sums in bf16 would lose what is below a 256th of what is there, soonest over many chunks."""
    tensors, targets = make(torch.bfloat16, "cuda", lead=(4096,), size=256, vocab=2048, ignored=0)
    budget = 128 * 2048 * 2
    results = measure(tensors, targets, "triton", ("weight", "bias"), max_logits_bytes=budget, reduction="sum")
    assert_within_budget(*results)
    mutant = torch.zeros_like(tensors["weight"])
    for part in torch.arange(4096, device="cuda").split(8):
        share = {**tensors, "hidden": tensors["hidden"][part]}
        one = torch.ones((), device="cuda")
        mutant += measure(share, targets[part], "triton", ("weight",), one, reduction="sum")[0]["weight"]
    summed = measure(tensors, targets, "triton", ("weight",), torch.ones((), device="cuda"), reduction="sum")
    assert_within_budget(*summed)
    assert_mutant_caught({**summed[0], "weight": mutant}, *summed[1:])


def test_memory_is_that_of_a_chunk():
    """32,768 tokens of 128,256 logits would take 8.4 GB; a frozen head needs a chunk of them and gradients [T, H]."""
    tokens, vocab, size = 32768, 128256, 1024
    hidden = torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(vocab, size, dtype=torch.bfloat16, device="cuda").div_(32)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, targets, max_logits_bytes=GIB // 2, impl="triton").backward()
    assert torch.cuda.max_memory_allocated() - before < GIB // 2 + 4 * hidden.nbytes


def test_on_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    tensors, targets = make(device="cuda:1")
    found = linear_cross_entropy(tensors["hidden"], tensors["weight"], targets, impl="triton")
    expected = linear_cross_entropy(tensors["hidden"], tensors["weight"], targets, impl="reference")
    torch.testing.assert_close(found, expected)
