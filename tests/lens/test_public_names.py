"""The public names of the lens exist, and the example in its docstring runs."""

from __future__ import annotations

import doctest

import glocal.lens


def test_public_names_exist() -> None:
    assert all(hasattr(glocal.lens, name) for name in glocal.lens.__all__)


def test_the_example_runs() -> None:
    result = doctest.testmod(glocal.lens)
    assert result.attempted > 5 and result.failed == 0
