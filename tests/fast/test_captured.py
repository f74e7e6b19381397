"""Executors with CUDA graphs capture whatever their notes say, and stop trying after a failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glocal.fast.cuda_graph import captured


def test_only_a_failure_stops_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    executor: Any = SimpleNamespace(capturable=True, note="in one CUDA graph per run, because of something else")
    assert captured(executor, lambda: [1, 2]) == [1, 2]

    def fail() -> list[int]:
        raise RuntimeError("operation not permitted when stream is capturing")

    assert captured(executor, fail) == [] and "not permitted" in executor.note
    assert captured(executor, lambda: [1, 2]) == [], "it is not tried again"
