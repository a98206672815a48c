"""Gated activations, forward and backward.

    forward    product = act(gate) * up
    backward   dgate = dproduct * up * act'(gate)      dup = dproduct * act(gate)      product again, if it is wanted

Shapes: all [T, I]; gate, up and dproduct with any stride from row to row, what is written contiguous. Computed in fp32
with one rounding at the store. Dtypes fp32, fp16, bf16 (sm80 on). Any card that Triton compiles for.
Bytes an element at 16 bits: forward 6 (gate, up in, product out), backward 10 (gate, up, dproduct in, dgate, dup out),
12 with the product, which may take the place of dproduct: each program reads its tile before it writes.
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
from ..triton_activations import activate

# 16 elements a thread: two 16-byte loads of each 16-bit operand in flight.
TILE_ELEMENTS = 2048
# A row of fewer columns than this is cut into tiles that are not full rather than into small ones.
SMALLEST_EVEN_CUT = 256


@triton.jit
def _tile(program, num_rows, I: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: E741
    """Rows (int64: they are multiplied by strides), columns and mask of a program's tile."""
    tiles_a_row = tl.cdiv(I, COLUMNS)
    row = (program // tiles_a_row).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = program % tiles_a_row * COLUMNS + tl.arange(0, COLUMNS)
    return row[:, None], column[None, :], (row < num_rows)[:, None] & (column < I)[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _gated_forward_kernel(
    gate_ptr,  # [T, I]
    up_ptr,  # [T, I]
    product_ptr,  # [T, I] contiguous
    num_rows,
    gate_row_stride,
    up_row_stride,
    I: tl.constexpr,  # noqa: E741
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, mask = _tile(tl.program_id(0), num_rows, I, ROWS, COLUMNS)
    gate = tl.load(gate_ptr + row * gate_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    product, _, _ = activate(gate, up, ACTIVATION, 0.0, 0.0, gate_ptr.dtype.element_ty == tl.float32)
    tl.store(product_ptr + row * I + column, product.to(product_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_backward_kernel(
    grad_ptr,  # [T, I]
    gate_ptr,  # [T, I]
    up_ptr,  # [T, I]
    grad_gate_ptr,  # [T, I] contiguous
    grad_up_ptr,  # [T, I] contiguous
    product_ptr,  # [T, I] contiguous, perhaps grad; or None
    num_rows,
    grad_row_stride,
    gate_row_stride,
    up_row_stride,
    I: tl.constexpr,  # noqa: E741
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, mask = _tile(tl.program_id(0), num_rows, I, ROWS, COLUMNS)
    grad = tl.load(grad_ptr + row * grad_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    product, by_gate, by_up = activate(gate, up, ACTIVATION, 0.0, 0.0, gate_ptr.dtype.element_ty == tl.float32)
    place = row * I + column
    tl.store(grad_gate_ptr + place, (grad * by_gate).to(grad_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_up_ptr + place, (grad * by_up).to(grad_up_ptr.dtype.element_ty), mask=mask)
    if product_ptr is not None:
        tl.store(product_ptr + place, product.to(product_ptr.dtype.element_ty), mask=mask)


_launch_forward, _launch_backward = Launcher(_gated_forward_kernel), Launcher(_gated_backward_kernel)


def gated_forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up of [T, I], not empty; contiguous, of gate's dtype."""
    gate, up = _rows(gate), _rows(up)
    num_rows, size = gate.shape
    product = torch.empty(num_rows, size, dtype=gate.dtype, device=gate.device)
    constants = _constants(size, activation)
    numbers = (num_rows, gate.stride(0), up.stride(0))
    _launch_forward(_programs(num_rows, constants), (gate, up, product), numbers, constants)
    return product


def gated_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, *, with_product: bool, owned: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of gate and up, and the product once more if it is wanted.

    Args:
        grad: [T, I], of the product; of any of the dtypes.
        gate, up: [T, I], not empty, as in the forward.
        activation: one of `ACTIVATIONS`.
        with_product: whether to return the product.
        owned: whether grad may be overwritten.
    """
    grad, gate, up = _rows(grad), _rows(gate), _rows(up)
    num_rows, size = gate.shape
    grad_gate, grad_up = (torch.empty(num_rows, size, dtype=gate.dtype, device=gate.device) for _ in range(2))
    product = None
    if with_product:
        reusable = owned and grad.dtype == gate.dtype and grad.is_contiguous()
        product = grad if reusable else torch.empty_like(grad_gate)
    constants = _constants(size, activation)
    pointers = (grad, gate, up, grad_gate, grad_up, product)
    numbers = (num_rows, grad.stride(0), gate.stride(0), up.stride(0))
    _launch_backward(_programs(num_rows, constants), pointers, numbers, constants)
    return grad_gate, grad_up, product


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _programs(num_rows: int, constants: dict[str, Any]) -> int:
    return triton.cdiv(num_rows, constants["ROWS"]) * triton.cdiv(constants["I"], constants["COLUMNS"])


@lru_cache(maxsize=64)
def _constants(size: int, activation: str) -> dict[str, Any]:
    even = size & -size  # the largest power of two that divides it
    columns = even if even >= SMALLEST_EVEN_CUT else triton.next_power_of_2(size)
    columns = min(columns, TILE_ELEMENTS)
    rows = TILE_ELEMENTS // columns
    return {"I": size, "ACTIVATION": activation, "ROWS": rows, "COLUMNS": columns, "num_warps": 4}


def compile_cases() -> Iterator[CompileCase]:
    """Both kernels with every activation, for `tests/cross_compile.py`."""
    for element, size, activation in (("bf16", 8192, "silu"), ("fp16", 3072, "gelu"), ("fp32", 77, "gelu_tanh")):
        kinds = partial(_kind_of, element)
        constants = _constants(size, activation)
        yield compile_case(_gated_forward_kernel, constants, kinds)
        yield compile_case(_gated_backward_kernel, constants, kinds)
        yield compile_case(_gated_backward_kernel, {**constants, "product_ptr": None}, kinds)


def _kind_of(element: str, name: str) -> str:
    return f"*{element}" if name.endswith("_ptr") else "i32"
