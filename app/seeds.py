"""Seeds of requests that bring none, and of the choices of one request."""

from __future__ import annotations

import hashlib
import secrets


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of `n` choices: the first one's is the request's own."""
    if choice == 0:
        return seed % 2**64
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def random_seed() -> int:
    """A seed for a request that has none: fixed at the door, so that a replay draws the same."""
    return secrets.randbits(63)
