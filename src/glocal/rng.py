"""One independent random stream per purpose, keyed and not consumed.

A stream is named by what it is for, as in `generator(seed, "challenge", "angle", 3)`, and starts afresh at every call.
Nothing is drawn from a shared stream, so a run never depends on what else was drawn, in which order, or beside which
other runs.

Numbers that a step needs on the device, as many as it happens to need, are a function of a key (`split`, `below`):
integers mixed as SplitMix64 does (Steele, Lea & Flood 2014), the same on every device and under `vmap`.
"""

from __future__ import annotations

from hashlib import sha256

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64, whose sums and products wrap around
MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator whose 63-bit seed is the SHA-256 of its arguments.

    Every argument enters with its type and its length, so that no two different keys spell the same bytes.
    """
    digest = sha256()
    for part in (seed, *names):
        text = str(part).encode()
        digest.update(f"{'s' if isinstance(part, str) else 'i'}{len(text)}:".encode() + text)
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest.digest()[:8], "big") >> 1)


def split(key: Tensor, numbers: int | Tensor) -> Tensor:
    """Other keys, int64, made of a key and one or many numbers: z mixed, z = key + (1 + number) · 2⁶⁴/φ."""
    z = key + (numbers + 1) * GOLDEN if isinstance(numbers, Tensor) else key + _wrapped((numbers + 1) * GOLDEN)
    for shift, factor in MIX:
        z = (z ^ _shifted(z, shift)) * factor
    return z ^ _shifted(z, 31)


def below(bound: int, keys: Tensor) -> Tensor:
    """An integer of {0, …, bound − 1} for every key, uniform but for bound · 2⁻³²."""
    return _shifted(keys, 32) * bound >> 32


def _shifted(z: Tensor, by: int) -> Tensor:
    """z without its last bits, zeros moved in: as unsigned numbers are shifted."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
