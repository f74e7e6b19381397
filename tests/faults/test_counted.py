"""A few cases of every group of faults; `python tests/faults/count.py` tries thousands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from count import count, create_together, damaged_checkpoints, damaged_files, failing_calls
from outcome import Outcome


@pytest.mark.parametrize(
    ("group", "cases"),
    [
        (damaged_files, 150),
        (create_together, 16),
        pytest.param(failing_calls, 20, marks=pytest.mark.slow),
        pytest.param(damaged_checkpoints, 20, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost(group: Callable[[int], Outcome], cases: int) -> None:
    outcome = count(group, cases)
    assert outcome.tried >= cases // 2 and not outcome.lost


@pytest.mark.slow
@pytest.mark.parametrize(("group", "cases"), [("killed", 10), ("signalled", 2), ("killed_pair", 1)])
def test_nothing_is_lost_by_signals(group: str, cases: int) -> None:
    """In a process of its own: one that has trained by autograd before cannot be forked."""
    script = Path(__file__).with_name("count.py")
    command = [sys.executable, str(script), "--only", group, "--cases", str(cases)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and f"{cases} cases of {group}" in result.stdout, result.stdout + result.stderr
