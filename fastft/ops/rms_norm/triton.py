"""RMSNorm kernels, forward and backward.

    rstd  = 1 / sqrt(mean(x^2) + eps)          x_hat = x * rstd          (fp32, over the last dimension)
    llama        y  = weight * round(x_hat)            result dtype: promotion of weight and x
    fp32_weight  y  = round(weight * x_hat)            result dtype: that of x
    gemma        y  = round((1 + weight) * x_hat)      result dtype: that of x
    dx     = rstd * (g - x_hat * mean(g * x_hat))      g = dy * weight, or dy * (1 + weight); one rounding
    dweight = sum over rows of dy * x_hat              llama: x_hat rounded to x.dtype, as its forward multiplies it

With a residual the same kernels add before they normalise: h = round(residual + x) stands for x above, and its
gradient, which is that of x and of the residual alike, gets the one that comes to h itself: dx = dh + rstd * (...).

Shapes: x, residual, h, y, dy, dh, dx [M, H] (M rows from any leading shape), weight [H], rstd [M] fp32.
Dtypes: fp32, fp16, bf16 (sm80 on), mixed as torch promotes them; sums in fp32. Any card that Triton compiles for.
Bytes an element at 16 bits: forward 4 (x in, y out), backward 6 (x, dy in, dx out); weight and rstd are noise. With a
residual 8 and 8, where torch's addition and a norm take 10 and 12.

A tile is BLOCK_M whole rows, so that one pass over memory is enough: narrow rows (q_norm, k_norm) share a program.
With a trained weight the backward runs a fixed number of programs which walk the rows and keep their part of dweight
in registers; with a frozen one there is one program a tile and nothing is summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..first_order import first_order
from ..kept import KeptTensors
from ..launching import Launcher, sm_count
from ..layouts import INT32_MAX

# 4096 elements a tile and 4 warps are 32 elements a thread: four 16-byte loads of each 16-bit operand in flight.
TILE_ELEMENTS = 4096
ELEMENTS_PER_WARP = 1024
# Warps of the weight-gradient backward that stay resident on one multiprocessor (ptxas: up to 165 registers a thread,
# which 12 warps fill). More programs than that would queue behind the others, each having a fixed share of the rows.
RESIDENT_WARPS = 12

# The kernels are not specialised on num_rows: packed batches change it from step to step, and a first odd (or first
# round) number would stop training to compile a variant that is no faster.


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_fwd_kernel(
    x_ptr,  # [M, H], row stride x_row_stride
    residual_ptr,  # [M, H], row stride residual_row_stride, of x's dtype; or None: x itself is normalised
    weight_ptr,  # [H] or None
    h_ptr,  # [M, H] contiguous, or None where there is no residual
    y_ptr,  # [M, H] contiguous
    rstd_ptr,  # [M] fp32
    x_row_stride,
    residual_row_stride,
    num_rows,
    eps,
    H: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):
    tile = tl.program_id(0)
    if LONG_INDEXING:
        tile = tile.to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_H)
    row_mask = rows < num_rows
    col_mask = cols < H
    mask = row_mask[:, None] & col_mask[None, :]

    x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows[:, None] * residual_row_stride + cols[None, :], mask=mask, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(h_ptr + rows[:, None] * H + cols[None, :], x, mask=mask)
    x_fp32 = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x_fp32 * x_fp32, axis=1) / H + eps)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)

    y = x_fp32 * rstd[:, None]
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
        if ROUNDING == "llama":
            y = y.to(x.dtype).to(tl.float32)
        elif ROUNDING == "gemma":
            scale += 1.0
        y = y * scale[None, :]
    tl.store(y_ptr + rows[:, None] * H + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_bwd_kernel(
    dy_ptr,  # [M, H], row stride dy_row_stride
    dh_ptr,  # [M, H], row stride dh_row_stride: what comes to x on other ways; or None
    x_ptr,  # [M, H], row stride x_row_stride; h where there was a residual
    weight_ptr,  # [H] or None
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, H] contiguous, or None: x needs no gradient
    partials_ptr,  # [programs, H] fp32, or None: the weight is frozen
    dy_row_stride,
    dh_row_stride,
    x_row_stride,
    num_rows,
    H: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LONG_INDEXING: tl.constexpr,
):
    program = tl.program_id(0)
    if LONG_INDEXING:
        program = program.to(tl.int64)
    cols = tl.arange(0, BLOCK_H)
    col_mask = cols < H
    if (dx_ptr is not None) and (weight_ptr is not None):
        scale = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
        if ROUNDING == "gemma":
            scale += 1.0
    if partials_ptr is not None:
        dweight = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)

    for tile in range(program, tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & col_mask[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if (dh_ptr is not None) and (dx_ptr is not None):  # with the others, not behind the sum over the row
            dh = tl.load(dh_ptr + rows[:, None] * dh_row_stride + cols[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        x_hat = x.to(tl.float32) * rstd[:, None]

        if partials_ptr is not None:
            if ROUNDING == "llama":
                dweight += dy * x_hat.to(x.dtype).to(tl.float32)
            else:
                dweight += dy * x_hat
        if dx_ptr is not None:
            if weight_ptr is not None:
                dy = dy * scale[None, :]
            mean = tl.sum(dy * x_hat, axis=1) / H
            dx = (dy - x_hat * mean[:, None]) * rstd[:, None]
            if dh_ptr is not None:
                dx += dh.to(tl.float32)
            tl.store(dx_ptr + rows[:, None] * H + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)

    if partials_ptr is not None:
        tl.store(partials_ptr + program * H + cols, tl.sum(dweight, axis=0), mask=col_mask)


class LaunchConfig(NamedTuple):
    """How rows are cut into programs; `programs_per_sm` counts only in the backward with a trained weight."""

    block_m: int
    block_h: int
    num_warps: int
    programs_per_sm: int


@lru_cache(maxsize=256)
def launch_config(hidden_size: int) -> LaunchConfig:
    block_h = triton.next_power_of_2(hidden_size)
    block_m = max(1, TILE_ELEMENTS // block_h)
    num_warps = min(16, max(4, block_m * block_h // ELEMENTS_PER_WARP))
    return LaunchConfig(block_m, block_h, num_warps, max(1, RESIDENT_WARPS // num_warps))


def _row_stride(tensor: torch.Tensor) -> int | None:
    """Elements between consecutive rows [H] of a tensor [..., H], or None when no single stride leads through them."""
    *sizes, hidden_size = tensor.shape
    *strides, last = tensor.stride()
    if last != 1 and hidden_size != 1:
        return None
    row_stride: int | None = None
    next_stride = 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if row_stride is None:
            row_stride = stride
        elif stride != next_stride:
            return None
        next_stride = stride * size
    return hidden_size if row_stride is None else row_stride


_launch_fwd, _launch_bwd = Launcher(_rms_norm_fwd_kernel), Launcher(_rms_norm_bwd_kernel)


def _as_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor and its row stride; a contiguous copy where its rows lie at no single stride."""
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    row_stride = _row_stride(tensor)
    return (tensor.contiguous(), tensor.shape[-1]) if row_stride is None else (tensor, row_stride)


