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
        (failing_calls, 6),
        (damaged_files, 150),
        (create_together, 16),
        *(
            pytest.param(group, cases, marks=pytest.mark.slow)
            for group, cases in ((failing_calls, 50), (damaged_files, 1_000), (damaged_checkpoints, 50))
        ),
    ],
)
def test_nothing_is_lost(group: Callable[[int], Outcome], cases: int) -> None:
    outcome = count(group, cases)
    assert outcome.tried >= cases // 2 and not outcome.lost


@pytest.mark.slow
@pytest.mark.parametrize(("group", "cases"), [("killed", 20), ("signalled", 5), ("killed_pair", 1)])
def test_nothing_is_lost_by_signals(group: str, cases: int) -> None:
    """In a process of its own: one that has trained by autograd before cannot be forked."""
    script = Path(__file__).with_name("count.py")
    command = [sys.executable, str(script), "--only", group, "--cases", str(cases)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and f"{cases} cases of {group}" in result.stdout, result.stdout + result.stderr
