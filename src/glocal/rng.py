"""One independent random stream per purpose, keyed and not consumed.

A stream is named by what it is for, as in `generator(seed, "challenge", "angle", 3)`, and starts afresh at every call.
Nothing is drawn from a shared stream, so a run never depends on what else was drawn, in which order, or beside which
other runs.

Random numbers inside a step are functions of the step's key, as in JAX: words of the SplitMix64 generator (Steele,
Lea & Flood 2014), the same on every device and under `vmap`. `fold_in` derives a key of its own for every purpose.

>>> key = torch.tensor(7)
>>> uniform(fold_in(key, "dropout"), 3)
tensor([0.1068, 0.5825, 0.4302])
>>> choose(fold_in(key, "examples"), 60_000, 4)
tensor([20651, 23445,  1577, 23229])
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from threading import RLock
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from glocal.errors import GlocalError

Result = TypeVar("Result")
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


GLOBAL_STATE = RLock()
"""Held while torch's global generator or its switches are set: they belong to all threads, so that others wait."""


@contextmanager
def global_generator(stream: torch.Generator, device: torch.device | None = None) -> Iterator[None]:
    """Set torch's global generator, and a GPU's, to a stream, for code that draws from nothing else, as constructors of
    modules do."""
    gpus = [device] if device is not None and device.type == "cuda" else []
    with GLOBAL_STATE, torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(stream.initial_seed())
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(stream.initial_seed())
        yield


def seeded_only(function: Callable[[], Result], part: str, source: str) -> Result:
    """Call a function; raise an error if `part`, its code, draws from Python's or numpy's global generator."""
    for _ in range(2):  # another thread may have drawn the first time
        before = pickle.dumps((random.getstate(), np.random.get_state()))
        result = function()
        if pickle.dumps((random.getstate(), np.random.get_state())) == before:
            return result
    raise GlocalError(
        f"{part} draws from Python's random or numpy's global generator, so that runs would depend on each other and "
        f"could not be repeated: draw from {source}."
    )


def fold_in(key: Tensor, purpose: str) -> Tensor:
    """Return the key of a purpose, such as "dropout": the key plus a hash of the name.

    It starts SplitMix64's sequence elsewhere. Sequences of two purposes overlap with probability n · 2⁻⁶³ for n words.
    """
    return key + int.from_bytes(sha256(purpose.encode()).digest()[:8], "big", signed=True)


def split(key: Tensor, numbers: int | Tensor) -> Tensor:
    """Return other keys, int64, made of a key and one or many numbers: z mixed, z = key + (1 + number) · 2⁶⁴/φ."""
    step = (numbers + 1) * GOLDEN
    z = key + (step if isinstance(step, Tensor) else (step + (1 << 63)) % (1 << 64) - (1 << 63))  # a product of 64 bits
    for shift, factor in MIX:
        z = _xor_shifted(z, shift).mul_(factor)
    return _xor_shifted(z, 31)


def words(key: Tensor, n: int, start: int = 0) -> Tensor:
    """Return n words of SplitMix64 started at the key: uniform over all 64-bit integers, as int64."""
    return split(key, torch.arange(start, start + n, device=key.device))


def uniform(key: Tensor, n: int, start: int = 0) -> Tensor:
    """Return n uniform random numbers in [0, 1), float32: the upper 24 bits of every word."""
    return _shifted(words(key, n, start), 40).float().mul_(2.0**-24)


def choose(key: Tensor, n: int, count: int) -> Tensor:
    """Return `count` of the integers 0, …, n − 1, all if there are fewer, without replacement and in random order."""
    return words(key, n).topk(min(count, n)).indices  # 64-bit words practically never tie


def below(bound: int | Tensor, words: Tensor) -> Tensor:
    """Return an integer of {0, …, bound − 1} for every word, uniform up to bound · 2⁻³²; bound is less than 2³¹."""
    return _shifted(words, 32) * bound >> 32


def _shifted(z: Tensor, by: int) -> Tensor:
    """Return z shifted to the right as an unsigned number: zeros are moved in."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _xor_shifted(z: Tensor, by: int) -> Tensor:
    return _shifted(z, by).bitwise_xor_(z)
