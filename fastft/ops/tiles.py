"""How much a program holds, where sizes are powers of two. Known without Triton."""

from __future__ import annotations


def power_of_two_at_least(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def heads_a_tile(heads: int, limit: int) -> int:
    """The power of two that leaves the fewest empty rows in the last tile; the largest one if several do.

    Args:
        heads: of q or of k; zero if there are none.
        limit: the most heads that a tile may have, a power of two.
    """
    largest = min(power_of_two_at_least(heads), limit)
    candidates = [largest >> shift for shift in range(3) if largest >> shift]
    return min(candidates, key=lambda block: -(-heads // block) * block) if heads else 1
