"""Random streams of one's own."""

from __future__ import annotations


def stream_seed(seed: int, number: int) -> int:
    """The seed of the `number`-th stream under `seed`, 63 bits.

    One round of splitmix64 (Steele, Lea and Flood, 2014), so that neighbours get unrelated streams, and so
    that the low half differs: torch's CPU generator looks at no more than 32 bits of a seed.

    Example:
        >>> stream_seed(0, 0) % 2**32 != stream_seed(0, 1) % 2**32
        True
    """
    x = (seed * 0x9E3779B97F4A7C15 + number + 1) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) >> 1
