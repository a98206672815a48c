"""The kernel that goes over a chunk of logits: losses and statistics of rows, and the gradient in the logits' place.

The equations are those of `rows.py`. One program makes one row, in fp32: a first walk over the row finds the largest
logit, the sum of exponentials and what else is wanted, rescaled as the largest one grows; a second walk turns each
logit z into dz, rounded once. The second walk goes backwards, to meet first what the caches saw last.

Shapes: logits [M, P] with any stride from row to row, of which V columns are logits and the others padding, which may
hold anything and is written too: what is masked at V alone is not loaded by whole vectors where V is odd. Targets [M]
int64, the rest [M].
Dtypes: fp32, fp16, bf16 (sm80 on); sums in fp32. Any card that Triton compiles for.
Bytes a logit at 16 bits: 2 without a gradient; 6 with one (two reads, one write), of which caches serve a part of the
second read: a row of 151,936 is 304 KB. A row without a target is not read; its gradient is written, as zeros.

Offsets: the first place of a row is computed in 64 bits, once a program, and places within a row fit 32.

Source: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867 (the largest and the sum in one pass).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

from ..compiling import CompileCase, compile_case
from ..launching import Launcher
from ..triton_activations import exp_nonpositive
from .rows import RowOptions, RowOutputs

# 16 logits a thread: two 16-byte loads of 16-bit ones in flight, beside three sums in registers.
BLOCK_LOGITS = 8192
LOGITS_PER_WARP = 512


@triton.jit
def _exp(x, EXACT: tl.constexpr):
    """e^x of x <= 0. The usual one errs by |x| units in the last place, which results of 16 bits do not show."""
    if EXACT:
        value = tl.where(x < -104.0, 0.0, exp_nonpositive(x, True))
    else:
        value = tl.exp(x)
    return value


@triton.jit
def _tanh(u):
    """tanh(u) to some units in the last place, and 1 - tanh(u)^2 without cancellation. NaN stays NaN."""
    small = tl.exp(-2 * tl.abs(u))
    size = 1 - 2 * small / (1 + small)  # cancels near zero, where the series takes its place
    square = u * u
    series = tl.fma(square, 0.021869489, -0.053968254)
    series = tl.fma(square, series, 0.13333333)
    series = tl.fma(square, series, -0.33333333)
    series = tl.fma(u * square, series, u)
    value = tl.where(square < 0.09, series, tl.where(u < 0, -size, size))
    return value, 4 * small / ((1 + small) * (1 + small))


@triton.jit
def _transform(z, scale, softcap, inv_temperature, HAS_SOFTCAP: tl.constexpr):
    """x, and dx/dz."""
    x, slope = z * scale, scale * inv_temperature
    if HAS_SOFTCAP:
        tanh, tanh_slope = _tanh(x / softcap)
        x, slope = tanh * softcap, tanh_slope * slope
    return x * inv_temperature, slope


@triton.jit
def _ignored_row(
    logits_ptr, losses_ptr, log_probs_ptr, entropy_ptr, argmax_ptr, row, P: tl.constexpr, BLOCK_V: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
):  # fmt: skip
    tl.store(losses_ptr + row, 0.0)
    if log_probs_ptr is not None:
        tl.store(log_probs_ptr + row, 0.0)
        tl.store(entropy_ptr + row, 0.0)
        tl.store(argmax_ptr + row, -1)
    if WITH_GRADIENT:
        cols = tl.arange(0, BLOCK_V)
        nothing = tl.zeros([BLOCK_V], dtype=logits_ptr.dtype.element_ty)
        for start in range(0, P, BLOCK_V):
            tl.store(logits_ptr + start + cols, nothing, mask=cols < P - start)


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_kernel(
    logits_ptr,  # [M, P], replaced by dz WITH_GRADIENT
    targets_ptr,  # [M] int64
    losses_ptr,  # [M] fp32
    log_probs_ptr,  # [M] fp32 or None; the next two go with it
    entropy_ptr,  # [M] fp32 or None
    argmax_ptr,  # [M] int64 or None
    row_stride,
    ignore_index,
    scale,
    softcap,
    inv_temperature,
    smoothing,
    z_loss,
    V: tl.constexpr,
    P: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SMOOTHED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    EXACT: tl.constexpr = logits_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        _ignored_row(
            logits_ptr, losses_ptr, log_probs_ptr, entropy_ptr, argmax_ptr, row, P, BLOCK_V, WITH_GRADIENT
        )  # fmt: skip
        return
    # Before the walks: other warps would have written the gradient there.
    known = (target >= 0) & (target < V)
    z_target = tl.load(logits_ptr + target, mask=known, other=0.0).to(tl.float32)
    x_target, _at_target = _transform(z_target, scale, softcap, inv_temperature, HAS_SOFTCAP)
    x_target = tl.where(known, x_target, float("nan"))

    cols = tl.arange(0, BLOCK_V)
    largest = float("-inf")
    total = tl.zeros([BLOCK_V], dtype=tl.float32)  # of exp(x - largest)
    weighted = tl.zeros([BLOCK_V], dtype=tl.float32)  # of exp(x - largest) (x - largest)
    plain = tl.zeros([BLOCK_V], dtype=tl.float32)  # of x
    best_start = 0
    for start in range(0, V, BLOCK_V):
        mask = cols < V - start
        z = tl.load(logits_ptr + start + cols, mask=cols < P - start, other=0.0).to(tl.float32)
        x, _ = _transform(z, scale, softcap, inv_temperature, HAS_SOFTCAP)
        x = tl.where(mask, x, float("-inf"))  # only now: a cap would lift what is no logit to -cap
        block_largest = tl.max(x, axis=0)
        new_largest = tl.maximum(largest, block_largest)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # -inf from -inf would be NaN
        decay = _exp(largest - shift, EXACT)
        e = _exp(x - shift, EXACT)
        if log_probs_ptr is not None:
            best_start = tl.where(block_largest > largest, start, best_start)
            moved = tl.where(largest == float("-inf"), 0.0, largest - shift)
            weighted = decay * (weighted + moved * total) + e * tl.where(x == float("-inf"), 0.0, x - shift)
        total = total * decay + e
        if IS_SMOOTHED:
            plain += tl.where(mask, x, 0.0)
        largest = new_largest

    shift = tl.where(largest == float("-inf"), 0.0, largest)
    sum_exp = tl.sum(total, axis=0)
    log_sum = tl.log(sum_exp)
    lse = shift + log_sum
    log_prob = (x_target - shift) - log_sum  # not x - lse, which rounds twice at the size of the logits
    loss = -log_prob
    if IS_SMOOTHED:
        loss = (1 - smoothing) * loss + smoothing * (log_sum - (tl.sum(plain, axis=0) / V - shift))
    tl.store(losses_ptr + row, loss + z_loss * lse * lse)
    if log_probs_ptr is not None:
        tl.store(log_probs_ptr + row, log_prob)
        tl.store(entropy_ptr + row, log_sum - tl.sum(weighted, axis=0) / sum_exp)
        mask = cols < V - best_start
        z = tl.load(logits_ptr + best_start + cols, mask=mask, other=0.0).to(tl.float32)
        x, _ = _transform(z, scale, softcap, inv_temperature, HAS_SOFTCAP)
        best = tl.argmax(tl.where(mask, x, float("-inf")), axis=0)
        tl.store(argmax_ptr + row, (best_start + best).to(tl.int64))

    if WITH_GRADIENT:
        weight = tl.where(known, (1 + 2 * z_loss * lse) / sum_exp, float("nan"))
        for block in range(0, tl.cdiv(V, BLOCK_V)):
            start = (tl.cdiv(V, BLOCK_V) - 1 - block) * BLOCK_V
            mask = cols < P - start
            z = tl.load(logits_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
            x, slope = _transform(z, scale, softcap, inv_temperature, HAS_SOFTCAP)
            dx = _exp(x - shift, EXACT) * weight - tl.where(start + cols == target, 1 - smoothing, 0.0)
            if IS_SMOOTHED:
                dx -= smoothing / V
            tl.store(logits_ptr + start + cols, (dx * slope).to(logits_ptr.dtype.element_ty), mask=mask)


_launch = Launcher(_cross_entropy_kernel)


def cross_entropy_rows_(
    logits: torch.Tensor, vocab_size: int, targets: torch.Tensor, options: RowOptions, outputs: RowOutputs, *,
    with_gradient: bool,
) -> None:  # fmt: skip
    """Losses and statistics of rows of logits, and the gradient in their place.

    Args:
        logits: [M, P], M > 0, each row contiguous: V logits and padding. With a gradient dz is written over the logits
            and anything over the padding. It is for an upstream gradient of one a row: not scaled, so that fp16 does
            not lose what a mean over thousands of tokens would leave.
        vocab_size: V.
        targets: [M] int64, contiguous. One that is neither ignore_index nor below V gives NaN.
        options: see `RowOptions`.
        outputs: written.
        with_gradient: whether to write dz.
    """
    smoothing, softcap = options.label_smoothing, options.softcap
    _launch(
        logits.shape[0],
        (logits, targets, outputs.losses, *(outputs.statistics or (None, None, None))),
        (
            logits.stride(0), options.ignore_index, float(options.logit_scale), float(softcap),
            1.0 / options.temperature, float(smoothing), float(options.z_loss),
        ),
        _constants(vocab_size, logits.shape[1], bool(softcap), bool(smoothing), with_gradient),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _constants(vocab_size: int, padded: int, capped: bool, smoothed: bool, with_gradient: bool) -> dict[str, Any]:
    block = min(triton.next_power_of_2(padded), BLOCK_LOGITS)
    return {
        "V": vocab_size, "P": padded, "HAS_SOFTCAP": capped, "IS_SMOOTHED": smoothed, "WITH_GRADIENT": with_gradient,
        "BLOCK_V": block, "num_warps": max(1, block // LOGITS_PER_WARP),
    }  # fmt: skip


def compile_cases() -> Iterator[CompileCase]:
    """For `tests/cross_compile.py`."""
    for element, vocab_size, capped, smoothed, with_gradient, with_statistics in (
        ("bf16", 151936, False, False, True, False),
        ("bf16", 262144, True, False, True, True),
        ("fp16", 65537, False, True, True, True),
        ("fp32", 32000, False, False, False, True),
    ):
        constants = _constants(vocab_size, -(-vocab_size // 64) * 64, capped, smoothed, with_gradient)
        absent = {} if with_statistics else dict.fromkeys(("log_probs_ptr", "entropy_ptr", "argmax_ptr"))
        yield compile_case(_cross_entropy_kernel, constants | absent, partial(_kind_of, element))


def _kind_of(element: str, name: str) -> str:
    if name.endswith("_ptr"):
        return {"logits_ptr": f"*{element}", "targets_ptr": "*i64", "argmax_ptr": "*i64"}.get(name, "*fp32")
    return "i32" if name in ("row_stride", "ignore_index") else "fp32"
