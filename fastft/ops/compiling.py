"""Specialisations of kernels that are compiled without a GPU, to see whether every architecture takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class CompileCase(NamedTuple):
    """What `triton.compiler.ASTSource` needs, and the number of warps."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int


def compile_case(kernel: Any, constants: Mapping[str, Any], kind: Callable[[str], str]) -> CompileCase:
    """A kernel with `constants` in place of some arguments.

    Args:
        kernel: decorated by `triton.jit`.
        constants: constexprs and launch options (num_warps ...), as they are given at a launch, strides that are one
            and pointers that are None.
        kind: Triton's type for an argument that is none of these, by its name: "*bf16", "i32".
    """
    constexprs = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constexprs else kind(name) for name in kernel.arg_names}
    return CompileCase(kernel, signature, constexprs, constants["num_warps"])
