"""Random streams of one's own."""

from __future__ import annotations

import hashlib


def stream_seed(name: str, seed: int, number: int) -> int:
    """The seed of the `number`-th draw of the stream `name` under `seed`, 63 bits.

    A hash, so that neighbours and namesakes get unrelated streams, and so that the low half differs: torch's
    CPU generator looks at no more than 32 bits of a seed.

    Example:
        >>> stream_seed("split", 0, 0) % 2**32 != stream_seed("split", 0, 1) % 2**32
        True
    """
    digest = hashlib.blake2b(f"{name}/{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
