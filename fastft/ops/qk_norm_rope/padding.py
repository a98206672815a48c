"""How large a row is in a program. Known without Triton."""

from __future__ import annotations

from ..tiles import power_of_two_at_least


def padded_row(head_dim: int, half: int) -> int:
    """Elements of a head: the two sides of its rotary pairs, and what is not rotated."""
    tail = head_dim - 2 * half
    return 2 * power_of_two_at_least(half) + (power_of_two_at_least(tail) if tail else 0)