def launch_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    rounding: str,
    config: LaunchConfig | None = None,
    residual: torch.Tensor | None = None,
    h: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (contiguous, of x's shape) and rstd [M] of a non-empty x [..., H].

    With a residual of x's shape and dtype, of their sum, which is written to h, contiguous and like x.
    """
    hidden_size = x.shape[-1]
    num_rows = x.numel() // hidden_size
    block_m, block_h, num_warps, _ = config or launch_config(hidden_size)
    x_rows, x_row_stride = _as_rows(x)
    residual_rows, residual_row_stride = (None, 0) if residual is None else _as_rows(residual)
    dtype = x.dtype
    if weight is not None:
        weight = weight.contiguous()
        if rounding == "llama" and weight.dtype != dtype:
            dtype = torch.promote_types(weight.dtype, dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    reach = num_rows * max(x_row_stride, residual_row_stride, hidden_size)
    _launch_fwd(
        triton.cdiv(num_rows, block_m),
        (x_rows, residual_rows, weight, h, y, rstd),
        (x_row_stride, residual_row_stride, num_rows, eps),
        {
            "H": hidden_size, "ROUNDING": rounding, "BLOCK_M": block_m, "BLOCK_H": block_h,
            "LONG_INDEXING": reach > INT32_MAX, "num_warps": num_warps,
        },
    )  # fmt: skip
    return y, rstd


def launch_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    rounding: str,
    needs_dx: bool,
    needs_dweight: bool,
    config: LaunchConfig | None = None,
    dh: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dx (fresh, contiguous, with dh added to it) and dweight, each None where it is not needed."""
    hidden_size = x.shape[-1]
    num_rows = rstd.numel()
    block_m, block_h, num_warps, programs_per_sm = config or launch_config(hidden_size)
    x_rows, x_row_stride = _as_rows(x)
    dy_rows, dy_row_stride = _as_rows(dy)
    dh_rows, dh_row_stride = (None, 0) if dh is None or not needs_dx else _as_rows(dh)
    programs = triton.cdiv(num_rows, block_m)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_dx else None
    partials = None
    if needs_dweight:
        programs = min(programs, programs_per_sm * sm_count(x.device))
        partials = torch.empty((programs, hidden_size), dtype=torch.float32, device=x.device)
    reach = num_rows * max(x_row_stride, dy_row_stride, dh_row_stride, hidden_size)
    _launch_bwd(
        programs,
        (dy_rows, dh_rows, x_rows, None if weight is None else weight.contiguous(), rstd, dx, partials),
        (dy_row_stride, dh_row_stride, x_row_stride, num_rows),
        {
            "H": hidden_size, "ROUNDING": rounding, "BLOCK_M": block_m, "BLOCK_H": block_h,
            "LONG_INDEXING": reach > INT32_MAX, "num_warps": num_warps,
        },
    )  # fmt: skip
    if partials is None or weight is None:
        return dx, None
    return dx, partials.sum(0).to(weight.dtype)


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float, rounding: str) -> torch.Tensor:
        y, rstd = launch_forward(x, weight, eps, rounding)
        ctx.save_for_backward(x, rstd)
        ctx.weight = KeptTensors((weight,))
        ctx.rounding = rounding
        return y

    @staticmethod
    @first_order("rms_norm")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, rstd = ctx.saved_tensors
        (weight,) = ctx.weight.unchanged()
        needs_dx, needs_dweight = ctx.needs_input_grad[:2]
        dx, dweight = launch_backward(dy, x, weight, rstd, ctx.rounding, needs_dx, needs_dweight)
        return dx, dweight, None, None


