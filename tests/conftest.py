"""Shared by all tests: one thread each, for tests run side by side; none touches the user's data, cache or folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import glocal  # noqa: F401  (first: it asks for reproducible products before any are computed)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """For tests of what must not depend on how work is split."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of the test's own, with an empty cache and no data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GLOCAL_DATA", raising=False)
    return tmp_path
