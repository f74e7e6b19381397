"""Tests of the Triton kernels: on a GPU, or on a CPU in Triton's interpreter with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def device() -> str:
    """The device that kernels run on."""
    if INTERPRETED:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    return "cuda"


@pytest.fixture
def gpu(device: str) -> str:
    if device != "cuda":
        pytest.skip("needs a GPU")
    return device