class _AddRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, rounding: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        y, rstd = launch_forward(x, weight, eps, rounding, residual=residual, h=h)
        ctx.save_for_backward(h, rstd)
        ctx.weight = KeptTensors((weight,))
        ctx.rounding = rounding
        ctx.set_materialize_grads(False)  # of an output that nobody used there is none, rather than zeros
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(h)
        return h, y

    @staticmethod
    @first_order("rms_norm")
    def backward(ctx: Any, dh: torch.Tensor | None, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needs_dx, needs_dresidual, needs_dweight = ctx.needs_input_grad[:3]
        dx, dweight = dh, None
        if dy is not None:
            h, rstd = ctx.saved_tensors
            (weight,) = ctx.weight.unchanged()
            needs = (needs_dx or needs_dresidual, needs_dweight)
            dx, dweight = launch_backward(dy, h, weight, rstd, ctx.rounding, *needs, dh=dh)
        # One object for both inputs, as torch's own addition returns it. Before autograd takes a gradient over as a
        # leaf's or adds another one in place, it counts who else holds this object: two aliases it would not see.
        return dx if needs_dx else None, dx if needs_dresidual else None, dweight, None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, rounding: str) -> torch.Tensor:
    """`fastft.ops.rms_norm.rms_norm` for a non-empty, validated x [..., H]."""
    return _RMSNormFunction.apply(x, weight, eps, rounding)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fastft.ops.rms_norm.add_rms_norm` for non-empty, validated x and residual of one shape and dtype."""
    return _AddRMSNormFunction.apply(x, residual, weight, eps, rounding)


def compile_cases() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """(kernel, signature, constexprs, num_warps) of configurations to cross-compile; pointers are 16-byte aligned."""
    for dtype, weight, hidden_size, rounding, long_indexing, trained, adds in [
        ("bf16", "bf16", 2048, "llama", False, True, False),
        ("bf16", "fp32", 128, "llama", False, False, False),
        ("fp16", "fp16", 128, "gemma", False, True, False),
        ("fp32", "fp32", 16384, "fp32_weight", True, True, False),
        ("bf16", "bf16", 4096, "llama", False, False, True),
        ("fp16", "fp16", 16384, "llama", True, True, True),
    ]:
        block_m, block_h, num_warps, _ = launch_config(hidden_size)
        sizes = {"H": hidden_size, "ROUNDING": rounding, "BLOCK_M": block_m, "BLOCK_H": block_h}
        sizes["LONG_INDEXING"] = long_indexing
        stride = "i64" if long_indexing else "i32"
        result = "fp32" if "fp32" in (dtype, weight) and rounding == "llama" else dtype
        added = f"*{dtype}" if adds else "constexpr"
        forward = {"x_ptr": f"*{dtype}", "residual_ptr": added, "weight_ptr": f"*{weight}", "h_ptr": added}
        forward |= {"y_ptr": f"*{result}", "rstd_ptr": "*fp32", "x_row_stride": stride, "residual_row_stride": stride}
        forward |= {"num_rows": "i32", "eps": "fp32"}
        constants = sizes if adds else sizes | {"residual_ptr": None, "h_ptr": None}
        yield _rms_norm_fwd_kernel, forward | dict.fromkeys(sizes, "constexpr"), constants, num_warps
        backward = {"dy_ptr": f"*{result}", "dh_ptr": added, "x_ptr": f"*{dtype}", "weight_ptr": f"*{weight}"}
        backward |= {"rstd_ptr": "*fp32", "dx_ptr": f"*{dtype}", "partials_ptr": "*fp32" if trained else "constexpr"}
        backward |= {"dy_row_stride": stride, "dh_row_stride": stride, "x_row_stride": stride, "num_rows": "i32"}
        absent = {} if adds else {"dh_ptr": None}
        absent |= {} if trained else {"partials_ptr": None}
        yield _rms_norm_bwd_kernel, backward | dict.fromkeys(sizes, "constexpr"), sizes | absent, num_warps
