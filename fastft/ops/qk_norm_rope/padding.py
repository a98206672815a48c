"""How large a row is in a program, where sizes are powers of two. Known without Triton."""

from __future__ import annotations


def power_of_two_at_least(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def padded_row(head_dim: int, half: int) -> int:
    """Elements of a head: the two sides of its rotary pairs, and what is not rotated."""
    tail = head_dim - 2 * half
    return 2 * power_of_two_at_least(half) + (power_of_two_at_least(tail) if tail else 0)
