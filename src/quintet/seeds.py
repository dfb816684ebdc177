"""Derivation of random seeds."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a non-negative 63-bit seed that is a pure function of `parts`."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
