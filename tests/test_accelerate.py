"""The seams of `glocal.accelerate`."""

from __future__ import annotations

import doctest
import re

import pytest

from glocal import accelerate, networks
from glocal.fast import TRITON
from glocal.networks import hat


@accelerate.accelerated("layers.test")
def double(x: int) -> int:
    return 2 * x


def fast_double(x: int) -> int:
    """Return something else for x > 10, to see which function was called."""
    return 2 * x + 1000 if x > 10 else NotImplemented


def test_a_function_is_plain_until_an_acceleration_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "_targets", {})
    assert double(11) == 22 and accelerate.find("layers.test") is None
    accelerate.register("layers.test", f"{__name__}:fast_double")
    assert double(11) == 1022
    assert double(3) == 6  # the acceleration does not apply


def test_every_registered_acceleration_has_a_seam() -> None:
    for name, target in {**TRITON, **accelerate._targets}.items():
        assert re.fullmatch(r"(step|products|layers)\.\w+", name), name
        assert target.startswith("glocal.fast."), target


@pytest.mark.parametrize("module", [accelerate, networks, hat])
def test_examples_in_docstrings(module: object) -> None:
    results = doctest.testmod(module)  # type: ignore[arg-type]
    assert results.attempted and not results.failed
