"""What the kernels are compiled for: how much a program holds; and cases for compiling without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from ..compiling import CompileCase, compile_case
from ..tiles import heads_a_tile, power_of_two_at_least
from .padding import padded_row
from .triton import qk_norm_rope_bwd_kernel, qk_norm_rope_fwd_kernel

MIN_WARPS, MAX_WARPS = 4, 16
MAX_BLOCK_TOKENS = 8


class Budget(NamedTuple):
    """What a program may hold of q, and again of k."""

    elements: int
    elements_per_warp: int


# 32 and 16 elements a thread: the backward holds dout beside x, and maybe the sums of dweight. By ptxas for sm90 it is
# up to 121 registers forward and 168 backward; only whole rows of 8192 in fp32 spill (56 bytes).
FORWARD = Budget(elements=4096, elements_per_warp=1024)
BACKWARD = Budget(elements=2048, elements_per_warp=512)


class Heads(NamedTuple):
    """The shape of q and k apart from their tokens; no heads: nothing of it is computed."""

    num_q_heads: int
    num_k_heads: int
    head_dim: int
    half: int


class Kind(NamedTuple):
    """Which of the ways to normalise and rotate."""

    rounding: str
    whole_width: bool
    interleaved: bool


@lru_cache(maxsize=256)
def specialise(heads: Heads, kind: Kind, long_indexing: bool, budget: Budget) -> dict[str, Any]:
    """Everything a specialisation is compiled for, launch options included."""
    row = padded_row(heads.head_dim, heads.half)
    limit = power_of_two_at_least(budget.elements // row)
    if kind.whole_width:
        block_hq, block_hk = power_of_two_at_least(heads.num_q_heads), power_of_two_at_least(heads.num_k_heads)
    else:
        block_hq, block_hk = heads_a_tile(heads.num_q_heads, limit), heads_a_tile(heads.num_k_heads, limit)
    most_heads = max(block_hq, block_hk)
    block_t = min(MAX_BLOCK_TOKENS, max(1, limit // most_heads))
    warps = -(-block_t * most_heads * row // budget.elements_per_warp)
    tail = heads.head_dim - 2 * heads.half
    return {
        "HQ": heads.num_q_heads, "HK": heads.num_k_heads, "D": heads.head_dim, "HALF": heads.half,
        "ROUNDING": kind.rounding, "WHOLE_WIDTH": kind.whole_width, "INTERLEAVED": kind.interleaved,
        "LONG_INDEXING": long_indexing, "BLOCK_T": block_t, "BLOCK_HQ": block_hq, "BLOCK_HK": block_hk,
        "BLOCK_HALF": power_of_two_at_least(heads.half), "BLOCK_TAIL": power_of_two_at_least(tail) if tail else 0,
        "num_warps": min(MAX_WARPS, max(MIN_WARPS, power_of_two_at_least(warps))),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ compiling


def _compile_case(
    kernel: Any, element: str, weight: str, heads: Heads, kind: Kind, long_indexing: bool = False, absent: str = ""
) -> CompileCase:
    """`absent` names pointers that are None, separated by spaces."""
    constexprs = specialise(heads, kind, long_indexing, FORWARD if kernel is qk_norm_rope_fwd_kernel else BACKWARD)
    constexprs = constexprs | dict.fromkeys(absent.split())
    constexprs |= {name: 1 for name in kernel.arg_names if name.endswith("_dim_stride")}

    def kind_of(name: str) -> str:
        if name.endswith(("_rstd_ptr", "_partials_ptr", "cos_ptr", "sin_ptr")):
            return "*fp32"
        if name.endswith("_ptr"):
            return f"*{weight if name.endswith('_weight_ptr') else element}"
        if name == "eps":
            return "fp32"
        return "i64" if long_indexing and name.endswith("_stride") else "i32"

    return compile_case(kernel, constexprs, kind_of)


def compile_cases() -> Iterator[CompileCase]:
    """Representative specialisations, for compiling without a GPU (not under TRITON_INTERPRET=1)."""
    llama, gemma = Kind("llama", False, False), Kind("gemma", False, False)
    whole = Kind("fp32_weight", True, False)
    frozen = "q_partials_ptr k_partials_ptr"
    for element, weight, heads, kind, long_indexing, absent in [
        ("bf16", "bf16", Heads(32, 8, 128, 64), llama, False, frozen),
        ("bf16", "bf16", Heads(32, 8, 128, 64), llama, True, ""),
        ("fp32", "fp32", Heads(16, 2, 64, 32), llama, False, ""),
        ("fp16", "fp16", Heads(8, 4, 256, 128), gemma, False, ""),
        ("bf16", "bf16", Heads(28, 4, 80, 16), Kind("llama", False, True), False, "dq_ptr"),
        ("bf16", "bf16", Heads(40, 8, 128, 64), whole, False, ""),
        ("fp32", "fp32", Heads(64, 64, 128, 64), whole, True, ""),
    ]:
        yield _compile_case(qk_norm_rope_fwd_kernel, element, weight, heads, kind, long_indexing)
        yield _compile_case(qk_norm_rope_bwd_kernel, element, weight, heads, kind, long_indexing, absent)
    of_k = "dk_out_ptr k_ptr k_weight_ptr k_rstd_ptr dk_ptr k_partials_ptr"
    yield _compile_case(qk_norm_rope_bwd_kernel, "bf16", "bf16", Heads(32, 0, 128, 64), llama, absent=of_k)
