"""The examples in docstrings run, and the public list of names is what they use."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

from glocal import curvature


@pytest.mark.parametrize("name", ["glocal.risk", "glocal.curvature", "glocal.losses"])
def test_examples_run(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0 and results.failed == 0


def test_public_names_exist_and_are_sorted() -> None:
    assert curvature.__all__ == sorted(curvature.__all__)
    assert all(hasattr(curvature, name) for name in curvature.__all__)
