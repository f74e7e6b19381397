"""Trackers in a folder of the test's own, offline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Trackio's folder, which it reads when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trackio")
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def offline(trackio_folder: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No account, and no process of wandb after the test."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(elsewhere / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(elsewhere / "wandb-config"))
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
