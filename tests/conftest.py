"""Shared by all tests: two threads, whatever the machine; no test touches the user's data, cache or working folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import glocal  # noqa: F401  (first: it asks for reproducible products before any are computed)


@pytest.fixture(autouse=True, scope="session")
def two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of the test's own, with an empty cache and no data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GLOCAL_DATA", raising=False)
    return tmp_path
