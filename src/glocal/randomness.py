"""One independent random stream per purpose, keyed and not consumed.

A stream is named by what it is for, as in `generator(seed, "challenge", "angle", 3)`, and starts afresh at every call.
Nothing is drawn from a shared stream, so a run never depends on what else was drawn, in which order, or beside which
other runs.
"""

from __future__ import annotations

from hashlib import sha256

import torch


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator whose 63-bit seed is the SHA-256 of its arguments.

    Every argument enters with its type and its length, so that no two different keys spell the same bytes.
    """
    digest = sha256()
    for part in (seed, *names):
        text = str(part).encode()
        digest.update(f"{'s' if isinstance(part, str) else 'i'}{len(text)}:".encode() + text)
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest.digest()[:8], "big") >> 1)
