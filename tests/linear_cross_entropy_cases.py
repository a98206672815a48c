"""Heads, targets and the eager loss that `linear_cross_entropy` is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastft.ops.linear_cross_entropy import linear_cross_entropy

IMPLEMENTATIONS = ("triton", "chunked")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRAINED = ("hidden", "weight", "bias")
TOKENS, SIZE, VOCAB = 31, 37, 101
# Memory for the logits of a chunk of 16 tokens in fp32, or 32 in 16 bits; plain torch has fp32 copies of them besides.
SMALL = 16 * 128 * 4
MEMORY = {"triton": SMALL, "chunked": 4 * SMALL}


def make(dtype=torch.float32, device="cpu", lead=(TOKENS,), size=SIZE, vocab=VOCAB, ignored=0.3, spread=3.0):
    """A head whose logits have a standard deviation of `spread`, and targets of which a part is ignored."""
    tensors = {
        "hidden": torch.randn(*lead, size),
        "weight": spread * torch.randn(vocab, size) / size**0.5,
        "bias": torch.randn(vocab),
    }
    targets = torch.randint(0, vocab, lead)
    targets.view(-1)[torch.rand(targets.numel()) < ignored] = -100
    return {name: value.to(device, dtype) for name, value in tensors.items()}, targets.to(device)


def eager(
    hidden, weight, targets, *, bias=None, ignore_index=-100, reduction="mean", num_items_in_batch=None,
    logit_scale=1.0, softcap=None, label_smoothing=0.0, z_loss=0.0, temperature=1.0,
):  # fmt: skip
    """As models compute it: the product in its dtype, the rest in fp32."""
    logits = F.linear(hidden, weight, bias)
    logits = logits_of(logits if logits.dtype == torch.float64 else logits.float(), logit_scale, softcap, temperature)
    flat, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    losses = F.cross_entropy(
        flat, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )  # fmt: skip
    losses = losses + z_loss * flat.logsumexp(-1).square() * (targets != ignore_index)
    if reduction == "none":
        return losses.view(hidden.shape[:-1])
    if num_items_in_batch is not None:
        return losses.sum() / num_items_in_batch
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignore_index).sum()


def logits_of(logits, logit_scale=1.0, softcap=None, temperature=1.0):
    logits = logits * logit_scale
    return (torch.tanh(logits / softcap) * softcap if softcap else logits) / temperature


def gradients(function, tensors, targets, trained, upstream, **options):
    """The loss and the gradients of what is trained."""
    leaves = {name: value.detach().requires_grad_(name in trained) for name, value in tensors.items()}
    loss = function(leaves["hidden"], leaves["weight"], targets, bias=leaves.get("bias"), **options)
    loss.backward(upstream.to(loss.dtype))
    assert all((leaf.grad is not None) == (name in trained) for name, leaf in leaves.items())
    return {"loss": loss.detach()} | {name: leaves[name].grad for name in trained}


def measure(tensors, targets, impl, trained=TRAINED, upstream=None, max_logits_bytes=None, **options):
    """Ours, eager and the oracle; losses and gradients, the loss of a reduction aside: one number's error is luck."""
    trained = [name for name in trained if name in tensors]
    if upstream is None:
        shape = targets.shape if options.get("reduction", "mean") == "none" else ()
        upstream = 0.5 + torch.randn(shape, device=targets.device).abs()
    own = {"impl": impl, "max_logits_bytes": max_logits_bytes or MEMORY[impl]}
    wide = {name: value.double() for name, value in tensors.items()}
    results = (
        gradients(linear_cross_entropy, tensors, targets, trained, upstream, **options, **own),
        gradients(eager, tensors, targets, trained, upstream, **options),
        gradients(eager, wide, targets, trained, upstream.double(), **options),
    )
    assert results[0]["loss"].dtype == torch.float32
    assert all(results[0][name].dtype == tensors[name].dtype for name in trained)
    if results[0]["loss"].ndim == 0:
        loss, _, true_loss = (result.pop("loss") for result in results)
        eps = torch.finfo(tensors["hidden"].dtype).eps
        torch.testing.assert_close(loss.double(), true_loss, rtol=4 * eps, atol=eps)
    return results
