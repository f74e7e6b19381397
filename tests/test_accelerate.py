"""The seams of `glocal.accelerate`, and that the core does without `glocal.fast`."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import glocal
from glocal import accelerate

SOURCE = Path(glocal.__file__).parent


@accelerate.accelerated("layers.test")
def double(x: int) -> int:
    return 2 * x


def fast_double(x: int) -> int:
    """Not the same result, to see which one was called."""
    return 2 * x + 1000 if x > 10 else NotImplemented


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(accelerate, "_targets", {})
    yield


def test_a_function_is_plain_until_an_acceleration_is_registered(registry: None) -> None:
    assert double(11) == 22 and accelerate.find("layers.test") is None
    accelerate.register("layers.test", f"{__name__}:fast_double")
    assert double(11) == 1022
    assert double(3) == 6  # the acceleration does not apply


def test_every_registered_acceleration_has_a_seam() -> None:
    for name, target in accelerate._targets.items():
        assert re.fullmatch(r"(step|products|layers)\.\w+", name), name
        assert target.startswith("glocal.fast."), target
